"""Find what ``flax-ckpt ls`` lists: checkpoints, what is only named like one, and what interrupted saves left."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from flax_ckpt_compat._core.errors import CheckpointError, StorageError
from flax_ckpt_compat._core.location import Location, of_text
from flax_ckpt_compat._discovery import saved_steps, walk
from flax_ckpt_compat._discovery.contents import State, contents_of
from flax_ckpt_compat._save.interrupted_saves import Leftover, in_folder
from flax_ckpt_compat._view.inventory import UNKNOWN_FORMAT, CheckpointRecord, iter_checkpoints

# The prefix ends in a separator: pi0 is not step 0. A sign belongs to the number only after another one: the dash of
# ckpt-3 belongs to the prefix.
_NUMBERED = re.compile(r"(.*?[^0-9A-Za-z])[-+]?\d[\d.eE+-]*", re.DOTALL)


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


def folder_of(
    checkpoint_dir: saved_steps.CheckpointDir, records: Iterable[CheckpointRecord], *, leaves: bool
) -> Folder:
    """Return a directory with these checkpoints; with ``leaves``, open them."""
    rows = [_row(record, leaves=leaves) for record in records]
    path = checkpoint_dir.directory
    return Folder(
        checkpoint_dir.shown,
        [row for row in rows if row.record.format != UNKNOWN_FORMAT],
        [row for row in rows if row.record.format == UNKNOWN_FORMAT],
        list(in_folder(path)) if path.isdir() else [],
    )


def folders_below(root: saved_steps.CheckpointDir, denied: list[StorageError], *, leaves: bool) -> list[Folder]:
    """Return a directory and those below it that hold anything to list, with checkpoints of every prefix.

    ``denied`` is as for `walk.folders_below`."""
    folders = []
    for path, found in walk.folders_below(root.directory, denied):
        inside = os.path.relpath(path.path, root.directory.path)
        shown = root.shown if inside == os.curdir else os.path.join(root.shown, inside)
        folder = folder_of(saved_steps.checkpoint_dir(shown, ""), _records(path, shown, found), leaves=leaves)
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
    found = contents_of(full)
    format = UNKNOWN_FORMAT if found.state is State.FOREIGN else "orbax" if full.isdir() else "msgpack"
    why = f"not a checkpoint: {found.why}" if found.state is State.FOREIGN else found.why or None
    return CheckpointRecord(None, os.path.join(shown, name), format, full.total_size(), found.is_complete, why)


def _row(record: CheckpointRecord, *, leaves: bool) -> Row:
    row = Row(record, _saved(record.path))
    if not leaves or not record.complete:
        return row
    from flax_ckpt_compat._discovery.opening import Opened
    from flax_ckpt_compat._view.stored_leaves import StoredLeaves

    try:
        with closing(Opened(of_text(record.path), verify=False)) as opened:
            return row._replace(leaves=len(StoredLeaves(opened).leaves))
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
