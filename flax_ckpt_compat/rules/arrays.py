"""Change leaves one by one: dtype, length, order and number of axes, any function, PRNG keys."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.dtypes import dtype_from_name, is_float, is_integer
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, KeyData, Node, Path, is_jax_array, map_leaves, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, is_array, is_key
from flax_ckpt_compat.rules import _nodes
from flax_ckpt_compat.rules._rule import Trees, rule

Array = LeafHandle | Derived
Change = Callable[[Any, str, Node], Node]  # of a leaf, its key path as text, and the target's node there
_METHODS = ("nearest", "linear", "cubic", "lanczos3", "lanczos5")


def describe(node: Node) -> str:
    """Describe a node in a few words: names of its children, dtype and shape, or its kind."""
    if isinstance(node, Branch):
        return f"a subtree of {one_line(sorted(node.children)) or 'nothing'}"
    if is_array(node):
        return f"{node.dtype}{list(node.shape)}"
    if isinstance(node, LeafHandle):
        return f"a stored {node.kind.value}"
    return "None" if node is None else "left to the target" if isinstance(node, Own) else "computed"


@contextlib.contextmanager
def fitting(path: Path, leaf: Node) -> Iterator[None]:
    """Make errors about a leaf, such as numpy's own, name it."""
    try:
        yield
    except TransformError:  # which names another leaf
        raise
    except (ValueError, IndexError) as error:
        raise _nodes.misfit(path, f"is {describe(leaf)}: {error}") from error


def each_leaf(
    trees: Trees, pattern: str, change: Change, needed: str = "array", wanted: Callable[[Any], bool] = is_array
) -> Node:
    """Change the ``wanted`` leaves whose key path has a match; ``needed`` is a noun for the required match."""
    names = _nodes.Names([pattern])
    matching: dict[Path, bool] = {}

    def changed(path: Path, leaf: Any) -> Node:
        if not any(names.matches(path)):
            return leaf
        matching[path] = wanted(leaf)
        with fitting(path, leaf):
            return change(leaf, show_path(path), node_at(trees.target, path)) if matching[path] else leaf

    tree = map_leaves(changed, trees.stored)
    if not any(matching.values()):
        none = f"{one_line(map(show_path, matching))} is none"
        why = none if matching else _nodes.near_names(pattern, trees.stored)
        raise TransformError(f"matches no {needed} in the checkpoint (patterns match whole names of a key path); {why}")
    return tree


def rearranged(trees: Trees, pattern: str, function: Callable[[Any], Any], how: str = "") -> Node:
    """Give every matching array another shape by a function of the array.

    The function first runs on an array that repeats a single zero: that tells the new shape, and whether it fits."""

    def changed(leaf: Array, *_: Any) -> Node:
        shape = function(np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape or ())).shape
        return derived(leaf, lambda value: function(value).copy("C"), how or f"{leaf.shape} → {shape}", shape=shape)

    return each_leaf(trees, pattern, changed)


def derived(
    leaf: Array, function: Callable[[Any], Any], how: str, *, shape: tuple[int, ...] | None = None, dtype: Any = None
) -> Derived:
    """Derive a leaf by a function of an ``np.ndarray``; give shape and dtype if they change."""
    shape = leaf.shape if shape is None else shape
    return Derived((leaf,), lambda value: function(np.asarray(value)), shape, dtype or leaf.dtype, how)


def axis_of(axis: int, shape: tuple[int, ...] | None) -> tuple[int, int]:
    """Return an axis of a shape counted from the front, and its length; raise IndexError if there is none."""
    sides = shape or ()
    if not -len(sides) <= axis < len(sides):
        raise IndexError(f"it has no axis {axis}; match only arrays that have")
    return axis % len(sides), sides[axis]


