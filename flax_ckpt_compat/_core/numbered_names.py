"""Order and count names that hold numbers, as legacy Flax does, and define the names that it gives to arrays."""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
SIGNED_FLOAT_RE = re.compile(rf"([-+]?{NUMBER})")
UNSIGNED_FLOAT_RE = re.compile(rf"[-+]?({NUMBER})")
MODULE_NUM_RE = re.compile(r"(.*)_\d+$")
_NUMBERED = re.compile(r"(.*?)(\d{1,15})", re.ASCII | re.DOTALL)  # Python refuses to convert thousands of digits
ARRAYS_POSTFIX = "_gda"  # Flax's MP_ARRAY_POSTFIX: the folder of arrays that span processes
ARRAYS_PLACEHOLDER = "//GDAPlaceholder:"  # Flax's MP_ARRAY_PH: begins a string that refers to one of them


def natural_sort(file_list: Iterable[str], signed: bool = True) -> list[str]:
    """Sort names by the numbers in them: ``a_2`` before ``a_10``.

    Args:
        file_list: names to sort.
        signed: a ``-`` or ``+`` before a number is its sign, not a separator.
    """
    pattern = SIGNED_FLOAT_RE if signed else UNSIGNED_FLOAT_RE

    def key(name: str) -> list[Any]:
        return [float(piece) if pattern.match(piece) else piece for piece in pattern.split(name)]

    return sorted(file_list, key=key)


@functools.lru_cache(10_000)
def numbered(name: str) -> tuple[str, int] | None:
    """Return (text before the number, number) of a name that ends in one; None for other names."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def linen_names(names: Iterable[str]) -> dict[str, str]:
    """Return old → new names of a module's children: pre-linen's are counted together, linen's class by class."""
    counts, renamed = collections.defaultdict[str, Iterator[int]](itertools.count), {}
    for name in natural_sort(names):
        match = MODULE_NUM_RE.match(name)
        renamed[name] = f"{match[1]}_{next(counts[match[1]])}" if match else name
    return renamed
