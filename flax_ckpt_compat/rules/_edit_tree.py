"""Change trees: give leaves other paths, replace nodes, change and slice arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, from_leaves, iter_leaves, map_leaves, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, is_array, slice_leaf
from flax_ckpt_compat.rules import _patterns
from flax_ckpt_compat.rules._rule import Trees, misfit

Array = LeafHandle | Derived
Change = Callable[[Any, str, Node], Node]  # of a leaf, its key path as text, and the target's node there


def remap(stored: Node, new_paths: Callable[[Path], Iterable[Path]]) -> Node:
    """Give every leaf new key paths, or none to drop it; see `rebuild`."""
    return rebuild(stored, lambda path, leaf: ((new, leaf) for new in new_paths(path)))


def rebuild(stored: Node, new_leaves: Callable[[Path, Any], Iterable[tuple[Path, Node]]]) -> Node:
    """Put new leaves, with their key paths, for each leaf; containers whose children keep their names keep their type.

    None and empty containers give way to what is put below them, and what was left to the target to a stored leaf."""
    leaves: dict[Path, Node] = {}
    origins: dict[Path, Path] = {}
    for old, before in iter_leaves(stored):
        for new, leaf in new_leaves(old, before):
            if leaf is Own.KEEP_TARGET and new in leaves:
                continue
            if leaves.pop(new, Own.KEEP_TARGET) is not Own.KEEP_TARGET:
                both = f"{show_path(origins[new])} and {show_path(old)}"
                problem = f"{both} would both be called {show_path(new)}; drop or move one of them first"
                raise NameCollisionError(problem, leaf=show_path(new))
            leaves[new], origins[new] = leaf, old
    if empty := {path for path, leaf in leaves.items() if is_empty(leaf)}:
        empty &= {path[:end] for path in leaves for end in range(len(path))}
    return from_leaves({path: leaf for path, leaf in leaves.items() if path not in empty}, stored, origins)


def prefix_in(path: Path, places: Collection[Path]) -> Path | None:
    """Return the shortest beginning of a key path that is among the places, or None."""
    return next((path[:end] for end in range(len(path) + 1) if path[:end] in places), None)


def put(stored: Node, path: Path, node: Node, *, depth: int = 0) -> Node:
    """Return a tree with a node replaced; ``stored`` is its subtree below the first ``depth`` names of the path."""
    if depth == len(path):
        return node
    was = Branch({}) if stored is None else stored
    if not isinstance(was, Branch):
        leaf = show_path(path[:depth])
        raise TransformError(
            f"stored {leaf} is a leaf, but {show_path(path)} lies below; move or drop it first", leaf=leaf
        )
    child = put(was.children.get(path[depth]), path, node, depth=depth + 1)
    return Branch({**was.children, path[depth]: child}, was.container, was.int_keys, was.type_name)


def leaves_of(node: Node) -> dict[Path, Any]:
    """Return the leaves of a node by key path, without empty branches."""
    return {path: leaf for path, leaf in iter_leaves(node) if not isinstance(leaf, Branch)}


def is_empty(node: Node) -> bool:
    """Return whether a node is None or a branch without children."""
    return node is None or (isinstance(node, Branch) and not node.children)


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
        raise misfit(path, f"is {describe(leaf)}: {error}") from error


def each_leaf(
    trees: Trees, pattern: str, change: Change, needed: str = "array", wanted: Callable[[Any], bool] = is_array
) -> Node:
    """Change the ``wanted`` leaves whose key path has a match; ``needed`` is a noun for the required match."""
    names = _patterns.Names([pattern])
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
        why = none if matching else _patterns.near_names(pattern, trees.stored)
        raise TransformError(f"matches no {needed} in the checkpoint (patterns match whole names of a key path); {why}")
    return tree


def rearranged(trees: Trees, pattern: str, function: Callable[[Any], Any], how: str = "") -> Node:
    """Give every matching array another shape by a function of the array.

    The function first runs on an array that repeats a single zero: that tells the new shape, and whether it fits."""

    def changed(leaf: Array, *_: Any) -> Node:
        shape = function(np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape or ())).shape
        note = how or f"{leaf.shape} → {shape}"
        return derived(leaf, lambda value: function(value).copy(order="C"), note, shape=shape)

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
    part = slice_leaf(leaf, index)
    shape = tuple(side.stop - side.start for n, side in enumerate(index) if not (squeeze and n == axis))
    # A slice that was read owns its memory; one of a computed array is a view that others may share.
    is_own = isinstance(part, ArraySlice)
    return Derived((part,), lambda value: (value if is_own else value.copy("C")).reshape(shape), shape, leaf.dtype, how)
