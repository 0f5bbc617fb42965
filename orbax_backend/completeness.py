"""Looking for every chunk of every array, because a shard that is missing is best missed before the commit."""

from __future__ import annotations

from collections.abc import Callable

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.tree import box_of, show_path

from .grid import Shape
from .index import Extent, Index
from .jobs import Job
from .leaves import STRING, Stored
from .names import key_prefix
from .plan import Plan
from .zarr import parse_array_metadata

Size = Callable[[str], int]


def check_complete(shown: str, plan: Plan, index: Index, size: Size) -> None:
    """Raises if a chunk of a planned array is not where the index says.

    Args:
        shown: the checkpoint's path, for messages.
        plan: of process 0.
        index: of the merged database.
        size: file, relative to the checkpoint → bytes in it, and -1 where there is none.

    Raises:
        StorageError: names the leaf and whose chunk it is.
    """
    for entry in plan.entries:
        if entry.stored is None or entry.stored.value_type == STRING:
            continue
        leaf = show_path(tuple(name for name, _ in entry.keys))
        _check_array(shown, index, entry.name, entry.stored, leaf, size)


def _check_array(path: str, index: Index, name: str, stored: Stored, leaf: str, size: Size) -> None:
    prefix = key_prefix(name)
    text = index.get(prefix + ".zarray")
    if text is None:
        raise _incomplete(path, leaf, "its metadata is missing, which process 0 writes")
    info = parse_array_metadata(text, zarr3=False)
    for cell, _ in Job(name, info, ()).cells():
        place = index.find(prefix + info.chunk_key(cell))
        if place is None:
            raise _incomplete(path, leaf, f"{_whose(stored, cell, info.chunks)} is missing")
        if isinstance(place, Extent) and place.offset + place.length > size(place.file):
            whose = _whose(stored, cell, info.chunks)
            raise _incomplete(path, leaf, f"{whose} should be in {place.file}, which is missing or too short")


def _incomplete(path: str, shown: str, what: str) -> StorageError:
    error = StorageError(
        f"{path}: the leaf {shown!r} is not complete: {what}. All processes must save to one directory that they "
        f"share, and nothing else may change it. Nothing was saved",
        path=path,
    )
    error.leaf = shown
    return error


def _whose(stored: Stored, cell: Shape, chunks: Shape) -> str:
    """A chunk and the process that holds the first replica of it."""
    at = [number * length for number, length in zip(cell, chunks, strict=True)]
    devices = stored.sharding.devices_indices_map(stored.shape) if stored.spread else {}
    holders = (
        device.process_index
        for device, index in devices.items()
        if all(side.start <= start < side.stop for side, start in zip(box_of(index, stored.shape), at, strict=True))
    )
    return f"the chunk {list(cell)} of process {next(holders, 0)}"
