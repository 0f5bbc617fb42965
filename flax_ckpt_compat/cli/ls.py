"""Define ``flax-ckpt ls``: checkpoints by names and sizes, unless leaves are asked for; without jax or flax."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import click

from flax_ckpt_compat._core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.text_formatting import format_size, printable
from flax_ckpt_compat._discovery import contents, locating, saved_steps, steps, walk
from flax_ckpt_compat._save.interrupted_saves import in_folder
from flax_ckpt_compat._view.inventory import UNKNOWN_FORMAT, CheckpointRecord, iter_checkpoints, record_of
from flax_ckpt_compat._view.report import Line, Report, Table

from . import _command_base as base

# A separator ends the prefix: pi0 is not step 0. A sign belongs to the number only after another one: the dash of
# ckpt-3 belongs to the prefix.
_NUMBERED = re.compile(r"(?:|.*?[^0-9A-Za-z])([-+]?\d[\d.eE+-]*)", re.DOTALL)
_RIGHT = ("step", "leaves", "size", "age")
_UNITS = (("y", 31_557_600), ("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))  # seconds
Entry = dict[str, Any]  # what JSON has of a checkpoint, of what is only named like one, or of a leftover


@base.command("""
flax-ckpt ls runs/a
flax-ckpt ls runs --recursive
flax-ckpt ls runs/a --prefix model_ --leaves
flax-ckpt ls gs://bucket/runs/a --json
""")
@base.path_argument("directory")
@base.prefix_option
@click.option("-r", "--recursive", is_flag=True, help="List all directories below too, with checkpoints of any prefix.")
@click.option("--leaves", is_flag=True, help="Open each checkpoint and count its leaves.")
@base.json_option("a JSON list, with sizes in bytes and times in UTC")
def command(directory: str, prefix: str, *, recursive: bool, leaves: bool, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY. It is a path, or a URL (s3://, gs://, az://).

    Shows step, format, size, when it was saved, and whether it is complete or why not; then, apart, what is
    no checkpoint despite its name, what interrupted saves left, and names with other prefixes. Without --leaves
    nothing is opened: what looks complete may still be damaged. Object stores give no times.

    Exit code 2 if DIRECTORY cannot be listed.
    """
    checkpoint_dir = saved_steps.checkpoint_dir(directory, prefix)
    top = saved_steps.shown_directory(directory, prefix)
    denied: list[StorageError] = []
    others: list[str] = []
    if recursive and checkpoint_dir.directory.isdir():
        found = dict(_below(checkpoint_dir.directory, top, denied, leaves=leaves))
    else:
        entries = _entries(checkpoint_dir.directory, iter_checkpoints(directory, prefix), leaves=leaves)
        found = {top: entries}
        listed = {os.path.basename(entry["path"]) for entry in entries}  # the steps of a manager, too
        if any(entry["kind"] == "checkpoint" for entry in entries):
            others = [name for name in locating.of_other_prefixes(checkpoint_dir) if name not in listed]
    lines: list[Line | Table] = []
    for shown, entries in found.items():
        if recursive:
            lines.append(Line(("\n" if lines else "") + printable(f"{shown}:", one_line=True)))
        lines += _lines(shown, entries, leaves=leaves)
    everything = [entry for entries in found.values() for entry in entries]
    if all(entry["kind"] == "leftover" for entry in everything):
        # Raises for what is not a directory of checkpoints.
        lines.insert(0, Line(printable(_empty_reason(checkpoint_dir, recursive=recursive))))
    if others:
        text = f"Also here, with other prefixes: {', '.join(others)}; --recursive lists all."
        lines.append(Line(printable(text, one_line=True)))
    base.print_report(Report(lines, lambda: everything), as_json=as_json)
    if denied:
        raise base.FailedError(printable("\n".join(map(str, denied))))


def _below(root: Location, top: str, denied: list[StorageError], *, leaves: bool) -> Iterator[tuple[str, list[Entry]]]:
    """Yield a directory, and each below it, that holds anything to list; ``denied`` is as for `walk.folders_below`."""
    for folder, found in walk.folders_below(root, denied):
        inside = os.path.relpath(folder.path, root.path)
        shown = top if inside == os.curdir else os.path.join(top, inside)
        records = (_record(one.unlisted(), shown) for one in found)
        if entries := _entries(folder, filter(None, records), leaves=leaves):
            yield shown, entries


def _record(location: Location, shown: str) -> CheckpointRecord | None:
    """Return the record of a checkpoint of any prefix; None if it is gone."""
    match = _NUMBERED.fullmatch(location.name)
    step = steps.parse_step(match[1]) if match else None
    return record_of(location, step, shown, contents.contents_of(location))


