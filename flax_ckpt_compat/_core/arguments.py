"""Validate numbers and flags that callers pass.

One-element arrays are accepted as scalars."""

from __future__ import annotations

import math
import sys
from typing import Any

from flax_ckpt_compat._core.errors import ArgumentError


def found(value: Any) -> str:
    """Return the end of an error message: what was found in place of what is expected."""
    shape = getattr(value, "shape", None)  # an array may have been deleted, and cannot be shown
    return f"found an array of shape {shape}" if isinstance(shape, tuple) else f"found {value!r:.100}"


def number(value: Any, name: str, *, of_any_rank: bool = False) -> Any:
    """Return the Python number of a 0-d array, and anything else as it is; raise ArgumentError for other arrays.

    If ``of_any_rank``, arrays of one element and more axes count, too."""
    # 0-d arrays of numpy and jax, and numpy scalars, have item(), which turns numpy's and jax's bools into bool.
    if isinstance(value, (int, float, str)) or not hasattr(value, "item"):
        return value
    shape = getattr(value, "shape", ())
    if not isinstance(shape, tuple):  # of a class, such as np.float32
        return value
    if (math.prod(shape) != 1) if of_any_rank else shape:
        expected = "one number, or an array of equal ones" if name == "step" else "one number"
        raise ArgumentError(f"{name} must be {expected}, {found(value)}")
    jax = sys.modules.get("jax")  # a tracer implies that it is loaded
    if jax is not None and isinstance(value, jax.core.Tracer):
        raise ArgumentError(f"{name} has no value while jax traces a function; call this outside of jit and the like")
    try:
        item = value.item()
    except RuntimeError as error:  # of a jax array that was deleted or donated
        raise ArgumentError(f"{name} cannot be read: {error}") from error
    if isinstance(item, (bool, int, float)):
        return item
    try:
        return float(value)  # such as bfloat16
    except (TypeError, ValueError):
        return item


def flag(value: Any, name: str) -> bool:
    """Return the value of a flag; 0, 1 and arrays of one element count, and None as False."""
    given = False if value is None else number(value, name, of_any_rank=True)
    if not isinstance(given, bool | int | float) or given not in (0, 1):
        raise ArgumentError(f"{name} must be True or False, {found(value)}")
    return bool(given)
