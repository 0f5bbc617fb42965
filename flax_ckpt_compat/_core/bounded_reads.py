"""Read whole checkpoints in bounded memory: small leaves in batches, large arrays in slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.tree import iter_leaves

BATCH_BYTES = 32 * 2**20
_MAX_BATCH = 10_000


def handles_of(reader: Reader) -> list[LeafHandle]:
    """Return all leaves of a tree."""
    return [leaf for _, leaf in iter_leaves(reader.tree) if isinstance(leaf, LeafHandle)]


def batches(handles: Sequence[LeafHandle]) -> Iterator[list[LeafHandle]]:
    """Split leaves into batches to be read at once; a large leaf is a batch of its own."""
    batch: list[LeafHandle] = []
    nbytes = 0
    for handle in handles:
        if batch and (nbytes + handle.nbytes > BATCH_BYTES or len(batch) == _MAX_BATCH):
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


def read_all(wanted: Sequence[LeafHandle | ArraySlice]) -> list[Any]:
    """Read leaves and slices in the given order, each with its own reader."""
    values: list[Any] = [None] * len(wanted)
    groups: dict[Reader, list[int]] = {}
    for number, one in enumerate(wanted):
        groups.setdefault((one if isinstance(one, LeafHandle) else one.handle).reader, []).append(number)
    for reader, numbers in groups.items():
        for number, value in zip(numbers, reader.read([wanted[number] for number in numbers]), strict=True):
            values[number] = value
    return values
