"""Read whole checkpoints in bounded memory: small leaves in batches, large arrays in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind, Reader, handle_of
from flax_ckpt_compat._core.tree import iter_leaves

BATCH_BYTES = 32 * 2**20
_MAX_BATCH = 10_000


def handles_of(reader: Reader) -> list[LeafHandle]:
    """Return all leaves of a tree."""
    return [leaf for _, leaf in iter_leaves(reader.tree) if isinstance(leaf, LeafHandle)]


def batches(handles: Sequence[LeafHandle], limit: int | None = None) -> Iterator[list[LeafHandle]]:
    """Split leaves into batches to be read at once; a large leaf is a batch of its own."""
    batch: list[LeafHandle] = []
    nbytes, limit = 0, BATCH_BYTES if limit is None else limit
    for handle in handles:
        if batch and (nbytes + handle.nbytes > limit or len(batch) == _MAX_BATCH):
            yield batch
            batch, nbytes = [], 0
        batch.append(handle)
        nbytes += handle.nbytes
    if batch:
        yield batch


def pieces(handle: LeafHandle) -> Iterator[LeafHandle | ArraySlice]:
    """Yield a leaf, or the slices of a large array."""
    if handle.kind is LeafKind.ARRAY and handle.nbytes > BATCH_BYTES:
        yield from (ArraySlice(handle, box) for box in handle.reader.boxes(handle, BATCH_BYTES))
    else:
        yield handle


def reader_of(one: LeafHandle | ArraySlice) -> Reader:
    """Return the reader of a leaf, or of what a slice is of."""
    return handle_of(one).reader


def read_all(
    wanted: Sequence[LeafHandle | ArraySlice],
    choose: Callable[[LeafHandle | ArraySlice], Reader] = reader_of,
    *,
    mapped: bool = False,
) -> list[Any]:
    """Read leaves and slices in the given order, each with its own reader, or the one that ``choose`` returns."""
    values: list[Any] = [None] * len(wanted)
    groups: dict[Reader, list[int]] = {}
    for number, one in enumerate(wanted):
        groups.setdefault(choose(one), []).append(number)
    for reader, numbers in groups.items():
        found = reader.read([wanted[number] for number in numbers], mapped=mapped)
        for number, value in zip(numbers, found, strict=True):
            values[number] = value
    return values
