"""Share helpers of the array rules: slices, joins of similar subtrees, changes to every matching array."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, is_array, slice_leaf
from flax_ckpt_compat.rules import _edit_tree
from flax_ckpt_compat.rules._rule import Apply, misfit

Array = LeafHandle | Derived


def describe(node: Node) -> str:
    """Describe a node in a few words: names of its children, dtype and shape, or its kind."""
    if isinstance(node, Branch):
        return f"a subtree of {one_line(sorted(node.children)) or 'nothing'}"
    if is_array(node):
        return f"{node.dtype}{list(node.shape)}"
    if isinstance(node, LeafHandle):
        return f"a stored {node.kind.value}"
    if isinstance(node, Own):
        return "left to the target"
    if isinstance(node, Derived):
        return "computed, of unknown shape" if node.shape is None else "a computed PRNG key"
    return "None"


def require_array(leaf: Node, path: Path) -> Array:
    """Return a leaf, or raise RuleError if it is not an array."""
    if not is_array(leaf):
        raise misfit(path, f"is {describe(leaf)}, expected an array; move it or drop it first")
    found: Array = leaf
    return found


def axis_of(axis: int, ndim: int, path: Path) -> int:
    """Return an axis counted from the front; raise RuleError if an array of ``ndim`` axes has no such axis."""
    if not -ndim <= axis < ndim:
        other = f"pass one from {-ndim} to {ndim - 1}" if ndim else "match only arrays that have axes"
        raise misfit(path, f"has {ndim} axes, so no axis {axis}; {other}")
    return axis % ndim


def has_no_value(leaf: Node) -> bool:
    """Return whether a leaf holds no stored value: None, left to the target, an empty branch."""
    return leaf is None or isinstance(leaf, Own | Branch)


def axis_slice(leaf: Array, axis: int, start: int, stop: int, how: str, *, squeeze: bool = False) -> Derived:
    """Return a slice along one axis, which goes with ``squeeze``; of a stored array, only the slice is read."""
    index = tuple(slice(start, stop) if n == axis else slice(0, size) for n, size in enumerate(leaf.shape or ()))
    part = slice_leaf(leaf, index)
    shape = tuple(side.stop - side.start for n, side in enumerate(index) if not (squeeze and n == axis))
    # A slice that was read owns its memory; one of a computed array is a view that others may share.
    is_own = isinstance(part, ArraySlice)
    return Derived(
        (part,), lambda value: (value if is_own else value.copy(order="C")).reshape(shape), shape, leaf.dtype, how
    )


def join_trees(
    nodes: Sequence[Node],
    paths: Sequence[Path],
    describe_one: Callable[[Node, Path], str],
    join: Callable[[list[Array], Path], Derived],
) -> Node:
    """Join several similar trees, of whose nodes ``describe_one`` says the same; ``join`` takes an array of each."""
    texts = [describe_one(node, path) for node, path in zip(nodes, paths, strict=True)]
    usual, count = collections.Counter(texts).most_common(1)[0]
    if count < len(texts):
        odd = next(n for n, text in enumerate(texts) if text != usual)
        like = show_path(paths[texts.index(usual)])
        raise misfit(paths[odd], f"is {texts[odd]}, but {like} is {usual}; they must be alike: change or drop it first")
    first = nodes[0]
    if isinstance(first, Branch) and first.children:
        children = {
            name: join_trees(
                [node.children[name] for node in nodes], [(*path, name) for path in paths], describe_one, join
            )
            for name in first.children
        }
        return Branch(children, first.container, first.int_keys)
    if has_no_value(first):
        return first
    return join([require_array(leaf, path) for leaf, path in zip(nodes, paths, strict=True)], paths[0])


def each_array(pattern: str, change: Callable[[Array, Path, Node], Node], needed: str = "array") -> Apply:
    """Return the `apply` of a rule that changes every matching array; see `_edit_tree.each_leaf`.

    A ValueError or IndexError of ``change``, such as numpy's own, says why an array does not fit."""

    def changed(leaf: Any, path: Path, target: Node) -> Node:
        if not is_array(leaf):
            return None
        try:
            return change(leaf, path, target)
        except (ValueError, IndexError) as error:
            raise misfit(path, f"is {describe(leaf)}: {error}") from error

    return _edit_tree.each_leaf(pattern, changed, needed)


def rearranged(pattern: str, function: Callable[[Any], Any], how: str = "") -> Apply:
    """Return the `apply` of a rule that gives every matching array another shape by a function of the array.

    The function first runs on an array that repeats a single zero: that tells the new shape, and whether it fits."""

    def changed(leaf: Array, _: Path, __: Node) -> Node:
        shape = function(np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape or ())).shape
        note = how or f"{leaf.shape} → {shape}"
        return apply_to(leaf, lambda value: function(value).copy(order="C"), note, shape=shape)

    return each_array(pattern, changed)


def apply_to(
    leaf: Array,
    function: Callable[[Any], Any],
    how: str,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype[Any] | None = None,
) -> Derived:
    """Derive a leaf by a function of an ``np.ndarray``; give shape and dtype if they change."""
    shape = leaf.shape if shape is None else shape
    return Derived((leaf,), lambda value: function(np.asarray(value)), shape, dtype or leaf.dtype, how)
