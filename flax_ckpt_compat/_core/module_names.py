"""Order and count names of modules and checkpoints as Flax does."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
SIGNED_FLOAT_RE = re.compile(rf"([-+]?{NUMBER})")
UNSIGNED_FLOAT_RE = re.compile(rf"[-+]?({NUMBER})")
MODULE_NUM_RE = re.compile(r"(.*)_\d+$")
_NUMBERED = re.compile(r"(.*?)(\d{1,15})", re.ASCII | re.DOTALL)  # Python refuses to convert thousands of digits


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
    """Return old → new names of modules: pre-linen's have one count for all classes, linen's one count a class.

    Names without a number, and linen's own, stay as they are. Pass all children of one module."""
    counts: dict[str, int] = {}
    renamed = {}
    for name in natural_sort(names):
        match = MODULE_NUM_RE.match(name)
        renamed[name] = name
        if match:
            renamed[name] = f"{match[1]}_{counts.get(match[1], 0)}"
            counts[match[1]] = counts.get(match[1], 0) + 1
    return renamed
