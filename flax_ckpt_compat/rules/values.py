"""Rules that change arrays one by one: dtype, length, order of axes, shape."""

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
from flax_ckpt_compat.rules import _arrays, _trees
from flax_ckpt_compat.rules._arrays import Array
from flax_ckpt_compat.rules._rule import Apply, rule


@rule
def cast(who: str, pattern: str, dtype: Any) -> Apply:
    """Gives arrays another dtype of the same kind: ``cast("params", "bfloat16")``.

    Floats become floats, ints ints, complex numbers complex. Arrays of another kind, such as an optimizer's count,
    are left alone, as are numbers, text and keys.

    Args:
        pattern: as in `rename`: matches whole names anywhere in the key path.
        dtype: name, numpy dtype or scalar type.

    Raises:
        TransformError: no such dtype; when applied: it matches no array of that kind; when restored: a finite
            value does not fit.
    """
    wanted = _dtype(dtype)
    names = _trees.whole_names(pattern, who)
    kind = _kind(wanted)
    if kind is None:
        raise TransformError(f"{who}: expected a dtype of floats, ints or complex numbers")

    def changed(leaf: Array, path: Path) -> Node:
        old = leaf.dtype
        if old is None or _kind(old) != kind:
            return None
        if old == wanted:
            return leaf

        def function(value: Any) -> Any:
            return _cast(value, wanted, f"{who}: {show_path(path)}")

        return _arrays.apply_to(leaf, function, f"{old.name} → {wanted.name}", dtype=wanted)

    return lambda stored, _: _arrays.each_array(stored, names, who, changed, needed=f"array of {kind}")


@rule
def pad(who: str, pattern: str, size: int, axis: int = 0, value: Any = 0) -> Apply:
    """Makes arrays longer, such as the table of a larger vocabulary: ``pad("embedding", 50304, value="target")``.

    Args:
        pattern: as in `rename`; matches the moments of the optimizer, too.
        size: length on the axis afterwards; arrays that have it already stay as they are.
        axis: negative counts from the end.
        value: number to fill with, or ``"target"`` for what the target's own array at the same path has there.

    Raises:
        TransformError: when applied: it matches no array, one is longer already, the number does not fit its dtype,
            or the target has no such array with values.
    """
    names = _trees.whole_names(pattern, who)
    if isinstance(value, str) and value != "target":
        raise TransformError(f"{who}: value is {value!r}, expected a number or 'target'")

    def apply(stored: Node, target: Node) -> Node:
        def changed(leaf: Array, path: Path) -> Node:
            old = leaf.shape or ()
            at = _arrays.axis_of(axis, len(old), path, who)
            if old[at] == size:
                return leaf
            if old[at] > size:
                raise _misfit(f"{who}: {show_path(path)} has length {old[at]} on axis {axis} already; see cut", path)
            shape = (*old[:at], size, *old[at + 1 :])
            how = f"{old[at]} → {size} on axis {at}"
            if isinstance(value, str):
                own = _targets_own(target, path, shape, leaf.dtype, who)
                function, how = _filled(own, None, shape, leaf.dtype), f"{how}, with the target's own values"
            else:
                _check_fill(value, leaf.dtype, path, who)
                function, how = _filled(None, value, shape, leaf.dtype), f"{how}, filled with {value}"
            return _arrays.apply_to(leaf, function, how, shape=shape)

        return _arrays.each_array(stored, names, who, changed)

    return apply


@rule
def cut(who: str, pattern: str, size: int, axis: int = 0) -> Apply:
    """Keeps the first values on an axis, of which only they are read: ``cut("embedding", 50257)``.

    Args:
        pattern: as in `rename`; matches the moments of the optimizer, too.
        size: length on the axis afterwards; arrays that have it already stay as they are.
        axis: negative counts from the end.

    Raises:
        TransformError: when applied: it matches no array, or one is shorter.
    """
    names = _trees.whole_names(pattern, who)
    if size < 0:
        raise TransformError(f"{who}: a length cannot be negative")

    def changed(leaf: Array, path: Path) -> Node:
        shape = leaf.shape or ()
        at = _arrays.axis_of(axis, len(shape), path, who)
        if shape[at] == size:
            return leaf
        if shape[at] < size:
            raise _misfit(f"{who}: {show_path(path)} has length {shape[at]} on axis {axis} only; see pad", path)
        return _arrays.piece(leaf, at, 0, size, f"the first {size} of {shape[at]} on axis {at}")

    return lambda stored, _: _arrays.each_array(stored, names, who, changed)


