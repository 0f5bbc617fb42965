"""Check whether a cast changes values by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from flax_ckpt_compat._core.dtypes import is_float, is_integer

Array = np.ndarray[Any, Any]
_BLOCK = 2**20
_floats: Any = ml_dtypes.finfo
_integers: Any = ml_dtypes.iinfo


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
        return is_float(stored) and is_float(wanted) and _is_wider(_floats(stored), _floats(wanted))
    return np.can_cast(stored, wanted, "safe")


def _is_wider(stored: Any, wanted: Any) -> bool:
    return wanted.dtype.isbuiltin == 1 and wanted.nmant >= stored.nmant and float(wanted.max) >= float(stored.max)


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
