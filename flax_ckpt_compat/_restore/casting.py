"""Reading arrays that are cast, a few at a time, so that never much is in memory in both dtypes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind
from flax_ckpt_compat._restore import cast_losses

_AT_ONCE = 64 * 2**20
_NUMBERS = frozenset("biufcV")  # V: those of ml_dtypes

Asked = LeafHandle | ArraySlice


@dataclasses.dataclass(slots=True)
class Cast:
    """A cast of one array, or of its shards.

    Attributes:
        dtype: the new one.
        is_checked: look whether values are lost.
        is_lossy: whether some were.
    """

    dtype: np.dtype[Any]
    is_checked: bool = False
    is_lossy: bool = False

    def __call__(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the array in the new dtype, or itself if that is its own."""
        if array.dtype == self.dtype:
            return array
        self.is_lossy = self.is_lossy or (self.is_checked and cast_losses.is_lossy(array, self.dtype))
        # In memory that jax on the CPU takes over without a copy.
        result = memory.empty(array.shape, self.dtype)
        source = _source(array, self.dtype)
        with np.errstate(all="ignore"):
            np.copyto(result, source, casting="unsafe")
        return result


@functools.cache
def exists(stored: np.dtype[Any], wanted: Any) -> bool:
    """Return whether arrays of one dtype can be cast to another.

    Args:
        stored: of numpy or ml_dtypes.
        wanted: likewise, or the dtype of typed PRNG keys.
    """
    if not isinstance(wanted, np.dtype):
        return False
    both = stored.kind in _NUMBERS and wanted.kind in _NUMBERS
    return both or stored.kind == wanted.kind


def _source(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return what numpy can cast: the real parts where the result has no others, or an exact copy in between."""
    if array.dtype.kind == "c" and dtype.kind != "c":
        return array.real
    # Some small dtypes have no cast to others; float32 holds all their values.
    return array if _is_direct(array.dtype, dtype) else array.astype(np.float32)


@functools.cache
def _is_direct(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    try:
        np.zeros((), stored).astype(wanted)
    except TypeError:
        return False
    return True


def cast_of(handle: LeafHandle, wanted: Any) -> np.dtype[Any] | None:
    """What an array can be cast to as soon as it is read; None for all that is decided later, or not cast."""
    stored = handle.dtype
    if handle.kind is not LeafKind.ARRAY or handle.possible_kinds or stored is None or not isinstance(wanted, np.dtype):
        return None
    return wanted if stored != wanted and stored.kind in _NUMBERS and wanted.kind in _NUMBERS else None


def read(
    read_all: Callable[[Sequence[Asked]], list[Any]], wanted: Sequence[Asked], casts: Mapping[int, Cast]
) -> list[Any]:
    """The values, in their order.

    Args:
        read_all: of the checkpoint's reader.
        wanted: handles and parts, each once.
        casts: id of each array that is cast → its cast.
    """
    if not casts:
        return list(read_all(wanted))
    plain = [one for one in wanted if id(one) not in casts]
    values = dict(zip(map(id, plain), read_all(plain), strict=True))
    for batch in _batches([one for one in wanted if id(one) in casts]):
        read_now = read_all(batch)
        read_now.reverse()
        for one in batch:
            values[id(one)] = casts[id(one)](read_now.pop())
    return [values[id(one)] for one in wanted]


def _batches(wanted: Sequence[Asked]) -> Iterator[list[Asked]]:
    """Stretches of little memory, or of one array; parts of one array stay together, as they may share chunks."""
    batch: list[Asked] = []
    room, last = _AT_ONCE, None
    for one in wanted:
        size, handle = _nbytes(one), one.handle if isinstance(one, ArraySlice) else one
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
