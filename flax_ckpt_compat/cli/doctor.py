"""Define ``flax-ckpt doctor``: what a bug report needs; changes nothing."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from flax_ckpt_compat import __version__
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.text_formatting import counted, printable
from flax_ckpt_compat._discovery import locating
from flax_ckpt_compat._patching import installed_in_flax
from flax_ckpt_compat._view.report import Line, Report

from . import _command_base as base

_NEEDED = ("jax", "flax", "tensorstore", "msgpack", "zstandard", "crc32c", "ml_dtypes", "etils", "numpy", "rich")
_OTHERS = ("jaxlib", "click", "orbax-checkpoint", "optax", "s3fs", "gcsfs", "adlfs", "huggingface_hub", "safetensors")
_FLAG = "FLAX_USE_ORBAX_CHECKPOINTING"


@base.command("""
flax-ckpt doctor
flax-ckpt doctor runs/a s3://bucket/runs     also: can these be listed
flax-ckpt run -m flax_ckpt_compat doctor     inside of flax-ckpt run
""")
@base.path_argument("paths", metavar="[PATH]...", nargs=-1)
@base.json_option("JSON")
def command(paths: tuple[str, ...], *, as_json: bool) -> bool:
    """Print what a bug report needs. First whether the shim is active; then versions, Flax's flag, settings, PATHs.

    Exit code 1 if something is wrong: a library does not import, a variable is refused, a PATH cannot be listed.
    """
    problems: list[str] = []
    flax = {"flax.training.checkpoints": _shim, "flax_use_orbax_checkpointing": _flag}
    sections = {
        "Flax": {name: _tried(look, problems) or "failed" for name, look in flax.items()},
        "Versions": _versions(problems),
        "Settings": _tried(_settings, problems) or {"all": "cannot be read"},
    }
    if paths:
        sections["Paths"] = {path: _tried(functools.partial(_listed, path), problems) or "failed" for path in paths}
    lines = []
    for title, values in sections.items():
        lines += [Line(title, "bold"), *(Line(f"  {name:<28} {value}", hang=31) for name, value in values.items())]
    shown = [Line(f"Problem: {printable(problem)}", "red", hang=2) for problem in dict.fromkeys(problems)]
    return base.print_report(Report(lines, lambda: sections, shown, found=bool(problems)), as_json=as_json)


def _tried(look: Callable[[], Any], problems: list[str]) -> Any:
    """Return what a look finds; None if it fails, which is a problem."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001  (reported)
        problems.append(str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
        return None


def _shim() -> str:
    """Return whose functions a program gets that is started like this one."""
    if installed_in_flax():
        return "ours: the shim is active in this environment"
    try:
        importlib.import_module("flax.training.checkpoints")
    except ImportError as error:
        return f"cannot be imported ({error}); install() puts ours in its place"
    return "Flax's own: the shim is not active here; flax-ckpt run, PYTHONPATH or install() activates it"


def _flag() -> str:
    from flax_ckpt_compat import config  # its import fails for a wrong variable, as that of the whole library does

    is_set = f"{_FLAG}={os.environ[_FLAG]}" if _FLAG in os.environ else "not in the environment"
    return f"{config.use_orbax_format()} ({is_set})"


def _settings() -> dict[str, str]:
    """Return the settings that differ from their defaults."""
    from flax_ckpt_compat import config

    settings, defaults = dataclasses.asdict(config.current()), dataclasses.asdict(config.Settings())
    return {name: str(value) for name, value in settings.items() if value != defaults[name]} or {"all": "defaults"}


def _versions(problems: list[str]) -> dict[str, str]:
    found = {"flax-ckpt-compat": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    found["platform"] = platform.platform()
    for name in (*_NEEDED, *_OTHERS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
            problems += [f"{name} is not installed: pip install {name}"] * (name in _NEEDED)
    return found


def _listed(url: str) -> str:
    location = location_of(url)
    if location.isdir():
        return f"reachable, {counted(len(location.listdir()), 'name')}"
    if location.is_remote or location.isfile():
        return "a file" if location.isfile() else "reachable; nothing there"
    raise locating.absent(location).error(location)
