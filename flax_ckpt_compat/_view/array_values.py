"""Summarize the values of arrays, and compare those of two, in blocks of bounded memory."""

from __future__ import annotations

import dataclasses
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
# Kinds of dtypes; W is that of ml_dtypes.
_TEXT, _NO_NUMBERS, _COMPLEX = "USMm", "USMmO", "cW"


@dataclasses.dataclass(slots=True)
class Values:
    """Differences between the values of two arrays; arrays may be added in pieces.

    Attributes:
        rtol, atol: the tolerances: values may differ by ``atol + rtol * |b|``.
        size: number of elements.
        other_bits: elements with other bits; in arrays of different dtypes, with other values.
        other_values: elements with other values. NaN equals NaN, and 0.0 equals -0.0.
        outside: elements outside of the tolerances.
        only_one_nan: elements that are NaN in one array only.
        max_abs: largest ``|a - b|``, without NaN; None if they are not numbers.
        max_rel: largest ``|a - b| / |b|``, likewise; infinite where b is 0.
    """

    rtol: float = 0.0
    atol: float = 0.0
    size: int = 0
    other_bits: int = 0
    other_values: int = 0
    outside: int = 0
    only_one_nan: int = 0
    max_abs: float | None = None
    max_rel: float | None = None

    def add(self, a: _Array, b: _Array) -> None:
        """Add two arrays of equal shapes."""
        self.size += a.size
        a, b = (np.ascontiguousarray(array).reshape(-1) for array in (a, b))
        for start in range(0, a.size, BLOCK):
            self._add(a[start : start + BLOCK], b[start : start + BLOCK])

    def _add(self, a: _Array, b: _Array) -> None:
        a, b = widened(a), widened(b)
        if a.dtype == b.dtype:
            bits = _other_bits(a, b)
            count = int(np.count_nonzero(bits))
            if not count:
                return
            self.other_bits += count
            a, b = a[bits], b[bits]
        if a.dtype.kind in _TEXT or b.dtype.kind in _TEXT:
            other = np.asarray(a != b) if a.dtype.kind == b.dtype.kind else np.ones(a.shape, bool)
            self._count(int(np.count_nonzero(other)), int(np.count_nonzero(other)), is_cast=a.dtype != b.dtype)
            return
        self._add_numbers(a, b)

    def _add_numbers(self, a: _Array, b: _Array) -> None:
        is_cast, distance = a.dtype != b.dtype, _distance(a, b)
        x, y = as_floats(a), as_floats(b)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            nan = np.isnan(x) != np.isnan(y)
            distance = np.abs(x - y) if distance is None else distance
            other = nan | ((distance != 0) if is_integer(a) and is_integer(b) else ((x != y) & ~np.isnan(x)))
            compared = other & ~nan
            scale = np.abs(y)
            near = np.isfinite(x) & np.isfinite(y) & (distance <= self.atol + self.rtol * scale)
            self._count(int(np.count_nonzero(other)), int(np.count_nonzero(other & ~near)), is_cast=is_cast)
            self.only_one_nan += int(np.count_nonzero(nan))
            if compared.any():
                relative = np.nan_to_num(distance / scale, nan=np.inf, posinf=np.inf)
                # Of infinities of one sign, the difference is NaN; they are equal, and not compared.
                self.max_abs = max(self.max_abs or 0.0, float(distance[compared].max()))
                self.max_rel = max(self.max_rel or 0.0, float(relative[compared].max()))

    def _count(self, other: int, outside: int, *, is_cast: bool) -> None:
        self.other_values += other
        self.outside += outside
        self.other_bits += other if is_cast else 0


def is_integer(array: _Array) -> bool:
    """Return whether an array holds integers or bools."""
    return array.dtype.kind in "iub"


def widened(array: _Array) -> _Array:
    """Return an array of less than a byte an element in a dtype of numpy's; others as they are."""
    wide = _NARROW.get(array.dtype)
    return array if wide is None else array.astype(wide)


def _other_bits(a: _Array, b: _Array) -> _Array:
    """Return which elements of two arrays of one dtype have other bits."""
    itemsize = a.dtype.itemsize
    if itemsize in (1, 2, 4, 8):
        return np.asarray(a.view(f"u{itemsize}") != b.view(f"u{itemsize}"))
    return np.asarray((a.view(np.uint8).reshape(-1, itemsize) != b.view(np.uint8).reshape(-1, itemsize)).any(axis=1))


def as_floats(array: _Array) -> _Array:
    """Return an array as float64, or complex128."""
    return array.astype(np.complex128 if array.dtype.kind in _COMPLEX else np.float64)


def _distance(a: _Array, b: _Array) -> _Array | None:
    """Return the distances of integers, exactly where they have one dtype; None if they are others."""
    if not (is_integer(a) and is_integer(b)):
        return None
    if {a.dtype, b.dtype} == {np.dtype(np.int64), np.dtype(np.uint64)}:  # no integer dtype holds both
        signed, unsigned = (a, b) if a.dtype.kind == "i" else (b, a)
        above_zero = np.maximum(signed, 0).astype(np.uint64)
        distance = np.maximum(above_zero, unsigned) - np.minimum(above_zero, unsigned)
        return np.asarray(distance.astype(np.float64) - np.minimum(signed, 0).astype(np.float64))
    if "b" in (a.dtype.kind, b.dtype.kind):
        a, b = a.astype(np.int64), b.astype(np.int64)
    return np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)


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

    def add(self, array: np.ndarray[Any, Any]) -> None:
        """Add an array of numbers or bools; see `is_numeric`."""
        flat = np.ascontiguousarray(array).reshape(-1)
        for start in range(0, flat.size, BLOCK):
            self._add(widened(flat[start : start + BLOCK]))

    def _add(self, block: np.ndarray[Any, Any]) -> None:
        if block.dtype.kind == "b":
            block = block.view(np.uint8)
        elif not is_integer(block):
            block = as_floats(block)
            finite = np.isfinite(block)
            if not finite.all():
                nan = int(np.count_nonzero(np.isnan(block)))
                self.nan += nan
                self.inf += int(np.count_nonzero(~finite)) - nan
                block = block[finite]
        if not block.size:
            return
        if block.dtype.kind in _COMPLEX:
            self.finite += block.size
            return
        with np.errstate(over="ignore"):
            total = float(block.sum(dtype=np.float64))
        self._merge(block.size, block.min().item(), block.max().item(), total)

    def merge(self, other: Stats) -> None:
        """Add what another one counted."""
        self.nan += other.nan
        self.inf += other.inf
        if other.min is None or other.max is None:
            self.finite += other.finite
        else:
            self._merge(other.finite, other.min, other.max, other.total)

    def _merge(self, finite: int, low: float, high: float, total: float) -> None:
        self.finite += finite
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        self.total += total


def is_numeric(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array holds numbers or bools."""
    return array.dtype.kind not in _NO_NUMBERS
