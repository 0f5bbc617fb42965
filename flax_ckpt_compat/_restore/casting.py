"""Cast arrays, in small batches as they are read, and tell whether a cast changes values by more than rounding."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import ml_dtypes
import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle, batches, read_all
from flax_ckpt_compat._core.dtypes import is_float, is_integer
from flax_ckpt_compat._core.progress import Meter

Array = np.ndarray[Any, Any]
_AT_ONCE = 64 * 2**20  # bytes that are read before they are cast
_BLOCK = 2**20  # elements that are compared at once
_NUMBERS = frozenset("biufcV")  # V: those of ml_dtypes
_floats: Any = ml_dtypes.finfo
_integers: Any = ml_dtypes.iinfo


@dataclasses.dataclass(slots=True)
class Cast:
    """A cast of one array, or of its shards."""

    dtype: np.dtype[Any]  # the new one
    is_checked: bool = False  # check for lost values
    is_lossy: bool = False  # values were lost

    def __call__(self, array: Array) -> Array:
        """Return the array in the new dtype; the array itself if it has that dtype."""
        if array.dtype == self.dtype:
            return array
        self.is_lossy = self.is_lossy or (self.is_checked and is_lossy(array, self.dtype))
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


def _source(array: Array, dtype: np.dtype[Any]) -> Array:
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
    wanted: Sequence[LeafHandle], casts: Mapping[LeafHandle, Cast], mapped: Set[LeafHandle], meter: Meter
) -> dict[LeafHandle, Any]:
    """Read handles and slices, each once, and cast those in ``casts``; those in ``mapped`` may be memory-mapped."""
    values: dict[LeafHandle, Any] = {}
    for is_mapped in (False, True):
        group = [one for one in wanted if (one in mapped) is is_mapped]
        at_once = [one for one in group if one not in casts]
        to_cast = batches([one for one in group if one in casts], _AT_ONCE)
        for batch in [*([at_once] if at_once else []), *to_cast]:
            found = read_all(batch, mapped=is_mapped, meter=meter)
            for at, one in enumerate(batch):
                values[one] = casts[one](found[at]) if one in casts else found[at]
                found[at] = None  # so that little memory holds both dtypes
    return values


def is_lossy(array: Array, dtype: np.dtype[Any]) -> bool:
    """Return whether a numeric array loses values in a cast to a dtype.

    From float to float, values may be rounded; all others have to be the same after the cast. Values beyond the range
    of the new dtype, NaN, infinities and signs that it lacks, fractions and imaginary parts do not survive."""
    if array.size == 0 or is_safe(array.dtype, dtype):
        return False
    if array.dtype.kind == "c":
        if dtype.kind != "c" and bool(np.any(array.imag != 0)):
            return True
        parts = (array.real, array.imag) if dtype.kind == "c" else (array.real,)
        return any(is_lossy(part, _real(dtype)) for part in parts)
    dtype = _real(dtype)
    if is_integer(array.dtype) and is_integer(dtype):
        limits = _integers(dtype)
        return int(array.min()) < int(limits.min) or int(array.max()) > int(limits.max)
    if is_float(array.dtype) and is_float(dtype):
        return not _is_in_range(array, dtype) and not all(_is_only_rounded(block, dtype) for block in _blocks(array))
    return not all(_is_kept(block, dtype) for block in _blocks(array))


def is_safe(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether every value of a dtype survives a cast to another."""
    if stored == wanted:
        return True
    if is_integer(stored) and stored.itemsize == np.dtype(np.int64).itemsize and not is_integer(wanted):
        return False  # numpy calls this safe, though float64 rounds what is above 2**53
    if 2 in (stored.isbuiltin, wanted.isbuiltin):  # of ml_dtypes, whose kind is not specific
        # What ml_dtypes registers as safe includes int8 to four-bit floats.
        if not (is_float(stored) and is_float(wanted) and wanted.isbuiltin == 1):
            return False
        old, new = _floats(stored), _floats(wanted)
        return bool(new.nmant >= old.nmant and float(new.max) >= float(old.max))
    return np.can_cast(stored, wanted, "safe")


def _blocks(array: Array) -> Iterator[Array]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        yield flat[start : start + _BLOCK]


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.zeros((), dtype).real.dtype if dtype.kind == "c" else dtype


def _is_in_range(array: Array, dtype: np.dtype[Any]) -> bool:
    """Return whether all values are finite and within a float dtype's range; two fast passes, for most arrays."""
    low, high, limits = float(array.min()), float(array.max()), _floats(dtype)
    return math.isfinite(low) and math.isfinite(high) and float(limits.min) <= low and high <= float(limits.max)


def _is_only_rounded(array: Array, dtype: np.dtype[Any]) -> bool:
    limits = _floats(dtype)
    # Beyond the largest value, what still rounds to it is kept; dtypes without infinity give it for all the rest.
    largest = float(limits.max) * (1 + float(limits.eps) / 2)
    with np.errstate(all="ignore"):
        before = array.astype(np.float64)
        after = before.astype(dtype).astype(np.float64)
    finite = np.isfinite(before)
    kept = (np.isfinite(after) == finite) & (np.isnan(after) == np.isnan(before))
    kept &= ~finite | (np.abs(before) <= largest)
    kept &= np.isnan(before) | (np.signbit(before) == np.signbit(after)) | (after == 0)
    return bool(kept.all())


def _is_kept(array: Array, dtype: np.dtype[Any]) -> bool:
    """Return whether all values are the same after a cast from or to integers or booleans."""
    with np.errstate(all="ignore"):
        if array.dtype.itemsize == dtype.itemsize == 1:  # of these, some have no cast to others
            array = array.astype(np.float32)
        after = array.astype(dtype)
        # Infinity becomes an integer, and comes back as such.
        finite = [np.isfinite(one).all() for one in (array, after) if is_float(one.dtype)]
        return all(finite) and bool((after.astype(array.dtype) == array).all())
