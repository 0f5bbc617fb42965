"""Read and cast arrays in small batches, so that little memory holds both dtypes at once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, Reader
from flax_ckpt_compat._restore import cast_losses

_AT_ONCE = 64 * 2**20
_NUMBERS = frozenset("biufcV")  # V: those of ml_dtypes

Readable = LeafHandle | ArraySlice


@dataclasses.dataclass(slots=True)
class Cast:
    """A cast of one array, or of its shards."""

    dtype: np.dtype[Any]  # the new one
    is_checked: bool = False  # check for lost values
    is_lossy: bool = False  # values were lost

    def __call__(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the array in the new dtype; the array itself if it has that dtype."""
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
    """Return whether arrays of a dtype can be cast to another, which may be that of typed PRNG keys."""
    if not isinstance(wanted, np.dtype):
        return False
    both = stored.kind in _NUMBERS and wanted.kind in _NUMBERS
    return both or stored.kind == wanted.kind


def _source(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array that numpy can cast: the real part for a real dtype, or an exact float32 copy."""
    if array.dtype.kind == "c" and dtype.kind != "c":
        return array.real
    # Some small dtypes have no cast to others; float32 holds all their values.
    return array if _has_direct_cast(array.dtype, dtype) else array.astype(np.float32)


@functools.cache
def _has_direct_cast(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    try:
        np.zeros((), stored).astype(wanted)
    except TypeError:
        return False
    return True


def read(
    reader: Reader, wanted: Sequence[Readable], casts: Mapping[Readable, Cast], mapped: Set[Readable] = frozenset()
) -> dict[Readable, Any]:
    """Read handles and slices, each once, and cast those in ``casts``; those in ``mapped`` may be memory-mapped."""
    values: dict[Readable, Any] = {}
    for is_mapped in (False, True):
        group = [one for one in wanted if (one in mapped) is is_mapped]
        at_once = [one for one in group if one not in casts]
        batches = [at_once] if at_once else []
        for batch in [*batches, *_batches([one for one in group if one in casts])]:
            found = reader.read(batch, mapped=True) if is_mapped else reader.read(batch)
            for at, one in enumerate(batch):
                values[one] = casts[one](found[at]) if one in casts else found[at]
                found[at] = None  # so that little memory holds both dtypes
    return values


def _batches(wanted: Sequence[Readable]) -> Iterator[list[Readable]]:
    """Yield batches of little memory, or of one array; slices of one array stay together, as they may share chunks."""
    batch: list[Readable] = []
    room, last = _AT_ONCE, None
    for one in wanted:
        size, handle = nbytes_of(one), one.handle if isinstance(one, ArraySlice) else one
        if batch and room < size and handle is not last:
            yield batch
            batch, room = [], _AT_ONCE
        batch.append(one)
        room, last = room - size, handle
    if batch:
        yield batch


def nbytes_of(one: Readable) -> int:
    """Return the bytes of a leaf, or of a slice, in memory."""
    if isinstance(one, LeafHandle):
        return one.nbytes
    assert one.handle.dtype is not None
    size: int = math.prod([side.stop - side.start for side in one.index]) * one.handle.dtype.itemsize
    return size
