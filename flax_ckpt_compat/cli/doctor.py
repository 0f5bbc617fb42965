"""Define ``flax-ckpt doctor``: what a bug report needs; changes nothing."""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

import click

from flax_ckpt_compat import __version__, config
from flax_ckpt_compat._core.location import of_text
from flax_ckpt_compat._core.text_formatting import counted, printable
from flax_ckpt_compat._discovery import hints

from ._command_base import Command, echo, json_option, path_argument, print_json

_NEEDED = ("jax", "jaxlib", "flax", "tensorstore", "msgpack", "ml_dtypes", "etils", "numpy", "rich", "click")
_OPTIONAL = ("orbax-checkpoint", "optax", "google-crc32c", "safetensors", "libcst", "distributed")
_FLAG = "FLAX_USE_ORBAX_CHECKPOINTING"
_LEGACY = "flax.training.checkpoints"


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
    """Print what a bug report needs: versions, Flax's flag, settings, what is patched, and whether PATHs can be listed.

    Exit code 1 if something is wrong: a library is missing or fails to import, or a PATH does not exist or cannot be
    listed.
    """
    report = examine(paths)
    if as_json:
        print_json(report.sections)
    else:
        for title, values in report.sections.items():
            click.secho(title, bold=True)
            for name, value in values.items():
                echo(f"  {name:<28} {value}", f"{'':31}")
    for problem in report.problems:
        echo(f"Problem: {problem}", "  ", fg="red", err=True)
    return bool(report.problems)


@dataclasses.dataclass
class Report:
    """Titles with names and values, and the problems that were found."""

    sections: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def examine(urls: Sequence[str]) -> Report:
    """Look at versions, the flag, settings, patches, and whether paths can be listed."""
    report = Report()
    report.sections["Versions"] = _versions(report)
    report.sections["Flax"] = _flax(report)
    settings, defaults = dataclasses.asdict(config.current()), dataclasses.asdict(config.Settings())
    changed = {name: str(value) for name, value in settings.items() if value != defaults[name]}
    report.sections["Settings"] = changed or {"all": "defaults"}
    if urls:
        report.sections["Paths"] = {url: _listed(url, report) for url in urls}
    return report


def _versions(report: Report) -> dict[str, str]:
    found = {"flax-ckpt-compat": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    found["platform"] = platform.platform()
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
            if name in _NEEDED:
                report.problems.append(f"{name} is not installed: pip install {name}")
    return found


def _flax(report: Report) -> dict[str, str]:
    try:
        is_set = f"{_FLAG}={os.environ[_FLAG]}" if _FLAG in os.environ else "not in the environment"
        found = {"flax_use_orbax_checkpointing": f"{config.use_orbax_format()} ({is_set})"}
        try:
            saves = importlib.import_module(_LEGACY).save_checkpoint
            # Importing ours to compare would take a fifth of the start.
            is_ours = saves.__module__.startswith("flax_ckpt_compat.")
            found[_LEGACY] = "patched: ours" if is_ours else "Flax's own; not patched"
        except ImportError as error:
            found[_LEGACY] = f"cannot be imported ({error}); install() puts ours in its place"
    except Exception as error:  # noqa: BLE001 - reported
        report.problems.append(f"{type(error).__name__} when Flax was imported: {error}")
        return {}
    return found


def _listed(url: str, report: Report) -> str:
    try:
        location = of_text(url)
        if not location.isdir():
            if location.isfile():
                return "a file"
            if location.is_remote:
                return "reachable; nothing there"
            beside = hints.beside(location)
            report.problems.append(f"{printable(url)} does not exist{'; ' + beside if beside else ''}")
            return "does not exist"
        return f"reachable, {counted(len(location.listdir()), 'name')}"
    except Exception as error:  # noqa: BLE001 - reported
        report.problems.append(printable(f"{url} cannot be listed: {error}"))
        return f"{type(error).__name__}"
