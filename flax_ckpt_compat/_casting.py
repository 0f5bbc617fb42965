"""Reading arrays that are cast, a few at a time, so that never much is in memory in both dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Part

_AT_ONCE = 64 * 2**20
_NUMBERS = frozenset("biufcV")  # V: those of ml_dtypes

Asked = LeafHandle | Part


def cast_of(handle: LeafHandle, wanted: Any) -> np.dtype[Any] | None:
    """What an array can be cast to as soon as it is read; None for all that is decided later, or not cast."""
    stored = handle.dtype
    if handle.kind is not LeafKind.ARRAY or handle.may_be or stored is None or not isinstance(wanted, np.dtype):
        return None
    return wanted if stored != wanted and stored.kind in _NUMBERS and wanted.kind in _NUMBERS else None


def read(
    read_all: Callable[[Sequence[Asked]], list[Any]], wanted: Sequence[Asked], casts: Mapping[int, np.dtype[Any]]
) -> list[Any]:
    """The values, in their order.

    Args:
        read_all: of the checkpoint's reader.
        wanted: handles and parts, each once.
        casts: id of each array that is cast → the dtype that it gets.
    """
    if not casts:
        return list(read_all(wanted))
    plain = [one for one in wanted if id(one) not in casts]
    values = dict(zip(map(id, plain), read_all(plain), strict=True))
    for batch in _batches([one for one in wanted if id(one) in casts]):
        read_now = read_all(batch)
        read_now.reverse()
        for one in batch:
            values[id(one)] = _cast(read_now.pop(), casts[id(one)])
    return [values[id(one)] for one in wanted]


def _cast(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    # In memory that jax on the CPU takes over without a copy.
    result = memory.empty(array.shape, dtype)
    np.copyto(result, array, casting="unsafe")
    return result


def _batches(wanted: Sequence[Asked]) -> Iterator[list[Asked]]:
    """Stretches of little memory, or of one array; parts of one array stay together, as they may share chunks."""
    batch: list[Asked] = []
    room, last = _AT_ONCE, None
    for one in wanted:
        size, handle = _nbytes(one), one.handle if isinstance(one, Part) else one
        if batch and room < size and handle is not last:
            yield batch
            batch, room = [], _AT_ONCE
        batch.append(one)
        room, last = room - size, handle
    if batch:
        yield batch


def _nbytes(one: Asked) -> int:
    if isinstance(one, LeafHandle):
        return one.nbytes
    assert one.handle.dtype is not None
    size: int = math.prod([side.stop - side.start for side in one.index]) * one.handle.dtype.itemsize
    return size
