"""What the rules for arrays share: pieces of arrays, several subtrees walked side by side, every array of a pattern."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.folding import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, map_leaves, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, box, is_array
from flax_ckpt_compat.rules import _trees

Array = LeafHandle | Derived


def describe(node: Node) -> str:
    """A node in a few words: names of its children, dtype and shape, or its kind."""
    if isinstance(node, Branch):
        return f"a subtree of {one_line(sorted(node.children)) or 'nothing'}"
    if is_array(node):
        return f"{node.dtype}{list(node.shape)}"
    if isinstance(node, LeafHandle):
        return f"a stored {node.kind.value}"
    if isinstance(node, Own):
        return "left to the target"
    return "None" if node is None else "computed, of unknown shape"


def require_array(leaf: Node, path: Path, who: str) -> Array:
    """The leaf, which is an array.

    Raises:
        TransformError: it is none.
    """
    if not is_array(leaf):
        text = f"{who}: {show_path(path)} is {describe(leaf)}, expected an array; move it or drop it first"
        raise TransformError(text, leaf=show_path(path))
    found: Array = leaf
    return found


def axis_of(axis: int, ndim: int, path: Path, who: str) -> int:
    """The axis, counted from the front.

    Raises:
        TransformError: an array of so many axes has no such axis.
    """
    if not -ndim <= axis < ndim:
        shown = show_path(path)
        raise TransformError(f"{who}: {shown} has {ndim} axes, so no axis {axis}", leaf=shown)
    return axis % ndim


def is_nothing(leaf: Node) -> bool:
    """True for leaves that hold no stored value: None, what the target keeps, an empty branch."""
    return leaf is None or isinstance(leaf, Own | Branch)


def piece(leaf: Array, axis: int, start: int, stop: int, how: str, *, squeeze: bool = False) -> Derived:
    """An array's values from start to stop on an axis, of which nothing else is read where it is stored.

    Args:
        leaf: the array.
        axis: counted from the front.
        start, stop: within the array.
        how: for people.
        squeeze: leave the axis out; it is of length one.
    """
    index = tuple(slice(start, stop) if n == axis else slice(0, size) for n, size in enumerate(leaf.shape or ()))
    part = box(leaf, index)
    shape = tuple(side.stop - side.start for n, side in enumerate(index) if not (squeeze and n == axis))
    # A part that was read is memory of its own; one of a computed array is a view of what others may look at, too.
    is_own = isinstance(part, ArraySlice)
    return Derived(
        (part,), lambda value: (value if is_own else value.copy(order="C")).reshape(shape), shape, leaf.dtype, how
    )


def side_by_side(
    nodes: Sequence[Node],
    paths: Sequence[Path],
    describe_one: Callable[[Node, Path], str],
    join: Callable[[list[Array], Path], Derived],
    who: str,
) -> Node:
    """One tree of several that are alike.

    Args:
        nodes: the trees.
        paths: where they are.
        describe_one: in words, in which they all must agree; gets a node and its path.
        join: makes one leaf of as many arrays; gets the path of the first.
        who: the rule, for the messages.

    Raises:
        TransformError: they are not alike; names the odd one. Or there is a leaf that is no array.
    """
    texts = [describe_one(node, path) for node, path in zip(nodes, paths, strict=True)]
    usual, count = collections.Counter(texts).most_common(1)[0]
    if count < len(texts):
        odd = next(n for n, text in enumerate(texts) if text != usual)
        shown, like = show_path(paths[odd]), show_path(paths[texts.index(usual)])
        raise TransformError(f"{who}: {shown} is {texts[odd]}, but {like} is {usual}; they must be alike", leaf=shown)
    first = nodes[0]
    if isinstance(first, Branch) and first.children:
        children = {
            name: side_by_side(
                [node.children[name] for node in nodes], [(*path, name) for path in paths], describe_one, join, who
            )
            for name in first.children
        }
        return Branch(children, first.container, first.int_keys)
    if is_nothing(first):
        return first
    return join([require_array(leaf, path, who) for leaf, path in zip(nodes, paths, strict=True)], paths[0])


def each_array(
    stored: Node, names: re.Pattern[str], who: str, change: Callable[[Array, Path], Node], *, needed: str = "array"
) -> Node:
    """The tree with every array changed whose path has a match; other leaves stay.

    Args:
        stored: the tree.
        names: of `flax_ckpt_compat.rules._trees.whole_names`.
        who: the rule, for the messages.
        change: gives the new leaf, or None to leave it as it is and not count it.
        needed: what there must be one of.

    Raises:
        TransformError: there is no such array.
    """
    found = False

    def changed(path: Path, leaf: Any) -> Node:
        nonlocal found
        if not is_array(leaf) or not any(_trees.matches(names, path)):
            return leaf
        new = change(leaf, path)
        found = found or new is not None
        return leaf if new is None else new

    tree = map_leaves(changed, stored)
    if not found:
        raise TransformError(
            f"{who}: matches no {needed} in the checkpoint; the pattern must match whole names of a key path"
        )
    return tree


def apply_to(
    leaf: Array,
    function: Callable[[Any], Any],
    how: str,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype[Any] | None = None,
) -> Derived:
    """An array with a function of it, which gets an ``np.ndarray``; its shape and dtype where they change."""
    shape = leaf.shape if shape is None else shape
    return Derived((leaf,), lambda value: function(np.asarray(value)), shape, dtype or leaf.dtype, how)
