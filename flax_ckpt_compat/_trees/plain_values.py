"""Convert values of Python subclasses to the plain values that checkpoints hold, alike in every format."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from flax_ckpt_compat._core.tree import Path, show_path

_log = logging.getLogger("flax_ckpt_compat")
# Flax's msgpack format refuses subclasses of int, float and str, Orbax stores their values; msgpack takes buffers.
_BASES = (int, float, complex, str, bytes, bytearray, memoryview)
_EXACT = {bool, int, float, complex, str, bytes, type(None)}
_warned: set[type] = set()


def plain(leaf: Any, path: Path) -> Any:
    """Convert a leaf of a subclass of a Python type, or a buffer, to the plain value; warn once per type."""
    kind = type(leaf)
    if kind in _EXACT or not isinstance(leaf, _BASES) or isinstance(leaf, np.generic):
        return leaf
    value = _value(leaf)
    if kind not in _warned:
        _warned.add(kind)
        _log.warning(
            "%s: a %s.%s is saved as the plain %s %.100r, and restored as that",
            show_path(path), kind.__module__, kind.__qualname__, type(value).__name__, value,
        )  # fmt: skip
    return value


def _value(leaf: Any) -> Any:
    # The base classes' own methods: a subclass may override the conversion.
    if isinstance(leaf, int):
        return int.__int__(leaf)
    if isinstance(leaf, float):
        return float.__float__(leaf)
    if isinstance(leaf, complex):
        return complex.__complex__(leaf)
    if isinstance(leaf, str):
        return str.__str__(leaf)
    return memoryview(leaf).tobytes()
