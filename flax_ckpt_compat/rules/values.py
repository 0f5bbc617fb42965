"""Change arrays one by one: dtype, length, order of axes, shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.dtypes import dtype_from_name
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import Branch, Node, Path, is_jax_array, show_path
from flax_ckpt_compat.rules import _arrays
from flax_ckpt_compat.rules._arrays import Array
from flax_ckpt_compat.rules._rule import Apply, rule

_finfo: Any = ml_dtypes.finfo  # which has no types


@rule
def cast(_rule_name: str, pattern: str, dtype: Any) -> Apply:
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
    kind = _kind(wanted)
    if kind is None:
        raise TransformError(f"{_rule_name}: expected a dtype of floats, ints or complex numbers")

    def changed(leaf: Array, path: Path, _: Node) -> Node:
        old = leaf.dtype
        if old is None or _kind(old) != kind:
            return None
        if old == wanted:
            return leaf

        def function(value: Any) -> Any:
            return _cast(value, wanted, f"{_rule_name}: {show_path(path)}")

        return _arrays.apply_to(leaf, function, f"{old.name} → {wanted.name}", dtype=wanted)

    return _arrays.each_array(pattern, _rule_name, changed, f"array of {kind}")


@rule
def pad(_rule_name: str, pattern: str, size: int, axis: int = 0, value: Any = 0) -> Apply:
    """Pad arrays, such as embeddings for a larger vocabulary: ``pad("embedding", 50304, value="target")``.

    Args:
        pattern: as in `rename`; matches the moments of the optimizer too.
        size: new length on the axis; arrays that have it already stay as they are.
        axis: the axis to pad; negative counts from the end.
        value: number to fill with, rounded as by `cast`, or ``"target"`` for the values of the target's own array at
            the same path.

    Raises:
        TransformError: when applied: it matches no array, one is longer already, the number does not fit its dtype,
            or the target has no such array with values; when restored: the target's values do not fit.
    """
    if isinstance(value, str) and value != "target":
        raise TransformError(f"{_rule_name}: value is {value!r}, expected a number or 'target'")

    def changed(leaf: Array, path: Path, target: Node) -> Node:
        old = leaf.shape or ()
        at = _arrays.axis_of(axis, len(old), path, _rule_name)
        if old[at] == size:
            return leaf
        if old[at] > size:
            raise _misfit(f"{_rule_name}: {show_path(path)} has length {old[at]} on axis {axis} already; see cut", path)
        shape = (*old[:at], size, *old[at + 1 :])
        how = f"{old[at]} → {size} on axis {at}"
        if isinstance(value, str):
            own, how = (
                _targets_own(target, path, shape, leaf.dtype, _rule_name),
                f"{how}, with the target's own values",
            )
            function = _filled(own, shape, leaf.dtype, f"{_rule_name}: the target's own {show_path(path)}")
        else:
            fill, how = _fill(value, leaf.dtype, path, _rule_name), f"{how}, filled with {value}"
            function = _filled(fill, shape, leaf.dtype, _rule_name)
        return _arrays.apply_to(leaf, function, how, shape=shape)

    return _arrays.each_array(pattern, _rule_name, changed)


@rule
def cut(_rule_name: str, pattern: str, size: int, axis: int = 0) -> Apply:
    """Keep the first values on an axis, and read only these: ``cut("embedding", 50257)``.

    Args:
        pattern: as in `rename`; matches the moments of the optimizer too.
        size: new length on the axis; arrays that have it already stay as they are.
        axis: the axis to cut; negative counts from the end.

    Raises:
        TransformError: when applied: it matches no array, or one is shorter.
    """
    if size < 0:
        raise TransformError(f"{_rule_name}: a length cannot be negative")

    def changed(leaf: Array, path: Path, _: Node) -> Node:
        shape = leaf.shape or ()
        at = _arrays.axis_of(axis, len(shape), path, _rule_name)
        if shape[at] == size:
            return leaf
        if shape[at] < size:
            raise _misfit(f"{_rule_name}: {show_path(path)} has length {shape[at]} on axis {axis} only; see pad", path)
        return _arrays.axis_slice(leaf, at, 0, size, f"the first {size} of {shape[at]} on axis {at}")

    return _arrays.each_array(pattern, _rule_name, changed)


@rule
def transpose(_rule_name: str, pattern: str, axes: Sequence[int]) -> Apply:
    """Permute the axes of arrays, as ``np.transpose`` does: ``transpose("conv/kernel", (2, 3, 1, 0))``.

    Args:
        pattern: as in `rename`.
        axes: for each new axis the index of the old one; negative counts from the end.

    Raises:
        TransformError: when applied: it matches no array, or one has other axes than these.
    """

    def changed(leaf: Array, path: Path, _: Node) -> Node:
        shape = leaf.shape or ()
        order = tuple(_arrays.axis_of(axis, len(shape), path, _rule_name) for axis in axes)
        if sorted(order) != list(range(len(shape))):
            raise _misfit(f"{_rule_name}: {show_path(path)} has {len(shape)} axes, and each must be named once", path)
        new = tuple(shape[axis] for axis in order)
        return _arrays.apply_to(leaf, lambda value: value.transpose(order).copy(order="C"), f"axes {order}", shape=new)

    return _arrays.each_array(pattern, _rule_name, changed)


@rule
def reshape(_rule_name: str, pattern: str, shape: Sequence[int]) -> Apply:
    """Reshape arrays, with values in C order: ``reshape("query/kernel", (512, 8, 64))``.

    Args:
        pattern: as in `rename`.
        shape: the new shape; one length may be -1 and is then computed.

    Raises:
        TransformError: two lengths of -1; when applied: it matches no array, or one has another number of values.
    """
    known = math.prod(size for size in shape if size != -1)
    if sum(size < 0 for size in shape) > 1 or min(shape, default=0) < -1:
        raise TransformError(f"{_rule_name}: at most one length may be -1, and none below")

    def changed(leaf: Array, path: Path, _: Node) -> Node:
        old = leaf.shape or ()
        count = math.prod(old)
        new = tuple(count // max(known, 1) if size == -1 else size for size in shape)
        if math.prod(new) != count:
            raise _misfit(f"{_rule_name}: {show_path(path)} is {list(old)}, which has {count} values", path)
        return _arrays.apply_to(leaf, lambda value: value.reshape(new).copy(order="C"), f"{old} → {new}", shape=new)

    return _arrays.each_array(pattern, _rule_name, changed)


def _misfit(message: str, path: Path) -> TransformError:
    return TransformError(message, leaf=show_path(path))


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        return dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TransformError(f"cast: {dtype!r} is no dtype: {error}") from error


def _kind(dtype: np.dtype[Any]) -> str | None:
    """Return the kind of number of a dtype; None for text, booleans and times."""
    if dtype.kind in "iu" or dtype.name in ("int2", "uint2", "int4", "uint4"):
        return "ints"
    if dtype.kind == "f" or (dtype.kind == "V" and hasattr(ml_dtypes, dtype.name)):
        return "floats"
    return "complex numbers" if dtype.kind == "c" else None


def _cast(value: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Cast an array; ``what`` names it in the message.

    Raises:
        TransformError: it has values that the dtype cannot hold.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = _astype(value, dtype)
        bad = _unheld(value, result)
    if bad.any():
        raise TransformError(
            f"{what} has {int(bad.sum())} values that {dtype.name} cannot hold, such as {value[bad][0]}"
        )
    return result


def _astype(value: Any, dtype: np.dtype[Any]) -> Any:
    try:
        return value.astype(dtype)
    except TypeError:  # numpy has no cast between some of the narrow dtypes
        return value.astype(np.int64 if _kind(dtype) == "ints" else np.float64).astype(dtype)


def _unheld(value: Any, result: Any) -> Any:
    """Return a mask of the numbers that a cast changed by more than rounding."""
    same = _astype(result, value.dtype)
    if _kind(result.dtype) == "ints":
        return (same != value) | ((result < 0) != (value < 0))
    bad = np.isfinite(value) != np.isfinite(same)
    if result.dtype.kind == "V" and not np.isnan(np.float32(np.nan).astype(result.dtype)):
        # Narrow floats without NaN saturate at their largest value.
        bad |= np.abs(value.astype(np.float64)) > float(_finfo(result.dtype).max)
    return bad | (np.isnan(value) != np.isnan(same))


def _fill(value: Any, dtype: Any, path: Path, rule_name: str) -> Any:
    """Return the fill value as a 0-d array of a dtype."""
    kind = _kind(dtype)
    try:
        # numpy has no dtype for large Python ints, but floats can hold them.
        given = np.asarray(float(value) if type(value) is int and kind == "floats" else value)
        is_number = given.ndim == 0 and (given.dtype.kind == "b" or _kind(given.dtype) is not None)
        if is_number and (_kind(given.dtype) != "complex numbers" or kind == "complex numbers"):
            with np.errstate(all="ignore"):
                held = given.astype(dtype)
                wide = given.astype(np.complex128 if kind == "complex numbers" else np.float64)
                if held.item() == given.item() or (kind in ("floats", "complex numbers") and not _unheld(wide, held)):
                    return held
    except (TypeError, ValueError, OverflowError):
        pass
    raise _misfit(f"{rule_name}: {value!r} does not fit {show_path(path)}, which is {dtype}", path)


def _targets_own(target: Node, path: Path, shape: tuple[int, ...], dtype: Any, rule_name: str) -> Any:
    """Return the target's array at a path, which must have this shape, this kind of dtype and local values."""
    node = target
    for name in path:
        node = node.children.get(name) if isinstance(node, Branch) else None
    shown = show_path(path)
    remedy = "give a number as value, or rename the stored leaf to the target's name first"
    if not isinstance(node, np.ndarray) and not (is_jax_array(node) and node.is_fully_addressable):
        what = "is abstract" if hasattr(node, "shape") else "is no array"
        raise _misfit(f"{rule_name}: the target's own {shown} {what}, so it has no values to fill with; {remedy}", path)
    if tuple(node.shape) != shape:
        raise _misfit(f"{rule_name}: the target's own {shown} is {tuple(node.shape)}, expected {shape}", path)
    if _kind(np.dtype(node.dtype)) != _kind(dtype) or (_kind(dtype) is None and node.dtype != dtype):
        raise _misfit(f"{rule_name}: the target's own {shown} is {node.dtype}, which does not become {dtype}", path)
    return node


def _filled(fill: Any, shape: tuple[int, ...], dtype: Any, what: str) -> Any:
    """Return a function that pads a stored array; the fill is an array of the new shape, or 0-d."""

    def function(stored: Any) -> Any:
        result = memory.empty(shape, dtype)
        old = tuple(slice(0, size) for size in stored.shape)
        # Check only the padding: the target's values elsewhere are not used.
        new = tuple(slice(size if size < whole else 0, None) for size, whole in zip(stored.shape, shape, strict=True))
        result[new] = _cast(np.asarray(fill)[new], dtype, what) if fill.ndim else fill
        result[old] = stored
        return result

    return function
