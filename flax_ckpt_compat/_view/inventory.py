"""List every checkpoint of a directory, unfinished ones too, by names and sizes alone."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.location import as_text
from flax_ckpt_compat._discovery import saved_steps, step_lookup
from flax_ckpt_compat._discovery.contents import Contents, State
from flax_ckpt_compat._discovery.step_lookup import Entry

UNKNOWN_FORMAT = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One checkpoint of a directory.

    Attributes:
        step: its number; None for a named one (``checkpoint_best``).
        path: of the file or directory, in the form in which the directory was given.
        format: ``msgpack`` for files, ``orbax`` for directories, ``unknown`` for what is in another format.
        nbytes: on disk, in bytes, with the arrays in a ``_gda`` folder beside it.
        complete: no names or files are missing; the data may still be damaged.
        why: the missing part, that permission to list it is denied, or that it is not a checkpoint and what it looks
            like; or None.
    """

    step: float | None
    path: str
    format: str
    nbytes: int
    complete: bool
    why: str | None


def iter_checkpoints(directory: str | os.PathLike[str], prefix: str = "checkpoint_") -> Iterator[CheckpointRecord]:
    """Iterate over the checkpoints of a prefix and the steps of an Orbax ``CheckpointManager``, without opening them.

    Args:
        directory: directory of checkpoints; one that does not exist holds none.
        prefix: literal text before the step in the checkpoints' names; may contain ``/``.

    Yields:
        Records in the order of their steps, then those of named checkpoints.

    Raises:
        StorageError: the file system refused.

    Example:
        >>> _ = [save("runs", {"w": np.ones(2)}, step=step) for step in (1, 2)]
        >>> [(record.step, record.complete) for record in iter_checkpoints("runs")]
        [(1, True), (2, True)]
    """
    checkpoint_dir = saved_steps.checkpoint_dir(as_text(directory), as_text(prefix, "prefix"))
    # Whoever saves in the background has loaded it; it loads jax, which a listing does without.
    if async_saves := sys.modules.get("flax_ckpt_compat._save.async_saves"):
        async_saves.wait_for_multiprocess_saves(checkpoint_dir.directory)
    yield from step_lookup.list_again_while_it_changes(
        checkpoint_dir.directory, lambda listed, last: _records(checkpoint_dir.listed_with(listed), last)
    )


def _records(checkpoint_dir: saved_steps.CheckpointDir, last: bool) -> list[CheckpointRecord]:
    listed = step_lookup.Directory(checkpoint_dir, tolerant=last, lists_denied=True)
    found = [_record(checkpoint_dir, *one) for one in step_lookup.everything_of(listed)]
    if None in found and not last:
        raise step_lookup.ChangedError
    return [record for record in found if record is not None]


def _record(checkpoint_dir: saved_steps.CheckpointDir, entry: Entry, found: Contents) -> CheckpointRecord | None:
    location = entry.location
    format = Format.ORBAX if location.isdir() else Format.MSGPACK
    nbytes = location.total_size() + location.sibling(steps.ARRAYS_POSTFIX).total_size()
    if not location.exists():  # another process has just evicted it
        return None
    shown_format, why = format.value, found.why or None
    if found.state is State.FOREIGN:
        shown_format, why = UNKNOWN_FORMAT, f"not a checkpoint: {why}"
    shown = os.path.join(checkpoint_dir.shown, entry.name)
    return CheckpointRecord(entry.step, shown, shown_format, nbytes, found.is_complete, why)