def axis_slice(leaf: Array, axis: int, start: int, stop: int, how: str, *, squeeze: bool = False) -> Derived:
    """Return a slice along one axis, which goes with ``squeeze``; of a stored array, only the slice is read."""
    index = tuple(slice(start, stop) if n == axis else slice(0, size) for n, size in enumerate(leaf.shape or ()))
    shape = tuple(side.stop - side.start for n, side in enumerate(index) if not (squeeze and n == axis))
    if isinstance(leaf, LeafHandle):  # such a slice owns its memory
        return Derived((leaf.part(index),), lambda value: value.reshape(shape), shape, leaf.dtype, how)
    return Derived((leaf,), lambda value: value[index].copy("C").reshape(shape), shape, leaf.dtype, how)


@rule
def cast(trees: Trees, pattern: str, dtype: Any) -> Node:
    """Cast arrays to another dtype of the same kind: ``cast("params", "bfloat16")``.

    Floats become floats, ints ints, complex numbers complex. Arrays of another kind, such as an optimizer's count,
    are left alone, as are numbers, text and keys. Floats are rounded to nearest, so values below the dtype's smallest
    number become zero (1e-30 in ``float16``); Adam's ``nu`` is often that small. Values that are out of its range, and
    an infinity or NaN that it lacks, are an error when they are read."""
    try:
        wanted = dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TransformError(f"{dtype!r} is not a dtype ({error}); pass a name such as 'bfloat16'") from error
    kind = _kind_of(wanted)
    if kind is None:
        raise TransformError("expected a dtype of floats, ints or complex numbers")

    def changed(leaf: Array, what: str, _: Node) -> Node:
        if leaf.dtype == wanted:
            return leaf
        how = f"{leaf.dtype} → {wanted.name}"
        return derived(leaf, lambda value: _checked_cast(value, wanted, what), how, dtype=wanted)

    return each_leaf(
        trees, pattern, changed, f"array of {kind}", lambda one: is_array(one) and _kind_of(one.dtype) == kind
    )


@rule
def pad(trees: Trees, pattern: str, size: int, axis: int = 0, value: Any = 0) -> Node:
    """Pad arrays, such as embeddings for a larger vocabulary: ``pad("embedding", 50304, value="target")``.

    Args:
        size: new length on the axis; arrays that have it already stay as they are, and longer ones are an error.
        axis: the axis to pad.
        value: number to fill with, rounded as by `cast`, or ``"target"`` for the values of the target's own array at
            the same path.
    """
    if isinstance(value, str) and value != "target":
        raise TransformError(f"value is {value!r}, expected a number or 'target'")

    def changed(leaf: Array, what: str, own: Node) -> Node:
        old, dtype = leaf.shape or (), np.dtype(leaf.dtype)
        at, length = axis_of(axis, old)
        if length == size:
            return leaf
        if length > size:
            raise ValueError(f"it has length {length} on axis {axis} already; see cut")
        shape = (*old[:at], size, *old[at + 1 :])
        fill = _filling(value, own, shape, dtype)

        def padded(stored: Any) -> Any:
            # Of the target's, only the padding is used.
            part = np.asarray(fill)[(*(slice(None),) * at, slice(length, None))]
            part = part if part.dtype == dtype else _checked_cast(part, dtype, f"{what}: the target's own array")
            return np.concatenate([stored, part], at, out=memory.empty(shape, dtype))

        note = "with the target's own values" if isinstance(value, str) else f"filled with {value}"
        return derived(leaf, padded, f"{length} → {size} on axis {at}, {note}", shape=shape)

    return each_leaf(trees, pattern, changed)


@rule
def cut(trees: Trees, pattern: str, size: int, axis: int = 0) -> Node:
    """Keep the first values on an axis, and read only these: ``cut("embedding", 50257)``.

    Arrays of that length stay as they are; shorter ones are an error."""
    if size < 0:
        raise TransformError("a length cannot be negative")

    def changed(leaf: Array, *_: Any) -> Node:
        at, length = axis_of(axis, leaf.shape)
        if length < size:
            raise ValueError(f"it has length {length} on axis {axis} only; see pad")
        if length == size:
            return leaf
        return axis_slice(leaf, at, 0, size, f"the first {size} of {length} on axis {at}")

    return each_leaf(trees, pattern, changed)


