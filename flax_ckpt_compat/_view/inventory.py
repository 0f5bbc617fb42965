"""List every checkpoint of a directory, unfinished ones too, by names and sizes alone."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator

from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.location import Location, as_text
from flax_ckpt_compat._discovery import saved_steps, steps
from flax_ckpt_compat._discovery.contents import ChangedError, Contents, State

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
    shown = saved_steps.shown_directory(directory, prefix)
    # Whoever saves in the background has loaded it; it loads jax, which a listing does without.
    if async_saves := sys.modules.get("flax_ckpt_compat._save.async_saves"):
        async_saves.wait_for_multiprocess_saves(checkpoint_dir.directory)

    def records(listed: saved_steps.Directory) -> list[CheckpointRecord]:
        entries = saved_steps.everything_of(listed)
        found = [record_of(one.location, one.step, shown, listed.classify(one)) for one in entries]
        if None in found and not listed.tolerant:
            raise ChangedError
        return [record for record in found if record is not None]

    yield from saved_steps.in_one_listing(checkpoint_dir, records)


def record_of(location: Location, step: float | None, shown: str, found: Contents) -> CheckpointRecord | None:
    """Return the record of a checkpoint in a directory as shown; None if another process has just evicted it."""
    is_foreign = found.state is State.FOREIGN
    format = UNKNOWN_FORMAT if is_foreign else (Format.ORBAX if location.isdir() else Format.MSGPACK).value
    nbytes = location.total_size() + location.sibling(steps.ARRAYS_POSTFIX).total_size()
    if not location.exists():
        return None
    why = f"not a checkpoint: {found.why}" if is_foreign else found.why or None
    return CheckpointRecord(step, os.path.join(shown, location.name), format, nbytes, found.is_complete, why)
