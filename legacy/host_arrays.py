"""Arrays that do not lie in C order in one piece of host memory, put in order a block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.tree import HostCopy, Shard, normalize_index

_BLOCK = 8 * 2**20
# Finding the shards of small arrays takes longer than what jax does, which keeps the copy that it makes.
_FROM = 256 * 2**10
_Array = np.ndarray[Any, Any]


def is_in_shards(leaf: Any) -> bool:
    """Whether a ``jax.Array`` of which this process sees all, or a `HostCopy`, is better put together in blocks."""
    in_several = len(leaf.shards) > 1 if isinstance(leaf, HostCopy) else not leaf.is_fully_replicated
    return in_several and leaf.nbytes >= _FROM


def pieces(leaf: Any) -> Iterator[_Array]:
    """The values of an array in C order, as consecutive contiguous arrays; copies are blocks of at most 8 MiB.

    Args:
        leaf: an ``np.ndarray``, or what is in shards.
    """
    if isinstance(leaf, np.ndarray) and leaf.flags.c_contiguous:
        yield leaf
        return
    shards = _shards(leaf)
    for box in _boxes(leaf.shape, leaf.dtype.itemsize):
        yield _gathered(shards, box, leaf.dtype)


def _shards(leaf: Any) -> Sequence[Shard]:
    """Boxes with their values, which together are the array."""
    if isinstance(leaf, HostCopy):
        return leaf.shards
    if isinstance(leaf, np.ndarray):
        return [Shard(tuple(slice(0, length) for length in leaf.shape), leaf)]
    # Not the whole as one: jax would keep that copy for as long as the array lives.
    return [
        Shard(normalize_index(shard.index, leaf.shape), np.asarray(shard.data))
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]


def _boxes(shape: tuple[int, ...], itemsize: int, before: tuple[slice, ...] = ()) -> Iterator[tuple[slice, ...]]:
    """Consecutive boxes of at most a block, whose values follow each other in C order."""
    rest = shape[len(before) :]
    if not rest or math.prod(rest) * itemsize <= _BLOCK:
        yield (*before, *(slice(0, length) for length in rest))
        return
    step = _BLOCK // (math.prod(rest[1:]) * itemsize)
    for start in range(0, rest[0], max(1, step)):
        side = slice(start, min(start + max(1, step), rest[0]))
        if step:
            yield (*before, side, *(slice(0, length) for length in rest[1:]))
        else:
            yield from _boxes(shape, itemsize, (*before, side))


def _gathered(shards: Sequence[Shard], box: tuple[slice, ...], dtype: np.dtype[Any]) -> _Array:
    block = memory.empty(tuple(side.stop - side.start for side in box), dtype)
    for shard in shards:
        common = [
            (max(mine.start, own.start), min(mine.stop, own.stop)) for mine, own in zip(box, shard.index, strict=True)
        ]
        if all(start < stop for start, stop in common):
            target = tuple(slice(a - side.start, b - side.start) for (a, b), side in zip(common, box, strict=True))
            source = tuple(
                slice(a - side.start, b - side.start) for (a, b), side in zip(common, shard.index, strict=True)
            )
            block[target] = shard.data[source]
    return block


def to_host(leaf: Any) -> np.ndarray[Any, Any]:
    """The leaf as a plain ndarray: a view on the CPU, one transfer for an array on a device."""
    return np.asarray(leaf.data if isinstance(leaf, HostCopy) else leaf)