@rule
def transpose(trees: Trees, pattern: str, axes: Sequence[int]) -> Node:
    """Permute the axes of arrays, as ``np.transpose`` does: ``transpose("conv/kernel", (2, 3, 1, 0))``."""
    return rearranged(trees, pattern, lambda value: value.transpose(axes), f"axes {tuple(axes)}")


@rule
def reshape(trees: Trees, pattern: str, shape: Sequence[int]) -> Node:
    """Reshape arrays, with values in C order: ``reshape("query/kernel", (512, 8, 64))``.

    One length may be -1, and is then computed."""
    if min(shape, default=0) < -1:
        raise TransformError("a length may be -1, no other negative number")
    return rearranged(trees, pattern, lambda value: value.reshape(tuple(shape)))


@rule
def split_axis(trees: Trees, pattern: str, sizes: Sequence[int], axis: int = 0) -> Node:
    """Make several axes of one, with values in C order: ``split_axis("layers", (3, 4))`` for 12 layers in 3 groups.

    One of the two or more sizes may be -1, and is then computed."""
    if len(sizes) < 2 or min(sizes) < -1:
        raise TransformError(f"expected two or more lengths, of which one may be -1, found {list(sizes)}")

    def function(value: Any) -> Any:
        at, length = axis_of(axis, value.shape)
        new = np.broadcast_to(0, length).reshape(tuple(sizes)).shape
        return value.reshape(*value.shape[:at], *new, *value.shape[at + 1 :])

    return rearranged(trees, pattern, function)


@rule
def merge_axes(trees: Trees, pattern: str, axis: int = 0, count: int = 2) -> Node:
    """Make one axis of ``count`` from ``axis`` on, in C order, to undo `split_axis`: ``merge_axes("layers")``."""
    if count < 2:
        raise TransformError("expected two or more axes")

    def function(value: Any) -> Any:
        at, _ = axis_of(axis, value.shape)
        if at + count > value.ndim:
            raise IndexError(f"it has no {count} axes from axis {axis} on; match only arrays that have")
        return value.reshape(*value.shape[:at], math.prod(value.shape[at : at + count]), *value.shape[at + count :])

    return rearranged(trees, pattern, function)


@rule
def index(trees: Trees, pattern: str, number: int, axis: int = 0) -> Node:
    """Take one index along an axis and drop the axis; only that slice is read: ``index("ensemble", 0)``."""

    def changed(leaf: Array, *_: Any) -> Node:
        at, length = axis_of(axis, leaf.shape)
        if not -length <= number < length:
            raise IndexError(f"it has length {length} on axis {axis}, so no index {number}")
        first = number % length
        return axis_slice(leaf, at, first, first + 1, f"index {first} of {length}", squeeze=True)

    return each_leaf(trees, pattern, changed)


@rule
def unreplicate(trees: Trees, pattern: str = ".*") -> Node:
    """Take the first replica of a state that was saved replicated for ``jax.pmap``, and read only that.

    All matching arrays and typed PRNG keys lose their first axis, which must be equally long everywhere; numbers stay.
    Replicas are not compared. Where they differ, as batch statistics do that were not synchronized, `apply` can take
    their mean."""
    lengths: set[int] = set()

    def first(leaf: Any, *_: Any) -> Node:
        shape = leaf.shape[:-1] if isinstance(leaf, LeafHandle) and is_key(leaf) else leaf.shape
        count = shape[0] if shape else 0
        lengths.add(count)
        if not count or len(lengths) > 1:
            found = f"{count or 'no'} replicas on its first axis, of {sorted(lengths)} in all"
            raise ValueError(f"{found}; match only what is replicated")
        how = f"replica 0 of {count}"
        if is_array(leaf):
            return axis_slice(leaf, 0, 0, 1, how, squeeze=True)
        return Derived((leaf,), lambda keys: KeyData(keys.impl, np.array(keys.data[0])), shape[1:], None, how)

    return each_leaf(trees, pattern, first, "array", lambda leaf: is_array(leaf) or is_key(leaf))


