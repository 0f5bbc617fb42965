"""Copy arrays to C order a block at a time, from shards or strided memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.tree import HostCopy, Shard, shards_of

_BLOCK = 8 * 2**20  # bytes
# Bytes below which listing an array's shards takes longer than jax's own assembly, which keeps its copy alive.
_MIN_SHARDED = 256 * 2**10
_Array = np.ndarray[Any, Any]


def is_in_shards(leaf: Any) -> bool:
    """Return whether to assemble a fully addressable ``jax.Array`` or a `HostCopy` from its shards, in blocks."""
    is_sharded = len(leaf.shards) > 1 if isinstance(leaf, HostCopy) else not leaf.is_fully_replicated
    return is_sharded and leaf.nbytes >= _MIN_SHARDED


def pieces(leaf: Any) -> Iterator[_Array]:
    """Yield the values of an array in C order as consecutive contiguous arrays; copies are blocks of at most 8 MiB.

    Args:
        leaf: an ``np.ndarray``, or an array for which `is_in_shards` is true.
    """
    if isinstance(leaf, np.ndarray) and leaf.flags.c_contiguous:
        yield leaf
        return
    shards = _shards(leaf)
    for index in _blocks(leaf.shape, leaf.dtype.itemsize):
        yield _assemble(shards, index, leaf.dtype)


def _shards(leaf: Any) -> Sequence[Shard]:
    """Return shards that together cover the array."""
    if isinstance(leaf, np.ndarray):
        return [Shard(tuple(slice(0, length) for length in leaf.shape), leaf)]
    # Not np.asarray of the whole array: jax would keep that copy for as long as the array lives.
    return list(shards_of(leaf))


def _blocks(shape: tuple[int, ...], itemsize: int, prefix: tuple[slice, ...] = ()) -> Iterator[tuple[slice, ...]]:
    """Yield the indices of consecutive blocks, in C order, of at most ``_BLOCK`` bytes."""
    rest = shape[len(prefix) :]
    if not rest or math.prod(rest) * itemsize <= _BLOCK:
        yield (*prefix, *(slice(0, length) for length in rest))
        return
    step = _BLOCK // (math.prod(rest[1:]) * itemsize)
    for start in range(0, rest[0], max(1, step)):
        side = slice(start, min(start + max(1, step), rest[0]))
        if step:
            yield (*prefix, side, *(slice(0, length) for length in rest[1:]))
        else:
            yield from _blocks(shape, itemsize, (*prefix, side))


def _assemble(shards: Sequence[Shard], index: tuple[slice, ...], dtype: np.dtype[Any]) -> _Array:
    block = memory.empty(tuple(side.stop - side.start for side in index), dtype)
    for shard in shards:
        common = [
            (max(mine.start, own.start), min(mine.stop, own.stop)) for mine, own in zip(index, shard.index, strict=True)
        ]
        if all(start < stop for start, stop in common):
            target = tuple(slice(a - side.start, b - side.start) for (a, b), side in zip(common, index, strict=True))
            source = tuple(
                slice(a - side.start, b - side.start) for (a, b), side in zip(common, shard.index, strict=True)
            )
            block[target] = shard.data[source]
    return block


def to_host(leaf: Any) -> np.ndarray[Any, Any]:
    """Return the leaf as an ndarray: a view on the CPU, one transfer from a device."""
    return np.asarray(leaf.data if isinstance(leaf, HostCopy) else leaf)
