"""Change the values of leaves: dtype, padding, any function, PRNG keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.dtypes import dtype_from_name, is_float, is_integer
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import KeyData, Node, is_jax_array
from flax_ckpt_compat._trees.leaf_sources import Derived, is_array, is_key
from flax_ckpt_compat.rules import _edit_tree
from flax_ckpt_compat.rules._edit_tree import Array
from flax_ckpt_compat.rules._rule import Apply, RuleError, rule

_finfo: Any = ml_dtypes.finfo  # which has no types


@rule
def cast(pattern: str, dtype: Any) -> Apply:
    """Cast arrays to another dtype of the same kind: ``cast("params", "bfloat16")``.

    Floats become floats, ints ints, complex numbers complex. Arrays of another kind, such as an optimizer's count,
    are left alone, as are numbers, text and keys. Floats are rounded to nearest, so values below the dtype's smallest
    number become zero (1e-30 in ``float16``); Adam's ``nu`` is often that small.

    Args:
        pattern: as in `rename`: matches whole names anywhere in the key path.
        dtype: name, numpy dtype or scalar type.

    Raises:
        TransformError: no such dtype; when applied: it matches no array of that kind; when restored: a value out of
            the dtype's range, or an infinity or NaN that it lacks.
    """
    try:
        wanted = dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise RuleError(f"{dtype!r} is not a dtype ({error}); pass a name such as 'bfloat16'") from error
    kind = kind_of(wanted)
    if kind is None:
        raise RuleError("expected a dtype of floats, ints or complex numbers")

    def changed(leaf: Array, what: str, _: Node) -> Node:
        if leaf.dtype == wanted:
            return leaf
        how = f"{leaf.dtype} → {wanted.name}"
        return _edit_tree.derived(leaf, lambda value: checked_cast(value, wanted, what), how, dtype=wanted)

    return _edit_tree.each_leaf(
        pattern, changed, f"array of {kind}", lambda leaf: is_array(leaf) and kind_of(leaf.dtype) == kind
    )


@rule
def pad(pattern: str, size: int, axis: int = 0, value: Any = 0) -> Apply:
    """Pad arrays, such as embeddings for a larger vocabulary: ``pad("embedding", 50304, value="target")``.

    Args:
        pattern: as in `rename`; matches the moments of the optimizer too.
        size: new length on the axis; arrays that have it already stay as they are.
        axis: the axis to pad; negative counts from the end.
        value: number to fill with, rounded as by `cast`, or ``"target"`` for the values of the target's own array at
            the same path.

    Raises:
        TransformError: when applied: it matches no array, an array is longer already, ``value`` does not fit an array's
            dtype, or the target has no such array with values; when restored: the target's values do not fit.
    """
    if isinstance(value, str) and value != "target":
        raise RuleError(f"value is {value!r}, expected a number or 'target'")

    def changed(leaf: Array, what: str, own: Node) -> Node:
        old, dtype = leaf.shape or (), np.dtype(leaf.dtype)
        at = _edit_tree.axis_of(axis, old)
        if old[at] == size:
            return leaf
        if old[at] > size:
            raise ValueError(f"it has length {old[at]} on axis {axis} already; see cut")
        shape = (*old[:at], size, *old[at + 1 :])
        fill = _targets_own(own, shape, dtype) if isinstance(value, str) else _fill(value, dtype)
        new = (*(slice(None),) * at, slice(old[at], None))

        def padded(stored: Any) -> Any:
            result = memory.empty(shape, dtype)
            own_part = f"{what}: the target's own array"  # of which only the padding is used
            padding = np.asarray(fill)[new] if fill.ndim else fill
            result[new] = checked_cast(padding, dtype, own_part) if fill.ndim and kind_of(dtype) else padding
            result[tuple(map(slice, old))] = stored
            return result

        note = "with the target's own values" if isinstance(value, str) else f"filled with {value}"
        return _edit_tree.derived(leaf, padded, f"{old[at]} → {size} on axis {at}, {note}", shape=shape)

    return _edit_tree.each_leaf(pattern, changed)


@rule
def apply(pattern: str, function: Callable[[Any], Any]) -> Apply:
    """Compute leaves with a function: ``apply("batch_stats", lambda value: value.mean(axis=0))``.

    Args:
        pattern: as in `rename`; only arrays, numbers, text and bytes, not PRNG keys.
        function: takes the stored value (an array as a read-only ``np.ndarray``), returns the new one. It is called
            when the value is read, so that plans and later rules do not know shape and dtype of the result.

    Raises:
        TransformError: a bad pattern; when applied: it matches no such leaf.
    """

    def changed(leaf: Any, what: str, _: Node) -> Node:
        def computed(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                value = value.view()
                value.flags.writeable = False
            try:
                return function(value)
            except Exception as error:
                error.add_note(f"raised by the function of rules.{what}")
                raise

        return Derived((leaf,), computed, None, None, getattr(function, "__name__", "a function"))

    return _edit_tree.each_leaf(
        pattern, changed, "leaf", lambda leaf: isinstance(leaf, LeafHandle | Derived) and not is_key(leaf)
    )


@rule
def wrap_key_data(pattern: str, impl: str | None = None) -> Apply:
    """Turn raw PRNG keys, arrays of uint32, into typed ones, as ``jax.random.wrap_key_data`` does.

    Args:
        pattern: as in `rename`.
        impl: name of the implementation, such as ``"threefry2x32"``; jax's default if None.

    Raises:
        TransformError: a bad pattern; when applied: it matches no array of uint32, or one is not data of such keys.
    """

    def changed(leaf: Array, *_: Any) -> Node:
        import jax

        name = impl or str(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
        data = jax.ShapeDtypeStruct(leaf.shape or (), np.uint32)
        try:
            keys = jax.eval_shape(lambda values: jax.random.wrap_key_data(values, impl=name), data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not data of keys of {name} ({error}); name another impl, or do not match it") from error
        return Derived((leaf,), lambda value: KeyData(name, value), keys.shape, None, f"keys of {name}")

    return _edit_tree.each_leaf(
        pattern, changed, "array of uint32", lambda leaf: is_array(leaf) and leaf.dtype == np.uint32
    )


@rule
def key_data(pattern: str) -> Apply:
    """Turn typed PRNG keys into raw ones, arrays of uint32, as ``jax.random.key_data`` does.

    Args:
        pattern: as in `rename`.

    Raises:
        TransformError: a bad pattern; when applied: it matches no stored PRNG key.
    """

    def changed(leaf: LeafHandle, *_: Any) -> Node:
        return Derived((leaf,), lambda keys: np.asarray(keys.data), leaf.shape, leaf.dtype, "key data")

    return _edit_tree.each_leaf(
        pattern, changed, "PRNG key", lambda leaf: isinstance(leaf, LeafHandle) and is_key(leaf)
    )


def kind_of(dtype: np.dtype[Any]) -> str | None:
    """Return the kind of number of a dtype; None for text, booleans and times."""
    if is_integer(dtype):
        return "ints"
    if is_float(dtype):
        return "floats"
    return "complex numbers" if dtype.kind == "c" else None


def checked_cast(value: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Cast an array; ``what`` names it in the TransformError about values that the dtype cannot hold."""
    with np.errstate(over="ignore", invalid="ignore"):
        result = _astype(value, dtype)
        bad = _unheld(value, result)
    if bad.any():
        raise TransformError(
            f"{what} has {int(bad.sum())} values that {dtype.name} cannot hold, such as {value[bad][0]}; cast to a "
            "wider dtype, or change them with rules.apply first"
        )
    return result