@rule
def resize(
    trees: Trees,
    pattern: str,
    shape: Sequence[int],
    method: str = "linear",
    axis: int | None = None,
    skip: int = 0,
    antialias: bool = True,
) -> Node:
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
    """
    new = tuple(shape)
    if method not in _METHODS or not new or min(new) < 1 or skip < 0 or (skip and axis is None):
        problem = f"expected a shape of positive lengths, one of the methods {', '.join(_METHODS)}"
        raise TransformError(f"{problem}, and an axis if there are values to skip")

    def changed(leaf: Array, what: str, _: Node) -> Node:
        before = old = leaf.shape or ()
        at, whole, after = 0, new, new
        if axis is not None:
            at, length = axis_of(axis, old)
            side = round(max(length - skip, 0) ** (1 / len(new)))
            if side ** len(new) != length - skip or not side:
                raise ValueError(f"{length - skip} positions on axis {axis} are not a grid of equal sides; reshape it")
            whole = (*old[:at], skip + math.prod(new), *old[at + 1 :])
            before, after = ((*old[:at], *grid, *old[at + 1 :]) for grid in ((side,) * len(new), new))
        elif len(old) != len(new):
            raise ValueError(f"expected as many axes as in {list(new)}")
        if before == after:
            return leaf

        def resized(value: Any) -> Any:
            kept, grid = np.split(value, [skip], at)
            result = _checked_cast(_interpolated(grid.reshape(before), after, method, antialias), value.dtype, what)
            if not skip:
                return result.reshape(whole)
            parts = [kept, result.reshape(*whole[:at], math.prod(new), *whole[at + 1 :])]
            return np.concatenate(parts, at, out=memory.empty(whole, value.dtype))

        return derived(leaf, resized, f"{method} {before} → {after}", shape=whole)

    return each_leaf(trees, pattern, changed, "array of floats", lambda one: is_array(one) and is_float(one.dtype))


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


@rule
def apply(trees: Trees, pattern: str, function: Callable[[Any], Any]) -> Node:
    """Compute leaves with a function: ``apply("batch_stats", lambda value: value.mean(axis=0))``.

    The leaves are arrays, numbers, text and bytes, not PRNG keys. The function takes the stored value (an array as a
    read-only ``np.ndarray``), and returns the new one. It is called when the value is read, so that plans and later
    rules do not know shape and dtype of the result."""

    def changed(leaf: Any, what: str, _: Node) -> Node:
        def computed(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                value = value.view()
                value.flags.writeable = False
            try:
                return function(value)
            except Exception as error:
                error.add_note(f"raised by the function of rules.apply({pattern!r}, …), for {what}")
                raise

        return Derived((leaf,), computed, None, None, getattr(function, "__name__", "a function"))

    return each_leaf(trees, pattern, changed, "leaf", lambda leaf: isinstance(leaf, Array) and not is_key(leaf))


@rule
def wrap_key_data(trees: Trees, pattern: str, impl: str | None = None) -> Node:
    """Turn raw PRNG keys, arrays of uint32, into typed ones, as ``jax.random.wrap_key_data`` does with ``impl``."""

    def changed(leaf: Array, *_: Any) -> Node:
        import jax

        name = impl or str(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
        data = jax.ShapeDtypeStruct(leaf.shape or (), np.uint32)
        try:
            keys = jax.eval_shape(lambda values: jax.random.wrap_key_data(values, impl=name), data)
        except (TypeError, ValueError) as error:
            why = str(error).partition(" for impl=")[0]  # of which jax prints the addresses of functions
            raise ValueError(f"not data of keys of {name} ({why}); name another impl, or do not match it") from error
        return Derived((leaf,), lambda value: KeyData(name, value), keys.shape, None, f"keys of {name}")

    return each_leaf(trees, pattern, changed, "array of uint32", lambda one: is_array(one) and one.dtype == np.uint32)


@rule
def key_data(trees: Trees, pattern: str) -> Node:
    """Turn the typed PRNG keys that match into raw ones, arrays of uint32, as ``jax.random.key_data`` does."""

    def changed(leaf: LeafHandle, *_: Any) -> Node:
        return Derived((leaf,), lambda keys: np.asarray(keys.data), leaf.shape, leaf.dtype, "key data")

    return each_leaf(trees, pattern, changed, "PRNG key", lambda leaf: isinstance(leaf, LeafHandle) and is_key(leaf))


def _kind_of(dtype: np.dtype[Any]) -> str | None:
    """Return the kind of number of a dtype; None for text, booleans and times."""
    if is_integer(dtype):
        return "ints"
    if is_float(dtype):
        return "floats"
    return "complex numbers" if dtype.kind == "c" else None


def _checked_cast(value: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Cast an array; ``what`` names it in the TransformError about values that the dtype cannot hold."""
    with np.errstate(over="ignore", invalid="ignore"):
        result = _astype(value, dtype)
        bad = _unheld(value, result)
    if bad.any():
        problem = f"{what} has {int(bad.sum())} values that {dtype.name} cannot hold, such as {value[bad][0]}"
        raise TransformError(f"{problem}; cast to a wider dtype, or change them with rules.apply first")
    return result


