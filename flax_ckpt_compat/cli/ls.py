"""Define ``flax-ckpt ls``: checkpoints by names and sizes, unless leaves are asked for; without jax or flax."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

import click

from flax_ckpt_compat._core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from flax_ckpt_compat._core.location import Location, of_text
from flax_ckpt_compat._core.text_formatting import format_size, printable
from flax_ckpt_compat._discovery import contents, hints, not_found, saved_steps, walk
from flax_ckpt_compat._discovery.contents import State
from flax_ckpt_compat._save.interrupted_saves import Leftover, in_folder
from flax_ckpt_compat._view.inventory import UNKNOWN_FORMAT, CheckpointRecord, iter_checkpoints
from flax_ckpt_compat._view.report import Line, Report, Table

from ._command_base import Command, FailedError, json_option, path_argument, prefix_option, print_report

# The prefix ends in a separator: pi0 is not step 0. A sign belongs to the number only after another one: the dash of
# ckpt-3 belongs to the prefix.
_NUMBERED = re.compile(r"(.*?[^0-9A-Za-z])[-+]?\d[\d.eE+-]*", re.DOTALL)
_RIGHT = {"step", "leaves", "size", "age"}
_NO_VALUE = "-"
_UNITS = (("y", 31_557_600), ("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))  # seconds


class Row(NamedTuple):
    """A checkpoint."""

    record: CheckpointRecord  # by names and sizes
    saved: datetime.datetime | None  # modification time of its file or directory, if known
    leaves: int | None = None  # how many it has, if it was opened
    problem: str | None = None  # why it cannot be opened, or None


class Folder(NamedTuple):
    """A directory."""

    shown: str  # its path in the caller's form
    rows: list[Row]
    strangers: list[Row]  # what is named like a checkpoint and is none
    left: list[Leftover]  # what interrupted saves left
    others: Sequence[str] = ()  # names of some checkpoints of prefixes that are not listed


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
    no checkpoint despite its name, what interrupted saves left, and names with other prefixes. Without --leaves
    nothing is opened: what looks complete may still be damaged. Object stores give no times.

    Exit code 2 if DIRECTORY cannot be listed.
    """
    checkpoint_dir = saved_steps.checkpoint_dir(directory, prefix)
    denied: list[StorageError] = []
    if recursive and checkpoint_dir.directory.isdir():
        folders = _folders_below(checkpoint_dir, denied, leaves=leaves)
    else:
        folder = _folder(checkpoint_dir, iter_checkpoints(directory, prefix), leaves=leaves)
        others = not_found.of_other_prefixes(checkpoint_dir) if folder.rows else ()
        listed = {os.path.basename(row.record.path) for row in folder.rows}  # the steps of a manager, too
        folders = [folder._replace(others=[name for name in others if name not in listed])]
    has_any = any(one.rows or one.strangers for one in folders)
    # Raises for what is not a directory of checkpoints.
    empty_reason = None if has_any else _empty_reason(checkpoint_dir, recursive=recursive)
    lines = _lines(folders, empty_reason, recursive=recursive, leaves=leaves)
    print_report(Report(lines, lambda: [one for folder in folders for one in _as_json(folder)]), as_json=as_json)
    if denied:
        raise FailedError(printable("\n".join(map(str, denied))))


def _folder(checkpoint_dir: saved_steps.CheckpointDir, records: Iterable[CheckpointRecord], *, leaves: bool) -> Folder:
    """Return a directory with these checkpoints; with ``leaves``, open them."""
    rows = [_row(record, leaves=leaves) for record in records]
    path = checkpoint_dir.directory
    return Folder(
        checkpoint_dir.shown,
        [row for row in rows if row.record.format != UNKNOWN_FORMAT],
        [row for row in rows if row.record.format == UNKNOWN_FORMAT],
        list(in_folder(path)) if path.isdir() else [],
    )


def _folders_below(root: saved_steps.CheckpointDir, denied: list[StorageError], *, leaves: bool) -> list[Folder]:
    """Return a directory and those below it that hold anything to list, with checkpoints of every prefix.

    ``denied`` is as for `walk.folders_below`."""
    folders = []
    for path, found in walk.folders_below(root.directory, denied):
        inside = os.path.relpath(path.path, root.directory.path)
        shown = root.shown if inside == os.curdir else os.path.join(root.shown, inside)
        folder = _folder(saved_steps.checkpoint_dir(shown, ""), _records(path, shown, found), leaves=leaves)
        if folder.rows or folder.strangers or folder.left:
            folders.append(folder)
    return folders


