"""Summarize the values of arrays, and compare those of two, in blocks of bounded memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

_Array = np.ndarray[Any, Any]
BLOCK = 2**20  # elements
# Dtypes of less than a byte, whose unused bits mean nothing, and one that holds all of their values.
_NARROW = {
    np.dtype(getattr(ml_dtypes, name)): np.dtype(np.float32 if name.startswith("float") else np.int8)
    for name in ("int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
    if hasattr(ml_dtypes, name)
}
_NO_NUMBERS, _COMPLEX = "USMmO", "cW"  # kinds of dtypes; W is that of ml_dtypes


@dataclasses.dataclass(slots=True)
class Values:
    """Differences between the values of two arrays; arrays may be added in pieces."""

    rtol: float = 0.0  # values may differ by ``atol + rtol * |b|``
    atol: float = 0.0
    size: int = 0  # number of elements
    other_bits: int = 0  # elements with other bits; in arrays of different dtypes, with other values
    other_values: int = 0  # elements with other values: NaN equals NaN, and 0.0 equals -0.0
    outside: int = 0  # elements outside of the tolerances
    only_one_nan: int = 0  # elements that are NaN in one array only
    max_abs: float | None = None  # largest ``|a - b|``, without NaN; None if they are not numbers
    max_rel: float | None = None  # largest ``|a - b| / |b|``, likewise; infinite where b is 0

    def add(self, a: _Array, b: _Array) -> None:
        """Add two arrays of equal shapes."""
        for blocks in zip(_blocks(a), _blocks(b), strict=True):
            one, other = blocks
            self.size += one.size
            is_cast = one.dtype != other.dtype
            if not is_cast:
                bits = _other_bits(one, other)
                if not bits.any():
                    continue
                one, other = one[bits], other[bits]
                self.other_bits += one.size
            if is_numeric(one) and is_numeric(other):
                count = self._add_numbers(one, other)
            else:
                count = _count(one != other) if one.dtype.kind == other.dtype.kind else one.size
                self.outside += count
            self.other_values += count
            self.other_bits += count if is_cast else 0

    def _add_numbers(self, a: _Array, b: _Array) -> int:
        """Compare numbers, those of one dtype with other bits, and return how many have other values."""
        # Integers of one dtype differ by one at least, which long doubles of 64 bits, as on macOS, would round away.
        least = float(a.dtype == b.dtype and _is_integer(a))
        a, b = _wide(a), _wide(b)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            distance, scale = np.maximum(np.abs(a - b), least), np.abs(b)
            nan = np.isnan(a) != np.isnan(b)
            compared = ((a != b) | (least > 0)) & ~np.isnan(a) & ~np.isnan(b)
            near = np.isfinite(a) & np.isfinite(b) & (distance <= self.atol + self.rtol * scale)
            relative = np.nan_to_num(distance[compared] / scale[compared], nan=np.inf, posinf=np.inf)
        self.only_one_nan += _count(nan)
        self.outside += _count((nan | compared) & ~near)
        if relative.size:
            self.max_abs = max(self.max_abs or 0.0, float(distance[compared].max()))
            self.max_rel = max(self.max_rel or 0.0, float(relative.max()))
        return _count(nan | compared)


@dataclasses.dataclass(slots=True)
class Stats:
    """Statistics of one array or several; arrays may be added in pieces."""

    finite: int = 0  # number of elements that are neither NaN nor infinite
    nan: int = 0
    inf: int = 0  # number of infinities, of both signs
    min: int | float | None = None  # smallest finite element, of integers and bools an int; None without, or if complex
    max: int | float | None = None  # largest, likewise
    total: float = 0.0  # sum of the finite elements, as float64; 0 of complex ones

    @property
    def mean(self) -> float | None:
        """Return the mean of the finite elements; None if there is none, or they are complex."""
        return None if self.min is None else self.total / self.finite

    def add(self, array: _Array) -> None:
        """Add an array of numbers or bools; see `is_numeric`."""
        for block in _blocks(array):
            values = block.view(np.uint8) if block.dtype.kind == "b" else block if _is_integer(block) else _wide(block)
            finite, nan = values[np.isfinite(values)], _count(np.isnan(values))
            one = Stats(finite.size, nan, values.size - finite.size - nan)
            if finite.size and finite.dtype.kind != "c":
                with np.errstate(over="ignore"):
                    one.total = float(finite.sum(dtype=np.float64))
                one.min, one.max = finite.min().item(), finite.max().item()
            self.merge(one)

    def merge(self, other: Stats) -> Stats:
        """Add what another one counted, and return this one."""
        self.finite, self.nan, self.inf = self.finite + other.finite, self.nan + other.nan, self.inf + other.inf
        self.min = min((one for one in (self.min, other.min) if one is not None), default=None)
        self.max = max((one for one in (self.max, other.max) if one is not None), default=None)
        self.total += other.total
        return self


def is_numeric(array: _Array) -> bool:
    """Return whether an array holds numbers or bools."""
    return array.dtype.kind not in _NO_NUMBERS


def _blocks(array: _Array) -> Iterator[_Array]:
    """Yield an array in flat blocks, those of dtypes of less than a byte in a dtype of numpy's."""
    flat = np.ascontiguousarray(array).reshape(-1)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        yield block.astype(_NARROW.get(block.dtype, block.dtype), copy=False)


def _other_bits(a: _Array, b: _Array) -> _Array:
    """Return which elements of two arrays of one dtype have other bits."""
    itemsize = a.dtype.itemsize
    if itemsize in (1, 2, 4, 8):
        return np.asarray(a.view(f"u{itemsize}") != b.view(f"u{itemsize}"))
    return np.asarray((a.view(np.uint8).reshape(-1, itemsize) != b.view(np.uint8).reshape(-1, itemsize)).any(axis=1))


def _count(mask: _Array) -> int:
    return int(np.count_nonzero(mask))


def _is_integer(array: _Array) -> bool:
    return array.dtype.kind in "iub"


def _wide(array: _Array) -> _Array:
    """Return numbers in a dtype that holds them all; integers of 64 bits need longdouble."""
    if array.dtype.kind in _COMPLEX:
        return array.astype(np.complex128)
    return array.astype(np.longdouble if _is_integer(array) and array.itemsize > 4 else np.float64)