@rule
def transpose(who: str, pattern: str, axes: Sequence[int]) -> Apply:
    """Puts the axes of arrays in another order, as ``np.transpose`` does: ``transpose("conv/kernel", (2, 3, 1, 0))``.

    Args:
        pattern: as in `rename`.
        axes: for each new axis the number of the old one; negative counts from the end.

    Raises:
        TransformError: when applied: it matches no array, or one has other axes than these.
    """
    names = _trees.whole_names(pattern, who)

    def changed(leaf: Array, path: Path) -> Node:
        shape = leaf.shape or ()
        order = tuple(_arrays.axis_of(axis, len(shape), path, who) for axis in axes)
        if sorted(order) != list(range(len(shape))):
            raise _misfit(f"{who}: {show_path(path)} has {len(shape)} axes, and each must be named once", path)
        new = tuple(shape[axis] for axis in order)
        return _arrays.apply_to(leaf, lambda value: value.transpose(order).copy(order="C"), f"axes {order}", shape=new)

    return lambda stored, _: _arrays.each_array(stored, names, who, changed)


@rule
def reshape(who: str, pattern: str, shape: Sequence[int]) -> Apply:
    """Gives arrays another shape with the same values in C order: ``reshape("query/kernel", (512, 8, 64))``.

    Args:
        pattern: as in `rename`.
        shape: afterwards; one length may be -1, which is then computed.

    Raises:
        TransformError: two lengths of -1; when applied: it matches no array, or one has another number of values.
    """
    names = _trees.whole_names(pattern, who)
    known = math.prod(size for size in shape if size != -1)
    if sum(size < 0 for size in shape) > 1 or min(shape, default=0) < -1:
        raise TransformError(f"{who}: at most one length may be -1, and none below")

    def changed(leaf: Array, path: Path) -> Node:
        old = leaf.shape or ()
        count = math.prod(old)
        new = tuple(count // max(known, 1) if size == -1 else size for size in shape)
        if math.prod(new) != count:
            raise _misfit(f"{who}: {show_path(path)} is {list(old)}, which has {count} values", path)
        return _arrays.apply_to(leaf, lambda value: value.reshape(new).copy(order="C"), f"{old} → {new}", shape=new)

    return lambda stored, _: _arrays.each_array(stored, names, who, changed)


def _misfit(message: str, path: Path) -> TransformError:
    return TransformError(message, leaf=show_path(path))


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        return dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TransformError(f"cast: {dtype!r} is no dtype: {error}") from error


def _kind(dtype: np.dtype[Any]) -> str | None:
    """What the numbers of a dtype are; None for text, booleans and times."""
    if dtype.kind in "iu" or dtype.name in ("int2", "uint2", "int4", "uint4"):
        return "ints"
    if dtype.kind == "f" or (dtype.kind == "V" and hasattr(ml_dtypes, dtype.name)):
        return "floats"
    return "complex numbers" if dtype.kind == "c" else None


def _cast(value: Any, dtype: np.dtype[Any], what: str) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        result = value.astype(dtype)
        same = result.astype(value.dtype)
    bad = same != value if _kind(dtype) == "ints" else np.isfinite(value) & ~np.isfinite(same)
    if bad.any():
        raise TransformError(
            f"{what} has {int(bad.sum())} values that {dtype.name} cannot hold, such as {value[bad][0]}"
        )
    return result


def _check_fill(value: Any, dtype: Any, path: Path, who: str) -> None:
    try:
        with np.errstate(all="ignore"):
            held = np.asarray(value).astype(dtype)
            fits = held.ndim == 0 and (_kind(dtype) != "ints" or held.item() == value)
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise _misfit(f"{who}: {value!r} does not fit {show_path(path)}, which is {dtype}", path)


def _targets_own(target: Node, path: Path, shape: tuple[int, ...], dtype: Any, who: str) -> Any:
    """The target's leaf at a path, an array of this shape and kind whose values this process has."""
    node = target
    for name in path:
        node = node.children.get(name) if isinstance(node, Branch) else None
    shown = show_path(path)
    remedy = "give a number as value, or rename the stored leaf to the target's name first"
    if not isinstance(node, np.ndarray) and not (is_jax_array(node) and node.is_fully_addressable):
        what = "is abstract" if hasattr(node, "shape") else "is no array"
        raise _misfit(f"{who}: the target's own {shown} {what}, so it has no values to fill with; {remedy}", path)
    if tuple(node.shape) != shape:
        raise _misfit(f"{who}: the target's own {shown} is {tuple(node.shape)}, expected {shape}", path)
    if _kind(np.dtype(node.dtype)) != _kind(dtype):
        raise _misfit(f"{who}: the target's own {shown} is {node.dtype}, which does not become {dtype}", path)
    return node


def _filled(own: Any, value: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    def function(stored: Any) -> Any:
        result = memory.empty(shape, dtype)
        result[...] = value if own is None else np.asarray(own)
        result[tuple(slice(0, size) for size in stored.shape)] = stored
        return result

    return function
