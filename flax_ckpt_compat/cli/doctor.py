"""Define ``flax-ckpt doctor``: what a bug report needs; changes nothing."""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import sys
from importlib import metadata

import click

from flax_ckpt_compat import __version__
from flax_ckpt_compat._core.errors import SettingError
from flax_ckpt_compat._core.location import of_text
from flax_ckpt_compat._core.text_formatting import counted, printable
from flax_ckpt_compat._discovery import hints
from flax_ckpt_compat._patching import installed_in_flax
from flax_ckpt_compat._view.report import Line, Report

from ._command_base import Command, json_option, path_argument, print_report

_NEEDED = ("jax", "jaxlib", "flax", "tensorstore", "msgpack", "ml_dtypes", "etils", "numpy", "rich", "click")
_OPTIONAL = ("orbax-checkpoint", "optax", "google-crc32c", "safetensors")
_FLAG = "FLAX_USE_ORBAX_CHECKPOINTING"


@click.command(
    cls=Command,
    examples="""
flax-ckpt doctor
flax-ckpt doctor runs/a s3://bucket/runs     also: can these be listed
flax-ckpt run -m flax_ckpt_compat doctor     inside of flax-ckpt run
""",
)
@path_argument("paths", metavar="[PATH]...", nargs=-1)
@json_option("JSON")
def command(paths: tuple[str, ...], *, as_json: bool) -> bool:
    """Say whether the shim is active here; then versions, Flax's flag, settings, and whether PATHs can be listed.

    Exit code 1 if something is wrong: a library is missing or fails to import, an environment variable has a value that
    its setting does not take, or a PATH does not exist or cannot be listed.
    """
    problems: list[str] = []
    settings = _settings(problems)
    flax = _flax(problems)  # first, whether the shim is active
    sections = {"Flax": flax, "Versions": _versions(problems), "Settings": settings}
    if paths:
        sections["Paths"] = {path: _listed(path, problems) for path in paths}
    lines = []
    for title, values in sections.items():
        lines += [Line(title, "bold"), *(Line(f"  {name:<28} {value}", hang=31) for name, value in values.items())]
    shown = [Line(f"Problem: {problem}", "red", hang=2) for problem in problems]
    return print_report(Report(lines, lambda: sections, shown, found=bool(problems)), as_json=as_json)


def _settings(problems: list[str]) -> dict[str, str]:
    """Return the settings that differ from their defaults; a wrong one in the environment fails the import of all."""
    try:
        from flax_ckpt_compat import config
    except SettingError as error:
        problems.append(printable(str(error)))
        return {"all": "cannot be read"}
    settings, defaults = dataclasses.asdict(config.current()), dataclasses.asdict(config.Settings())
    changed = {name: str(value) for name, value in settings.items() if value != defaults[name]}
    return changed or {"all": "defaults"}


def _versions(problems: list[str]) -> dict[str, str]:
    found = {"flax-ckpt-compat": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    found["platform"] = platform.platform()
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
            if name in _NEEDED:
                problems.append(f"{name} is not installed: pip install {name}")
    return found


def _flax(problems: list[str]) -> dict[str, str]:
    try:
        is_set = f"{_FLAG}={os.environ[_FLAG]}" if _FLAG in os.environ else "not in the environment"
        return {"flax.training.checkpoints": _shim(), "flax_use_orbax_checkpointing": f"{_flag()} ({is_set})"}
    except Exception as error:  # noqa: BLE001 - reported
        problems.append(f"{type(error).__name__} when Flax was imported: {error}")
        return {}


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
    try:
        from flax_ckpt_compat import config
    except SettingError:  # reported with the settings
        return "not read"
    return str(config.use_orbax_format())


def _listed(url: str, problems: list[str]) -> str:
    try:
        location = of_text(url)
        if not location.isdir():
            if location.isfile():
                return "a file"
            if location.is_remote:
                return "reachable; nothing there"
            beside = hints.beside(location)
            problems.append(f"{printable(url)} does not exist{'; ' + beside if beside else ''}")
            return "does not exist"
        return f"reachable, {counted(len(location.listdir()), 'name')}"
    except Exception as error:  # noqa: BLE001 - reported
        problems.append(printable(f"{url} cannot be listed: {error}"))
        return f"{type(error).__name__}"
