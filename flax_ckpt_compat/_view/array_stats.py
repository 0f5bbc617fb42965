"""Summarize the values of arrays: smallest, largest, mean, NaNs and infinities, in blocks of bounded memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from flax_ckpt_compat._view.compare_values import BLOCK, as_floats, is_integer, widened

_NO_NUMBERS, _COMPLEX = "USMmO", "cW"  # kinds of dtypes; W is that of ml_dtypes


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
