"""Change the values of leaves: dtype, padding, any function, PRNG keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.dtypes import dtype_from_name, is_float, is_integer
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import KeyData, Node, Path, is_jax_array, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, is_key
from flax_ckpt_compat.rules import _edit_tree
from flax_ckpt_compat.rules._edit_tree import Array
from flax_ckpt_compat.rules._rule import Apply, RuleError, misfit, name_in_messages, rule

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
    wanted = _dtype(dtype)
    kind = kind_of(wanted)
    if kind is None:
        raise RuleError("expected a dtype of floats, ints or complex numbers")

    def changed(leaf: Array, path: Path, _: Node) -> Node:
        old = leaf.dtype
        if old is None or kind_of(old) != kind:
            return None
        if old == wanted:
            return leaf

        what = f"{name_in_messages()}: {show_path(path)}"

        def function(value: Any) -> Any:
            return checked_cast(value, wanted, what)

        return _edit_tree.apply_to(leaf, function, f"{old.name} → {wanted.name}", dtype=wanted)

    return _edit_tree.each_array(pattern, changed, f"array of {kind}")


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

    def changed(leaf: Array, path: Path, target: Node) -> Node:
        old = leaf.shape or ()
        at = _edit_tree.axis_of(axis, len(old), path)
        if old[at] == size:
            return leaf
        if old[at] > size:
            raise misfit(path, f"has length {old[at]} on axis {axis} already; see cut")
        shape = (*old[:at], size, *old[at + 1 :])
        if isinstance(value, str):
            fill, note = _targets_own(target, path, shape, leaf.dtype), "with the target's own values"
        else:
            fill, note = _fill(value, leaf.dtype, path), f"filled with {value}"
        function = _filled(fill, shape, leaf.dtype, f"{name_in_messages()}: the target's own {show_path(path)}")
        return _edit_tree.apply_to(leaf, function, f"{old[at]} → {size} on axis {at}, {note}", shape=shape)

    return _edit_tree.each_array(pattern, changed)


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

    def changed(leaf: Any, path: Path, _: Node) -> Node:
        is_value = isinstance(leaf, LeafHandle) and leaf.kind is not LeafKind.PRNG_KEY
        if not is_value and not (isinstance(leaf, Derived) and not is_key(leaf)):
            return None

        note = f"raised by the function of rules.{name_in_messages()} for {show_path(path)}"

        def computed(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                value = value.view()
                value.flags.writeable = False
            try:
                return function(value)
            except Exception as error:
                error.add_note(note)
                raise

        return Derived((leaf,), computed, None, None, getattr(function, "__name__", "a function"))

    return _edit_tree.each_leaf(pattern, changed)


@rule
def wrap_key_data(pattern: str, impl: str | None = None) -> Apply:
    """Turn raw PRNG keys, arrays of uint32, into typed ones, as ``jax.random.wrap_key_data`` does.

    Args:
        pattern: as in `rename`.
        impl: name of the implementation, such as ``"threefry2x32"``; jax's default if None.

    Raises:
        TransformError: a bad pattern; when applied: it matches no array of uint32, or one is not data of such keys.
    """

    def changed(leaf: Array, path: Path, _: Node) -> Node:
        import jax

        if leaf.dtype != np.uint32:
            return None
        name = impl or str(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
        data = jax.ShapeDtypeStruct(leaf.shape or (), np.uint32)
        try:
            keys = jax.eval_shape(lambda values: jax.random.wrap_key_data(values, impl=name), data)
        except (TypeError, ValueError) as error:
            raise misfit(
                path, f"is not data of keys of {name} ({error}); name another impl, or do not match it"
            ) from error
        return Derived((leaf,), lambda value: KeyData(name, value), keys.shape, None, f"keys of {name}")

    return _edit_tree.each_array(pattern, changed, "array of uint32")


@rule
def key_data(pattern: str) -> Apply:
    """Turn typed PRNG keys into raw ones, arrays of uint32, as ``jax.random.key_data`` does.

    Args:
        pattern: as in `rename`.

    Raises:
        TransformError: a bad pattern; when applied: it matches no stored PRNG key.
    """

    def changed(leaf: Any, _: Path, __: Node) -> Node:
        if not isinstance(leaf, LeafHandle) or not is_key(leaf):
            return None
        return Derived((leaf,), lambda keys: np.asarray(keys.data), leaf.shape, leaf.dtype, "key data")

    return _edit_tree.each_leaf(pattern, changed, "PRNG key")


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        return dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TransformError(f"cast: {dtype!r} is not a dtype ({error}); pass a name such as 'bfloat16'") from error


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


def _fill(value: Any, dtype: Any, path: Path) -> Any:
    """Return the fill value as a 0-d array of a dtype."""
    kind = kind_of(dtype)
    try:
        # numpy has no dtype for large Python ints, but floats can hold them.
        given = np.asarray(float(value) if type(value) is int and kind == "floats" else value)
        is_number = given.ndim == 0 and (given.dtype.kind == "b" or kind_of(given.dtype) is not None)
        if is_number and (kind_of(given.dtype) != "complex numbers" or kind == "complex numbers"):
            with np.errstate(all="ignore"):
                held = given.astype(dtype)
                wide = given.astype(np.complex128 if kind == "complex numbers" else np.float64)
                if held.item() == given.item() or (kind in ("floats", "complex numbers") and not _unheld(wide, held)):
                    return held
    except (TypeError, ValueError, OverflowError):
        pass
    raise misfit(path, f"is {dtype}, which {value!r} does not fit; give a number that it holds")


def _targets_own(target: Node, path: Path, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the target's array at a path, which must have this shape, this kind of dtype and local values."""
    node = node_at(target, path)
    remedy = "give a number as value, or rename the stored leaf to the target's name first"
    if not isinstance(node, np.ndarray) and not (is_jax_array(node) and node.is_fully_addressable):
        what = "is abstract" if hasattr(node, "shape") else "is not an array"
        raise misfit(path, f"in the target {what}, so it has no values to fill with; {remedy}")
    if tuple(node.shape) != shape:
        problem = f"in the target is {tuple(node.shape)}, expected {shape}; pad to its length, or give a number"
        raise misfit(path, problem)
    if kind_of(np.dtype(node.dtype)) != kind_of(dtype) or (kind_of(dtype) is None and node.dtype != dtype):
        raise misfit(path, f"in the target is {node.dtype}, which does not become {dtype}; {remedy}")
    return node


def _filled(fill: Any, shape: tuple[int, ...], dtype: Any, what: str) -> Any:
    """Return a function that pads a stored array; the fill is an array of the new shape, or 0-d."""

    def function(stored: Any) -> Any:
        result = memory.empty(shape, dtype)
        old = tuple(slice(0, size) for size in stored.shape)
        # Check only the padding: the target's values elsewhere are not used.
        new = tuple(slice(size if size < whole else 0, None) for size, whole in zip(stored.shape, shape, strict=True))
        result[new] = checked_cast(np.asarray(fill)[new], dtype, what) if fill.ndim else fill
        result[old] = stored
        return result

    return function
