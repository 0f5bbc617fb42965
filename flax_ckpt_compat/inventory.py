"""Every checkpoint of a directory, the unfinished ones too, told by names and sizes alone."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

from flax_ckpt_compat import _detect, _listing, background
from flax_ckpt_compat._core import paths, steps
from flax_ckpt_compat._core.backend import Format


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One checkpoint of a directory.

    Attributes:
        step: its number; None for a named one (``checkpoint_best``).
        path: of the file or directory, in the form in which the directory was given.
        format: ``msgpack`` for files, ``orbax`` for directories.
        nbytes: on disk, in bytes, with the arrays in a ``_gda`` folder beside it.
        complete: False where cheap signs tell that it is not. What looks complete may still be damaged.
        why: what is missing, or None.
    """

    step: float | None
    path: str
    format: str
    nbytes: int
    complete: bool
    why: str | None


def iter_checkpoints(directory: str | os.PathLike[str], prefix: str = "checkpoint_") -> Iterator[CheckpointRecord]:
    """Yields the checkpoints of a prefix and the steps of an Orbax ``CheckpointManager``, and opens none.

    Args:
        directory: that holds them; one that does not exist holds none.
        prefix: literal text before the step in the checkpoints' names; may contain ``/``.

    Yields:
        Records in the order of their steps, then those of named checkpoints.

    Raises:
        StorageError: the file system refused.
    """
    where = _listing.place(os.fspath(directory), prefix)
    background.wait_for_joint_saves(where.directory)
    if paths.is_url(where.directory):
        with paths.snapshot(where.directory):
            found = list(_iterate(where))
        yield from found
    else:
        yield from _iterate(where)


def _iterate(where: _listing.Place) -> Iterator[CheckpointRecord]:
    names = _listing.names_in(where)
    found = {name: steps.step_of(name, where.prefix) for name in steps.in_order(names, where.prefix)}
    found = _managed_steps(where, names) | found
    for name in sorted(found, key=lambda name: (found[name] or 0, name)):
        yield from _record(where, name, found[name])
    for name in sorted(name for name in names if steps.is_named(name, where.prefix) and name not in found):
        yield from _record(where, name, None)


def _managed_steps(where: _listing.Place, names: list[str]) -> dict[str, float | None]:
    """Name → step in the root of a manager; unfinished steps are known by the names of the complete ones."""
    if not paths.isdir(where.directory):
        return {}
    complete = [os.path.basename(path) for path in _detect.step_directories(where.directory, where.prefix).values()]
    if not complete:
        return {}
    pattern = re.compile(re.escape(complete[0].rstrip("0123456789")) + r"(\d+)")
    matches = {name: pattern.fullmatch(name) for name in names}
    return {
        name: int(match[1])
        for name, match in matches.items()
        if match and (name in complete or _listing.what_is_missing(where.path(name)))
    }


def _record(where: _listing.Place, name: str, step: float | None) -> Iterator[CheckpointRecord]:
    path = where.path(name)
    why = _listing.what_is_missing(path)
    if not paths.lexists(path):  # another process has just evicted it
        return
    format = Format.ORBAX if paths.isdir(path) else Format.MSGPACK
    nbytes = paths.total_size(path) + paths.total_size(path + steps.ARRAYS_POSTFIX)
    yield CheckpointRecord(step, os.path.join(where.shown, name), format.value, nbytes, why is None, why)
