"""Define ``flax-ckpt ls``: checkpoints by names and sizes, unless leaves are asked for; without jax or flax."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from flax_ckpt_compat._core.errors import CheckpointNotFoundError, StorageError
from flax_ckpt_compat._core.text_formatting import aligned, format_size, printable
from flax_ckpt_compat._discovery import contents, hints, not_found, saved_steps
from flax_ckpt_compat._view.inventory import iter_checkpoints

from ._command_base import (
    Command,
    FailedError,
    echo,
    is_terminal,
    json_option,
    make_console,
    path_argument,
    prefix_option,
    print_json,
)
from ._hints import next_step
from ._ls_folders import Folder, Row, folder_of, folders_below

_RIGHT = {"step", "leaves", "size", "age"}
_NO_VALUE = "-"
_UNITS = (("y", 31_557_600), ("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))  # seconds


@click.command(
    cls=Command,
    examples="""
flax-ckpt ls runs/a
flax-ckpt ls runs --recursive
flax-ckpt ls runs/a --prefix model_ --leaves
flax-ckpt ls gs://bucket/runs/a --json
""",
)
@path_argument("directory")
@prefix_option
@click.option("-r", "--recursive", is_flag=True, help="List all directories below too, with checkpoints of any prefix.")
@click.option("--leaves", is_flag=True, help="Open each checkpoint and count its leaves.")
@json_option("a JSON list, with sizes in bytes and times in UTC")
def command(directory: str, prefix: str, *, recursive: bool, leaves: bool, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY: a path, or an s3:// or gs:// URL.

    Shows step, format, size, when it was saved, and whether it is complete or why not; then, apart, what is
    no checkpoint despite its name, and what interrupted saves left. Without --leaves nothing is opened: what looks
    complete may still be damaged. Object stores give no times.

    Exit code 2 if DIRECTORY cannot be listed.
    """
    checkpoint_dir = saved_steps.checkpoint_dir(directory, prefix)
    denied: list[StorageError] = []
    if recursive and checkpoint_dir.directory.isdir():
        folders = folders_below(checkpoint_dir, denied, leaves=leaves)
    else:
        folders = [folder_of(checkpoint_dir, iter_checkpoints(directory, prefix), leaves=leaves)]
    has_any = any(one.rows or one.strangers for one in folders)
    # Raises for what is not a directory of checkpoints.
    empty_reason = None if has_any else _empty_reason(checkpoint_dir, recursive=recursive)
    if as_json:
        print_json([record for folder in folders for record in _as_json(folder)])
    elif empty_reason is not None:
        echo(printable(empty_reason))
    for number, folder in enumerate(folders if not as_json else ()):
        if recursive:
            click.echo(("\n" if number else "") + printable(f"{folder.shown}:", one_line=True))
        _show_folder(folder, leaves=leaves)
    if denied:
        raise FailedError(printable("\n".join(map(str, denied))))


def _empty_reason(checkpoint_dir: saved_steps.CheckpointDir, *, recursive: bool) -> str:
    """Return why a directory has no checkpoints; raise if it is not a directory, or a checkpoint itself."""
    path = checkpoint_dir.directory
    if not path.isdir():
        raise not_found.no_directory(path).error(path)
    if contents.is_certainly_orbax(path):
        message = f"{path} is one checkpoint, not a directory of them: list {path.parent}"
        raise CheckpointNotFoundError(message, path=path.path, has_remedy=True)
    if not path.is_remote and not path.listdir():
        return f"{path} is empty. {next_step(path)}"
    absent = not_found.of_checkpoints(checkpoint_dir)
    if recursive:
        return f"{absent}, and none is below it"
    if not absent.remedy:
        return f"{absent}. {next_step(path, '; list them with --recursive')}".rstrip(" ")
    return f"{absent}; --recursive lists all below it" if hints.checkpoints_below(path) else str(absent)


