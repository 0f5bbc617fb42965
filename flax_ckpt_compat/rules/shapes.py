"""Change the shapes of arrays: slices, order of axes, interpolation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.tree import KeyData, Node
from flax_ckpt_compat._trees.leaf_sources import Derived, is_array, is_key
from flax_ckpt_compat.rules import _edit_tree, _patterns
from flax_ckpt_compat.rules._edit_tree import Array
from flax_ckpt_compat.rules._rule import Apply, RuleError, rule
from flax_ckpt_compat.rules.values import checked_cast, kind_of

_METHODS = ("nearest", "linear", "cubic", "lanczos3", "lanczos5")


@rule
def cut(pattern: str, size: int, axis: int = 0) -> Apply:
    """Keep the first values on an axis, and read only these: ``cut("embedding", 50257)``.

    Args:
        pattern: as in `rename`; matches the moments of the optimizer too.
        size: new length on the axis; arrays that have it already stay as they are.
        axis: the axis to cut; negative counts from the end.

    Raises:
        TransformError: when applied: it matches no array, or one is shorter.
    """
    if size < 0:
        raise RuleError("a length cannot be negative")

    def changed(leaf: Array, *_: Any) -> Node:
        at = _edit_tree.axis_of(axis, leaf.shape)
        length = (leaf.shape or ())[at]
        if length < size:
            raise ValueError(f"it has length {length} on axis {axis} only; see pad")
        if length == size:
            return leaf
        return _edit_tree.axis_slice(leaf, at, 0, size, f"the first {size} of {length} on axis {at}")

    return _edit_tree.each_leaf(pattern, changed)


@rule
def transpose(pattern: str, axes: Sequence[int]) -> Apply:
    """Permute the axes of arrays, as ``np.transpose`` does: ``transpose("conv/kernel", (2, 3, 1, 0))``.

    Args:
        pattern: as in `rename`.
        axes: for each new axis the index of the old one; negative counts from the end.

    Raises:
        TransformError: when applied: it matches no array, or one has other axes than these.
    """
    return _edit_tree.rearranged(pattern, lambda value: value.transpose(axes), f"axes {tuple(axes)}")


@rule
def reshape(pattern: str, shape: Sequence[int]) -> Apply:
    """Reshape arrays, with values in C order: ``reshape("query/kernel", (512, 8, 64))``.

    Args:
        pattern: as in `rename`.
        shape: the new shape; one length may be -1 and is then computed.

    Raises:
        TransformError: two lengths of -1; when applied: it matches no array, or one has another number of values.
    """
    if sum(size < 0 for size in shape) > 1 or min(shape, default=0) < -1:
        raise RuleError("at most one length may be -1; other negative lengths are not allowed")
    return _edit_tree.rearranged(pattern, lambda value: value.reshape(tuple(shape)))


@rule
def split_axis(pattern: str, sizes: Sequence[int], axis: int = 0) -> Apply:
    """Make several axes of one, with values in C order: ``split_axis("layers", (3, 4))`` for 12 layers in 3 groups.

    Args:
        pattern: as in `rename`; matches the moments of the optimizer too.
        sizes: lengths of the new axes; one may be -1 and is then computed.
        axis: the axis to split; negative counts from the end.

    Raises:
        TransformError: fewer than two lengths, or two of -1; when applied: it matches no array, or the lengths do not
            make up that of an array's axis.
    """
    if len(sizes) < 2 or sum(size < 0 for size in sizes) > 1 or min(sizes) < -1:
        raise RuleError(f"expected two or more lengths, of which one may be -1, found {list(sizes)}")

    def function(value: Any) -> Any:
        at = _edit_tree.axis_of(axis, value.shape)
        new = np.broadcast_to(0, value.shape[at]).reshape(tuple(sizes)).shape
        return value.reshape(*value.shape[:at], *new, *value.shape[at + 1 :])

    return _edit_tree.rearranged(pattern, function)


@rule
def merge_axes(pattern: str, axis: int = 0, count: int = 2) -> Apply:
    """Make one axis of several, with values in C order, the inverse of `split_axis`: ``merge_axes("layers")``.

    Args:
        pattern: as in `rename`; matches the moments of the optimizer too.
        axis: the first of the axes; negative counts from the end.
        count: number of axes.

    Raises:
        TransformError: fewer than two axes; when applied: it matches no array, or one has no such axes.
    """
    if count < 2:
        raise RuleError("expected two or more axes")

    def function(value: Any) -> Any:
        at = _edit_tree.axis_of(axis, value.shape)
        if at + count > value.ndim:
            raise IndexError(f"it has no {count} axes from axis {axis} on; match only arrays that have")
        return value.reshape(*value.shape[:at], math.prod(value.shape[at : at + count]), *value.shape[at + count :])

    return _edit_tree.rearranged(pattern, function)


@rule
def index(pattern: str, number: int, axis: int = 0) -> Apply:
    """Take one index along an axis and drop the axis; only that slice is read: ``index("ensemble", 0)``.

    Args:
        pattern: as in `rename`; matches the moments of the optimizer too.
        number: the index; negative counts from the end.
        axis: the axis; negative counts from the end.

    Raises:
        TransformError: a bad pattern; when applied: it matches no array, or one has no such axis or index.
    """

    def changed(leaf: Array, *_: Any) -> Node:
        at = _edit_tree.axis_of(axis, leaf.shape)
        length = (leaf.shape or ())[at]
        if not -length <= number < length:
            raise IndexError(f"it has length {length} on axis {axis}, so no index {number}")
        first = number % length
        return _edit_tree.axis_slice(leaf, at, first, first + 1, f"index {first} of {length}", squeeze=True)

    return _edit_tree.each_leaf(pattern, changed)


@rule
def unreplicate(pattern: str = ".*") -> Apply:
    """Take the first replica of a state that was saved replicated for ``jax.pmap``, and read only that.

    All matching arrays and typed PRNG keys lose their first axis, which must be equally long everywhere; numbers stay.
    Replicas are not compared. Where they differ, as batch statistics do that were not synchronized, `apply` can take
    their mean.

    Args:
        pattern: as in `rename`; matches all if not given.

    Raises:
        TransformError: a bad pattern; when applied: it matches no array, or they differ in the length of that axis.
    """
    _patterns.whole_names(pattern)

    def apply(stored: Node, target: Node) -> Node:
        lengths: set[int] = set()

        def first(leaf: Any, *_: Any) -> Node:
            shape = leaf.shape[:-1] if isinstance(leaf, LeafHandle) and is_key(leaf) else leaf.shape
            count = shape[0] if shape else 0
            lengths.add(count)
            if not count or len(lengths) > 1:
                others = f", others {min(lengths - {count})}" if len(lengths) > 1 else ""
                raise ValueError(f"{count or 'no'} replicas on its first axis{others}; match only what is replicated")
            how = f"replica 0 of {count}"
            if is_array(leaf):
                return _edit_tree.axis_slice(leaf, 0, 0, 1, how, squeeze=True)
            return Derived((leaf,), lambda keys: KeyData(keys.impl, np.array(keys.data[0])), shape[1:], None, how)

        change = _edit_tree.each_leaf(pattern, first, "array", lambda leaf: is_array(leaf) or is_key(leaf))
        return change(stored, target)

    return apply


@rule
def resize(
    pattern: str,
    shape: Sequence[int],
    method: str = "linear",
    axis: int | None = None,
    skip: int = 0,
    antialias: bool = True,
) -> Apply:
    """Interpolate arrays of floats, such as position embeddings: ``resize("pos_embedding", (24, 24), axis=1, skip=1)``.

    The values are those of ``jax.image.resize``, computed in float32 (float64 for float64) and rounded once to the
    stored dtype. torch's bicubic interpolation has another kernel.

    Args:
        pattern: as in `rename`. Moments of the optimizer match too; ``cubic`` and ``lanczos`` can make second moments
            negative, so begin the pattern with ``^params/`` and let the target keep its moments there.
        shape: the new shape; with ``axis`` that of the grid.
        method: of ``jax.image.resize``: ``nearest``, ``linear``, ``cubic``, ``lanczos3`` or ``lanczos5``.
        axis: the axis that holds a square grid of positions row by row, as in a ViT; None resizes the whole array.
        skip: number of values before the grid on that axis, such as a class token, which stay.
        antialias: smooth before an axis becomes shorter.

    Raises:
        TransformError: a bad pattern, shape or method; when applied: it matches no array of floats, or one has other
            axes, or no such grid; when restored: a value out of the dtype's range.
    """
    new = tuple(shape)
    if method not in _METHODS or not new or min(new) < 1 or skip < 0 or (skip and axis is None):
        raise RuleError(
            f"expected a shape of positive lengths, one of the methods {', '.join(_METHODS)}, and an "
            "axis if there are values to skip"
        )

    def changed(leaf: Array, what: str, _: Node) -> Node:
        old = leaf.shape or ()
        if axis is None:
            if len(old) != len(new):
                raise ValueError(f"expected as many axes as in {list(new)}")
            whole, before, after = new, old, new
        else:
            at = _edit_tree.axis_of(axis, old)
            count = old[at] - skip
            side = round(max(count, 0) ** (1 / len(new)))
            if side ** len(new) != count or not side:
                raise ValueError(f"{count} positions on axis {axis} are not a grid of equal sides; reshape it")
            whole = (*old[:at], skip + math.prod(new), *old[at + 1 :])
            before, after = ((*old[:at], *grid, *old[at + 1 :]) for grid in ((side,) * len(new), new))
        if before == after:
            return leaf

        def resized(value: Any) -> Any:
            kept, grid = np.split(value, [skip], axis=axis) if axis is not None else (None, value)
            result = _interpolated(grid.reshape(before), after, method, antialias)
            result = checked_cast(result, value.dtype, what)
            if kept is None:
                return result
            parts = [kept, result.reshape(*whole[:at], -1, *whole[at + 1 :])]
            return np.concatenate(parts, axis=at, out=memory.empty(whole, value.dtype))

        return _edit_tree.derived(leaf, resized, f"{method} {before} → {after}", shape=whole)

    return _edit_tree.each_leaf(
        pattern, changed, "array of floats", lambda leaf: is_array(leaf) and kind_of(leaf.dtype) == "floats"
    )


def _interpolated(value: Any, shape: tuple[int, ...], method: str, antialias: bool) -> Any:
    """Return ``jax.image.resize`` of an array, computed on the host in float32, or in float64 for float64."""
    import jax

    is_double = value.dtype == np.float64
    wide = value.astype(np.float64 if is_double else np.float32)
    enable_x64: Any = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    with jax.transfer_guard("allow"), enable_x64(is_double), contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # jax may be set up without its CPU backend
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        return np.asarray(jax.image.resize(wide, shape, method, antialias))