def _entries(folder: Location, records: Iterable[CheckpointRecord], *, leaves: bool) -> list[Entry]:
    """Return what a directory holds: these checkpoints, what is only named like one, and leftovers."""
    found = sorted((_entry(record, leaves=leaves) for record in records), key=lambda one: str(one["kind"]))
    for one in in_folder(folder) if folder.isdir() else ():
        why = "; ".join(filter(None, (one.what, one.kept)))
        found.append({"kind": "leftover", "path": one.location.path, "nbytes": one.nbytes, "why": why})
    return found


def _entry(record: CheckpointRecord, *, leaves: bool) -> Entry:
    """Return a checkpoint, by names and sizes; with ``leaves``, open it to count them."""
    count, damage = _count(record.path) if leaves and record.complete else (None, None)
    saved, kind = _saved(record.path), "stranger" if record.format == UNKNOWN_FORMAT else "checkpoint"
    entry = {"kind": kind, "name": os.path.basename(record.path), **dataclasses.asdict(record), "leaves": count}
    entry |= {"saved": saved and saved.isoformat(timespec="seconds"), "damage": damage}
    return entry if damage is None else entry | {"complete": False, "why": damage}


def _count(path: str) -> tuple[int | None, str | None]:
    """Return how many leaves a checkpoint has, or why it cannot be opened."""
    from flax_ckpt_compat._discovery.opening import Opened
    from flax_ckpt_compat._view.metadata import leaves_of

    try:
        with closing(Opened(location_of(path), verify=False)) as opened:
            return len(leaves_of(opened).leaves), None
    except CheckpointError as error:
        return None, str(error)


def _saved(path: str) -> datetime.datetime | None:
    # It may be in a store, or just removed; a time may be in no year of the calendar, here or in local time.
    with suppress(OSError, OverflowError, ValueError):
        saved = datetime.datetime.fromtimestamp(os.stat(location_of(path).path).st_mtime, datetime.UTC)
        saved.astimezone()
        return saved
    return None


def _empty_reason(checkpoint_dir: saved_steps.CheckpointDir, *, recursive: bool) -> str:
    """Return why a directory has no checkpoints; raise if it is not a directory, or a checkpoint itself."""
    path = checkpoint_dir.directory
    if not path.isdir():
        raise locating.no_directory(path).error(path)
    if contents.is_certainly_orbax(path):
        message = f"{path} is one checkpoint, not a directory of them: list {path.parent}"
        raise CheckpointNotFoundError(message, path=path.path)
    if not path.is_remote and not path.listdir():
        return f"{path} is empty."
    absent = locating.none_in(checkpoint_dir, saved_steps.all_names(checkpoint_dir))
    return f"{absent}, and none is below it" if recursive else f"{absent} (--recursive lists all below it)"


def _lines(shown: str, entries: Sequence[Entry], *, leaves: bool) -> Iterator[Line | Table]:
    """Yield the table of a directory's checkpoints, and what is told apart from it."""
    rows = [one for one in entries if one["kind"] == "checkpoint"]
    if rows:
        cells = [_cells(one) for one in rows]
        headings = [name for name in cells[0] if leaves or name != "leaves"]
        right = {number for number, name in enumerate(headings) if name in _RIGHT}
        styles = [None if one["complete"] else "yellow" for one in rows]
        texts = [[row[name] for name in headings] for row in cells]
        yield Table(headings, texts, right, styles, spare={headings.index("saved")})
    apart = {
        "Cannot be opened": [one for one in rows if one["damage"]],
        "Named like checkpoints": [one for one in entries if one["kind"] == "stranger"],
        f"Left by interrupted saves (flax-ckpt clean {shown})": [one for one in entries if one["kind"] == "leftover"],
    }
    for heading, found in apart.items():
        yield from [Line(printable(f"{heading}:", one_line=True), hang=2)] * bool(found)
        for one in found:
            text = f"  {format_size(one['nbytes']):>8}  {os.path.basename(one['path'])}: {one['why']}"
            yield Line(printable(text, one_line=True), hang=4)


def _cells(entry: Entry) -> dict[str, str]:
    """Return heading → text."""
    saved = entry["saved"] and datetime.datetime.fromisoformat(entry["saved"])
    state = f"incomplete: {entry['why']}" if not entry["damage"] else "cannot be opened"
    cells = {
        "step": entry["step"],
        "format": entry["format"],
        "leaves": entry["leaves"],
        "size": format_size(entry["nbytes"]),
        "saved": saved and saved.astimezone().isoformat(" ")[: len("2026-01-01 00:00:00")],
        "age": saved and _age(saved),
        "state": "complete" if entry["complete"] else state,
        "name": entry["name"],
    }
    return {name: "-" if cell is None else printable(str(cell), one_line=True) for name, cell in cells.items()}


def _age(saved: datetime.datetime) -> str:
    seconds = max(0.0, (datetime.datetime.now(datetime.UTC) - saved).total_seconds())
    unit, length = next((one for one in _UNITS if seconds >= 2 * one[1]), _UNITS[-1])
    return f"{seconds // length:.0f} {unit}"