def _astype(value: Any, dtype: np.dtype[Any]) -> Any:
    try:
        return value.astype(dtype)
    except TypeError:  # numpy has no cast between some of the narrow dtypes
        return value.astype(np.int64 if _kind_of(dtype) == "ints" else np.float64).astype(dtype)


def _unheld(value: Any, result: Any) -> Any:
    """Return a mask of the numbers that a cast changed by more than rounding."""
    same = _astype(result, value.dtype)
    if _kind_of(result.dtype) == "ints":
        return (same != value) | ((result < 0) != (value < 0))
    bad = np.isfinite(value) != np.isfinite(same)
    if result.dtype.kind == "V" and not np.isnan(np.float32(np.nan).astype(result.dtype)):
        # Narrow floats without NaN saturate at their largest value, as infinity does.
        bad |= np.abs(value.astype(np.float64)) > float(np.float32(np.inf).astype(result.dtype))
    return bad | (np.isnan(value) != np.isnan(same))


def _filling(value: Any, own: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an array to pad with: the target's own, of this shape and kind of dtype, or a number in the dtype."""
    kind = _kind_of(dtype)
    if isinstance(value, str):
        found = f"a {type(own).__name__}"
        if isinstance(own, np.ndarray) or (is_jax_array(own) and own.is_fully_addressable):
            found = f"{own.dtype}{list(own.shape)}"
            if tuple(own.shape) == shape and (_kind_of(np.dtype(own.dtype)) == kind if kind else own.dtype == dtype):
                return own
        problem = f"the target's own is {found}, which does not become {dtype}{list(shape)}"
        raise ValueError(f"{problem}; give a number as value")
    number = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
    wide = {"floats": np.float64, "complex numbers": np.complex128}.get(kind or "")
    if isinstance(number, int | float | np.floating) or (isinstance(number, complex) and kind == "complex numbers"):
        with contextlib.suppress(ValueError, OverflowError), np.errstate(all="ignore"):
            given = np.asarray(number, wide)
            held = given.astype(dtype)
            if held.item() == number or (wide and not _unheld(given, held)):
                return np.broadcast_to(held, shape)
    raise ValueError(f"{value!r} does not fit; give a number that it holds")
