"""Python values of subclasses as the plain values that checkpoints hold, the same in both formats."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from flax_ckpt_compat._core.tree import Path, show_path

_log = logging.getLogger("flax_ckpt_compat")
# Flax's msgpack format refuses subclasses of int, float and str, Orbax stores their values; msgpack takes buffers.
_BASES = (int, float, complex, str, bytes, bytearray, memoryview)
_EXACT = {bool, int, float, complex, str, bytes, type(None)}
_told: set[type] = set()


def plain(leaf: Any, path: Path) -> Any:
    """Return a leaf with a subclass of a Python type, or a buffer, replaced by the plain value.

    That the type is not kept is logged once for each type.
    """
    kind = type(leaf)
    if kind in _EXACT or not isinstance(leaf, _BASES) or isinstance(leaf, np.generic):
        return leaf
    value = _value(leaf)
    if kind not in _told:
        _told.add(kind)
        _log.warning(
            "%s: a %s.%s is saved as the plain %s %.100r, and restored as that",
            show_path(path), kind.__module__, kind.__qualname__, type(value).__name__, value,
        )  # fmt: skip
    return value


def _value(leaf: Any) -> Any:
    # By the base classes' own methods: a subclass may convert to something else.
    if isinstance(leaf, int):
        return int.__int__(leaf)
    if isinstance(leaf, float):
        return float.__float__(leaf)
    if isinstance(leaf, complex):
        return complex.__complex__(leaf)
    if isinstance(leaf, str):
        return str.__str__(leaf)
    return memoryview(leaf).tobytes()
