"""List the checkpoints of a directory by names and sizes, without opening them or importing jax or flax."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import click

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.errors import CheckpointNotFoundError
from flax_ckpt_compat._core.escaping import aligned, format_size, printable
from flax_ckpt_compat._discovery import absence, detect, listing
from flax_ckpt_compat._view.inventory import UNKNOWN_FORMAT, CheckpointRecord, iter_checkpoints

from ._hints import next_step

_HEADINGS = ("step", "format", "size", "saved", "state", "name")
_NO_TIME = "-"


class _Row(NamedTuple):
    """A checkpoint's record, and the modification time of its file or directory, if known."""

    record: CheckpointRecord
    saved: datetime.datetime | None


def show(directory: str, prefix: str, *, as_json: bool) -> None:
    """Print the checkpoints of a directory; see `flax_ckpt_compat.cli.ls`.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    checkpoint_dir = listing.checkpoint_dir(directory, prefix)
    rows = [_Row(record, _saved(record.path)) for record in iter_checkpoints(directory, prefix)]
    empty_reason = None if rows else _empty_reason(checkpoint_dir, prefix)
    if as_json:
        click.echo(json.dumps([_as_json(row) for row in rows], indent=2))
    elif empty_reason is not None:
        click.echo(printable(empty_reason))
    elif sys.stdout.isatty():
        _show_table(rows)
    else:
        click.echo("\n".join(aligned([_HEADINGS, *map(_cells, rows)], right={0, 2})))


def _saved(path: str) -> datetime.datetime | None:
    if not paths.is_url(path):
        with suppress(FileNotFoundError):  # another process has just removed it
            return datetime.datetime.fromtimestamp(os.stat(paths.local(path)).st_mtime, datetime.UTC)
    return None


def _empty_reason(checkpoint_dir: listing.CheckpointDir, prefix: str) -> str:
    """Return why a directory has no checkpoints.

    Raises:
        CheckpointNotFoundError: it is not a directory, or is a checkpoint itself.
    """
    path = checkpoint_dir.directory
    if not paths.isdir(path):
        if paths.lexists(path):
            remedy = f"pass the directory that holds the checkpoints, perhaps {os.path.dirname(path)}"
            raise CheckpointNotFoundError(f"{path} is not a directory: {remedy}", path=path)
        near = absence.near_directory(path)
        remedy = f": did you mean {near}?" if near else ""
        raise CheckpointNotFoundError(f"the directory {path} does not exist{remedy}", path=path)
    if detect.is_orbax_directory(path) and not detect.has_no_orbax_marker(path):
        message = f"{path} is one checkpoint, not a directory of them: list {os.path.dirname(path)}"
        raise CheckpointNotFoundError(message, path=path)
    if not paths.is_url(path) and not os.listdir(path):
        return f"{path} is empty. {next_step(path)}"
    why = absence.of_checkpoints(checkpoint_dir, prefix).why
    return why if "did you mean" in why else f"{why}. {next_step(path)}".rstrip(" ")


def _as_json(row: _Row) -> dict[str, Any]:
    record, saved = row
    return {
        "name": os.path.basename(record.path),
        "step": record.step,
        "path": record.path,
        "format": record.format,
        "nbytes": record.nbytes,
        "saved": saved and saved.isoformat(timespec="seconds"),
        "complete": record.complete,
        "why": record.why,
    }


def _cells(row: _Row) -> tuple[str, ...]:
    record, saved = row
    name = os.path.basename(record.path)
    step = _NO_TIME if record.step is None else str(record.step)
    when = saved.astimezone().isoformat(" ", "seconds")[: len("2026-01-01 00:00:00")] if saved else _NO_TIME
    state = "complete" if record.complete else f"incomplete: {record.why}"
    if record.format == UNKNOWN_FORMAT:
        state = str(record.why)
    cells = step, record.format, format_size(record.nbytes), when, state, name
    return tuple(printable(cell, one_line=True) for cell in cells)


def _show_table(rows: Sequence[_Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for heading in _HEADINGS:
        right, long = heading in ("step", "size"), heading in ("state", "name")
        table.add_column(heading, justify="right" if right else "left", overflow="fold", no_wrap=not long)
    for row in rows:
        table.add_row(*map(Text, _cells(row)), style=None if row.record.complete else "yellow")
    Console(highlight=False).print(table)