def _as_json(folder: Folder) -> list[dict[str, Any]]:
    checkpoints = [("checkpoint", row) for row in folder.rows] + [("stranger", row) for row in folder.strangers]
    found: list[dict[str, Any]] = [
        {
            "kind": kind,
            "name": os.path.basename(record.path),
            "step": record.step,
            "path": record.path,
            "format": record.format,
            "leaves": leaves,
            "nbytes": record.nbytes,
            "saved": saved and saved.isoformat(timespec="seconds"),
            "complete": record.complete and problem is None,
            "why": record.why or problem,
        }
        for kind, (record, saved, leaves, problem) in checkpoints
    ]
    left = (
        {"kind": "leftover", "path": one.location.path, "nbytes": one.nbytes, "why": one.what} for one in folder.left
    )
    return [*found, *left]


def _show_folder(folder: Folder, *, leaves: bool) -> None:
    if folder.rows:
        headings = ["step", "format", *(["leaves"] if leaves else []), "size", "saved", "age", "state", "name"]
        rows = [[cells[heading] for heading in headings] for cells in map(_cells, folder.rows)]
        if is_terminal(sys.stdout):
            _show_table(headings, rows, [row.record.complete and row.problem is None for row in folder.rows])
        else:
            right = {number for number, heading in enumerate(headings) if heading in _RIGHT}
            click.echo("\n".join(aligned([headings, *rows], right)))
    _show_apart(
        "Cannot be opened:", [(row.record.path, row.record.nbytes, row.problem) for row in folder.rows if row.problem]
    )
    apart = [(row.record.path, row.record.nbytes, str(row.record.why)) for row in folder.strangers]
    _show_apart("Named like checkpoints:", apart)
    _show_apart(
        f"Left by interrupted saves (flax-ckpt clean {folder.shown}):",
        [(one.location.path, one.nbytes, f"{one.what}; {one.kept}" if one.kept else one.what) for one in folder.left],
    )


def _show_apart(heading: str, found: Sequence[tuple[str, int, str]]) -> None:
    if found:
        echo(printable(heading, one_line=True), "  ")
    for path, nbytes, what in found:
        line = f"  {format_size(nbytes):>8}  {os.path.basename(path)}: {what}"
        echo(printable(line, one_line=True), "    ")


def _cells(row: Row) -> dict[str, str]:
    """Return heading → text."""
    record, saved, leaves, problem = row
    state = "complete" if record.complete else f"incomplete: {record.why}"
    cells = {
        "step": _NO_VALUE if record.step is None else str(record.step),
        "format": record.format,
        "leaves": _NO_VALUE if leaves is None else str(leaves),
        "size": format_size(record.nbytes),
        "saved": saved.astimezone().isoformat(" ", "seconds")[: len("2026-01-01 00:00:00")] if saved else _NO_VALUE,
        "age": _age(saved) if saved else _NO_VALUE,
        "state": state if problem is None else "cannot be opened",
        "name": os.path.basename(record.path),
    }
    return {heading: printable(cell, one_line=True) for heading, cell in cells.items()}


def _age(saved: datetime.datetime) -> str:
    seconds = max(0.0, (datetime.datetime.now(datetime.UTC) - saved).total_seconds())
    unit, length = next((one for one in _UNITS if seconds >= 2 * one[1]), _UNITS[-1])
    return f"{seconds // length:.0f} {unit}"


def _show_table(headings: Sequence[str], rows: Sequence[Sequence[str]], good: Sequence[bool]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    # Between narrow columns there is no room for two forms of the time.
    dropped = None if console.width >= 100 else "saved" if "leaves" in headings else "age"
    shown = [n for n, heading in enumerate(headings) if heading != dropped]
    table = Table(box=box.SIMPLE_HEAD)
    for heading in (headings[n] for n in shown):
        long = heading in ("state", "name")
        table.add_column(heading, justify="right" if heading in _RIGHT else "left", overflow="fold", no_wrap=not long)
    for row, is_good in zip(rows, good, strict=True):
        table.add_row(*(Text(row[n]) for n in shown), style=None if is_good else "yellow")
    console.print(table)