def _records(path: Location, shown: str, found: Sequence[Location]) -> list[CheckpointRecord]:
    """Return the records of a directory with these checkpoints: those of their prefixes, and others by themselves."""
    if not found:
        return []
    names = {one.name for one in found}
    matches = filter(None, map(_NUMBERED.fullmatch, names))
    prefixes = {match[1] for match in matches if not match[1].startswith(walk.DEFAULT_PREFIX)}
    records = dict[str, CheckpointRecord]()
    for prefix in (walk.DEFAULT_PREFIX, *sorted(prefixes)):
        for record in iter_checkpoints(shown, prefix):
            records.setdefault(os.path.basename(record.path), record)
    return [*records.values(), *(_single(path, shown, name) for name in sorted(names - records.keys()))]


def _single(path: Location, shown: str, name: str) -> CheckpointRecord:
    full = (path / name).unlisted()
    found = contents.contents_of(full)
    format = UNKNOWN_FORMAT if found.state is State.FOREIGN else "orbax" if full.isdir() else "msgpack"
    why = f"not a checkpoint: {found.why}" if found.state is State.FOREIGN else found.why or None
    return CheckpointRecord(None, os.path.join(shown, name), format, full.total_size(), found.is_complete, why)


def _row(record: CheckpointRecord, *, leaves: bool) -> Row:
    row = Row(record, _saved(record.path))
    if not leaves or not record.complete:
        return row
    from flax_ckpt_compat._discovery.opening import Opened
    from flax_ckpt_compat._view.metadata import leaves_of

    try:
        with closing(Opened(of_text(record.path), verify=False)) as opened:
            return row._replace(leaves=len(leaves_of(opened).leaves))
    except CheckpointError as error:
        return row._replace(problem=str(error))


def _saved(path: str) -> datetime.datetime | None:
    # Another process may just have removed it; a time may be in no year of the calendar, here or in local time.
    with suppress(OSError, OverflowError, ValueError):
        location = of_text(path)
        if not location.is_remote:
            saved = datetime.datetime.fromtimestamp(os.stat(location.path).st_mtime, datetime.UTC)
            saved.astimezone()
            return saved
    return None


def _empty_reason(checkpoint_dir: saved_steps.CheckpointDir, *, recursive: bool) -> str:
    """Return why a directory has no checkpoints; raise if it is not a directory, or a checkpoint itself."""
    path = checkpoint_dir.directory
    if not path.isdir():
        raise not_found.no_directory(path).error(path)
    if contents.is_certainly_orbax(path):
        message = f"{path} is one checkpoint, not a directory of them: list {path.parent}"
        raise CheckpointNotFoundError(message, path=path.path, has_remedy=True)
    if not path.is_remote and not path.listdir():
        return f"{path} is empty."
    absent = not_found.of_checkpoints(checkpoint_dir)
    if recursive:
        return f"{absent}, and none is below it"
    is_all = absent.remedy.endswith("?") or (absent.remedy and not hints.checkpoints_below(path))
    return str(absent) if is_all else f"{absent}; --recursive lists all below it"


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


def _lines(
    folders: Sequence[Folder], empty_reason: str | None, *, recursive: bool, leaves: bool
) -> Iterator[Line | Table]:
    if empty_reason is not None:
        yield Line(printable(empty_reason))
    for number, folder in enumerate(folders):
        if recursive:
            yield Line(("\n" if number else "") + printable(f"{folder.shown}:", one_line=True))
        if folder.rows:
            yield _table(folder.rows, leaves=leaves)
        apart: dict[str, list[tuple[str, int, str | None]]] = {
            "Cannot be opened": [
                (row.record.path, row.record.nbytes, row.problem) for row in folder.rows if row.problem
            ],
            "Named like checkpoints": [(one.path, one.nbytes, one.why) for one, *_ in folder.strangers],
            f"Left by interrupted saves (flax-ckpt clean {folder.shown})": [
                (one.location.path, one.nbytes, "; ".join(filter(None, (one.what, one.kept)))) for one in folder.left
            ],
        }
        for heading, found in apart.items():
            yield from [Line(printable(f"{heading}:", one_line=True), hang=2)] * bool(found)
            for path, nbytes, what in found:
                text = f"  {format_size(nbytes):>8}  {os.path.basename(path)}: {what}"
                yield Line(printable(text, one_line=True), hang=4)
        if folder.others:
            names = ", ".join(folder.others)
            yield Line(printable(f"Also here, with other prefixes: {names}; --recursive lists all.", one_line=True))


def _table(rows: Sequence[Row], *, leaves: bool) -> Table:
    headings = ["step", "format", *(["leaves"] if leaves else []), "size", "saved", "age", "state", "name"]
    cells = [[cells[heading] for heading in headings] for cells in map(_cells, rows)]
    right = {number for number, heading in enumerate(headings) if heading in _RIGHT}
    styles = [None if row.record.complete and row.problem is None else "yellow" for row in rows]
    return Table(headings, cells, right, styles, spare={headings.index("saved")})


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