def _astype(value: Any, dtype: np.dtype[Any]) -> Any:
    try:
        return value.astype(dtype)
    except TypeError:  # numpy has no cast between some of the narrow dtypes
        return value.astype(np.int64 if kind_of(dtype) == "ints" else np.float64).astype(dtype)


def _unheld(value: Any, result: Any) -> Any:
    """Return a mask of the numbers that a cast changed by more than rounding."""
    same = _astype(result, value.dtype)
    if kind_of(result.dtype) == "ints":
        return (same != value) | ((result < 0) != (value < 0))
    bad = np.isfinite(value) != np.isfinite(same)
    if result.dtype.kind == "V" and not np.isnan(np.float32(np.nan).astype(result.dtype)):
        # Narrow floats without NaN saturate at their largest value.
        bad |= np.abs(value.astype(np.float64)) > float(_finfo(result.dtype).max)
    return bad | (np.isnan(value) != np.isnan(same))


def _fill(value: Any, dtype: Any) -> Any:
    """Return the fill value as a 0-d array of a dtype."""
    number = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
    kind = kind_of(dtype)
    wide = {"floats": np.float64, "complex numbers": np.complex128}.get(kind or "")
    if isinstance(number, int | float | np.floating) or (isinstance(number, complex) and kind == "complex numbers"):
        with contextlib.suppress(ValueError, OverflowError), np.errstate(all="ignore"):
            given = np.asarray(number, wide)
            held = given.astype(dtype)
            if held.item() == number or (wide and not _unheld(given, held)):
                return held
    raise ValueError(f"{value!r} does not fit; give a number that it holds")


def _targets_own(own: Node, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the target's array, which must have this shape, this kind of dtype and local values."""
    if not isinstance(own, np.ndarray) and not (is_jax_array(own) and own.is_fully_addressable):
        what = "abstract" if hasattr(own, "shape") else "not an array"
        raise ValueError(f"the target's own is {what}, so that it has no values to fill with; give a number as value")
    if tuple(own.shape) != shape:
        raise ValueError(f"the target's own is {tuple(own.shape)}, expected {shape}; pad to its length")
    if kind_of(np.dtype(own.dtype)) != kind_of(dtype) or (kind_of(dtype) is None and own.dtype != dtype):
        raise ValueError(f"the target's own is {own.dtype}, which does not become {dtype}; give a number as value")
    return own
