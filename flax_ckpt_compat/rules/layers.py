"""Join several layers into one, or split one into several."""

from __future__ import annotations

import collections
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.text_formatting import Row, one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, is_array
from flax_ckpt_compat.rules import _edit_tree, _patterns
from flax_ckpt_compat.rules._edit_tree import Array
from flax_ckpt_compat.rules._rule import Apply, RuleError, misfit, rule


@rule
def stack(pattern: str, into: str, axis: int = 0, first: int = 0) -> Apply:
    """Stack numbered subtrees into one, as for ``nn.scan`` over layers: ``stack(r"layer_(\\d+)", "layers")``.

    Applies to all such layers side by side (in params, moments of the optimizer, …); each of their arrays gets a new
    axis, in the order of the numbers. Layers of a list: ``stack(r"blocks/(\\d+)", "blocks")``.

    Args:
        pattern: matches one or several whole names anywhere; its only group is the number.
        into: name of the subtree; ``layers/cell`` makes two levels.
        axis: the new axis of each array; negative counts from the end.
        first: the number of the first layer.

    Raises:
        TransformError: a bad pattern; when applied: it matches nothing, the numbers are not consecutive from ``first``
            on, or two of the layers differ in their leaves, shapes or dtypes.
        NameCollisionError: when applied: there already is an ``into``.
    """
    compiled, levels = _patterns.whole_names(pattern), _levels(into)
    if compiled.groups != 1:
        raise RuleError(f"{pattern!r} needs exactly one group, the number: r'layer_(\\d+)'")

    def join(leaves: list[Array], path: Path) -> Derived:
        shape = leaves[0].shape or ()
        at = _edit_tree.axis_of(axis, len(shape) + 1, path)
        shape = (*shape[:at], len(leaves), *shape[at:])
        return _joined(np.stack, leaves, at, shape, f"stack of {len(leaves)}")

    def layers(branch: Branch, path: Path) -> list[Path]:
        return _in_order(compiled, branch, path, first)

    return _inner_first(layers, _joining(levels, lambda node, _: _edit_tree.describe(node), join), near=pattern)


@rule
def unstack(pattern: str, into: str, axis: int = 0, first: int = 0) -> Apply:
    """Split subtrees into numbered ones, the inverse of `stack`: ``unstack("layers", "layer_{}")``.

    Applies wherever the subtree occurs. Each of its arrays is sliced along the axis, and reads only the slice.

    Args:
        pattern: matches one or several whole names (``layers/cell``) anywhere.
        into: name of each new subtree, with ``{}`` for the number.
        axis: the axis that is removed from each array; negative counts from the end.
        first: the number of the first layer.

    Raises:
        TransformError: ``into`` without ``{}``; when applied: there is no such subtree, its arrays differ in their
            lengths on that axis, or it holds leaves that are not arrays.
        NameCollisionError: when applied: there already is a new name.
    """
    if into.count("{}") != 1:
        raise RuleError(f"{into!r} needs one {{}}, where the number goes, such as 'layer_{{}}'")

    def names(node: Node, path: Path) -> list[str]:
        return [into.replace("{}", str(first + n)) for n in range(_common_length(node, path, axis))]

    def layer(array: Array, path: Path, number: int, count: int) -> Derived:
        at = _edit_tree.axis_of(axis, len(array.shape or ()), path)
        return _edit_tree.axis_slice(array, at, number, number + 1, f"layer {number} of {count}", squeeze=True)

    return _divide(pattern, names, layer)


@rule
def fuse(names: Sequence[str], into: str, axis: int = -1) -> Apply:
    """Concatenate siblings into one subtree or leaf: ``fuse(["query", "key", "value"], "qkv")``.

    Args:
        names: of the siblings, in the order of the parts; applies wherever they all occur side by side.
        into: name of the result.
        axis: the axis of concatenation; negative counts from the end. It depends on the layer: kernels of linen's
            attention are (embed, heads, head_dim) and biases (heads, head_dim), so -1 joins head_dim and -2 heads;
            kernels of Dense are (in, out).

    Raises:
        TransformError: fewer than two names; when applied: they occur nowhere side by side, or differ in more than
            the length on that axis.
        NameCollisionError: when applied: there already is an ``into``.
    """
    levels = _levels(into)
    if len(set(names)) < 2 or len(set(names)) < len(names) or isinstance(names, str):
        raise RuleError(f"expected a list of two or more different names, found {names!r:.100}")

    def alike(node: Node, path: Path) -> str:
        if not is_array(node):
            return _edit_tree.describe(node)
        at = _edit_tree.axis_of(axis, len(node.shape), path)
        shape = ", ".join("any" if n == at else str(size) for n, size in enumerate(node.shape))
        return f"{node.dtype}[{shape}]"

    def join(leaves: list[Array], path: Path) -> Derived:
        shapes = [leaf.shape or () for leaf in leaves]
        at = _edit_tree.axis_of(axis, len(shapes[0]), path)
        shape = (*shapes[0][:at], sum(shape[at] for shape in shapes), *shapes[0][at + 1 :])
        return _joined(np.concatenate, leaves, at, shape, f"{len(leaves)} joined")

    def siblings(branch: Branch, _: Path) -> list[Path]:
        found = [next(_patterns.paths_of(branch, name), ()) for name in names]
        return found if all(found) else []

    return _inner_first(siblings, _joining(levels, alike, join), near=names[0])


@rule
def split(pattern: str, into: Sequence[str], axis: int = -1, sizes: Sequence[int] | None = None) -> Apply:
    """Split subtrees or leaves into several, the inverse of `fuse`: ``split("qkv", ["query", "key", "value"])``.

    Applies wherever it occurs. Each of its arrays is sliced along the axis; each part reads only its own data.

    Args:
        pattern: matches one or several whole names (``attention/qkv``) anywhere.
        into: names of the parts, in their order.
        axis: the axis that is split; negative counts from the end. `fuse` has examples.
        sizes: lengths of the parts on that axis; equal parts if not given.

    Raises:
        TransformError: when applied: there is no such subtree or leaf, or an array has no such parts.
        NameCollisionError: when applied: there already is a new name.
    """
    if not into or isinstance(into, str) or (sizes is not None and len(sizes) != len(into)):
        raise RuleError(f"expected a list of names, and as many sizes if any; got sizes {sizes}")

    def part(array: Array, path: Path, number: int, count: int) -> Derived:
        shape = array.shape or ()
        at = _edit_tree.axis_of(axis, len(shape), path)
        lengths = _lengths(shape[at], count, sizes, path)
        first = sum(lengths[:number])
        return _edit_tree.axis_slice(array, at, first, first + lengths[number], f"part {number} of {count}")

    return _divide(pattern, lambda *_: into, part)


Find = Callable[[Branch, Path], list[Path]]  # takes a branch and its path, returns paths below it
Change = Callable[[Node, dict[Path, list[Path]]], Node]


def _inner_first(find: Find, change: Change, *, near: str) -> Apply:
    """Return the `apply` of a rule that changes what it finds below branches, in inner ones first.

    ``change`` takes a tree, and by branch the paths below it that were found."""

    def apply(stored: Node, _: Node) -> Node:
        tree, is_found = stored, False
        paths = sorted((path for path, _ in iter_branches(stored)), key=len, reverse=True)  # inner changes move none
        for _depth, alike in itertools.groupby(paths, len):
            if found := {path: levels for path in alike if (levels := find(node_at(tree, path), path))}:
                tree, is_found = change(tree, found), True
        if not is_found:
            raise RuleError(f"matches nothing in the checkpoint; {_patterns.near_names(near, stored)}")
        return tree

    return apply


def _joining(into: Path, describe: Callable[[Node, Path], str], join: Callable[[list[Array], Path], Derived]) -> Change:
    """Return the change that joins the nodes below each branch into one, which takes the place of the first."""

    def joined(tree: Node, found: dict[Path, list[Path]]) -> Node:
        starts = {path: [(*path, *level) for level in levels] for path, levels in found.items()}
        wholes = {
            paths[0]: ((*path, *into), _join_trees([node_at(tree, one) for one in paths], paths, describe, join))
            for path, paths in starts.items()
        }
        gone = {one for paths in starts.values() for one in paths}

        def new_leaves(path: Path, leaf: Any) -> list[tuple[Path, Node]]:
            start = _edit_tree.prefix_in(path, gone)
            if start not in wholes:
                return [(path, leaf)] if start is None else []
            end, whole = wholes[start]
            below = path[len(start) :]
            return [((*end, *below), node_at(whole, below))]

        return _edit_tree.rebuild(tree, new_leaves)

    return joined


def _join_trees(
    nodes: Sequence[Node],
    paths: Sequence[Path],
    describe: Callable[[Node, Path], str],
    join: Callable[[list[Array], Path], Derived],
) -> Node:
    """Join several similar trees, of whose nodes ``describe`` says the same; ``join`` takes an array of each."""
    texts = [describe(node, path) for node, path in zip(nodes, paths, strict=True)]
    usual, count = collections.Counter(texts).most_common(1)[0]
    if count < len(texts):
        odd = next(n for n, text in enumerate(texts) if text != usual)
        like = show_path(paths[texts.index(usual)])
        raise misfit(paths[odd], f"is {texts[odd]}, but {like} is {usual}; they must be alike: change or drop it first")
    first = nodes[0]
    if isinstance(first, Branch) and first.children:
        children = {
            name: _join_trees(
                [node.children[name] for node in nodes], [(*path, name) for path in paths], describe, join
            )
            for name in first.children
        }
        return Branch(children, first.container, first.int_keys)
    if _has_no_value(first):
        return first
    return join([_edit_tree.require_array(leaf, path) for leaf, path in zip(nodes, paths, strict=True)], paths[0])


def _divide(
    pattern: str, names: Callable[[Node, Path], Sequence[str]], part: Callable[[Array, Path, int, int], Derived]
) -> Apply:
    """Return the `apply` of a rule that divides matching nodes; ``part`` takes array, path, number and count."""
    compiled = _patterns.whole_names(pattern)

    def divided(tree: Node, found: dict[Path, list[Path]]) -> Node:
        ends: dict[Path, list[Path]] = {}
        for path, levels in found.items():
            for start in ((*path, *level) for level in levels):
                ends[start] = [(*path, *_levels(name)) for name in names(node_at(tree, start), start)]

        def new_leaves(path: Path, leaf: Any) -> list[tuple[Path, Node]]:
            start = _edit_tree.prefix_in(path, ends)
            if start is None:
                return [(path, leaf)]
            new = [(*end, *path[len(start) :]) for end in ends[start]]
            if _has_no_value(leaf):
                return [(end, leaf) for end in new]
            array = _edit_tree.require_array(leaf, path)
            return [(end, part(array, path, number, len(new))) for number, end in enumerate(new)]

        return _edit_tree.rebuild(tree, new_leaves)

    def matching(branch: Branch, path: Path) -> list[Path]:
        return [level for level, _ in _patterns.below(branch, path, compiled)]

    return _inner_first(matching, divided, near=pattern)


def _has_no_value(leaf: Node) -> bool:
    """Return whether a leaf holds no stored value: None, left to the target, an empty branch."""
    return leaf is None or isinstance(leaf, Own | Branch)


def _lengths(length: int, count: int, sizes: Sequence[int] | None, path: Path) -> Sequence[int]:
    """Return the lengths of an axis' parts, which add up to its length."""
    lengths = [length // count] * count if sizes is None else sizes
    if sum(lengths) != length or min(lengths) < 0:
        parts = f"{count} equal parts" if sizes is None else f"parts of {list(sizes)}"
        raise misfit(path, f"has length {length} on the axis, which is not {parts}")
    return lengths


def _levels(name: str) -> Path:
    if not name:
        raise RuleError("a new name is empty")
    return _patterns.names_in(name)


def _in_order(pattern: re.Pattern[str], branch: Branch, path: Path, start: int) -> list[Path]:
    """Return the matching paths below a branch in the order of their numbers, which are consecutive from a start."""
    numbered: dict[int, Path] = {}
    for level, match in _patterns.below(branch, path, pattern):
        shown = show_path((*path, *level))
        if not (match[1] or "").isdecimal():
            raise RuleError(f"the group matches {match[1]!r} in {shown}, expected a number", leaf=shown)
        other = numbered.setdefault(int(match[1]), level)
        if other != level:
            raise RuleError(f"{shown} and {show_path(other)} have the same number; match only one of them", leaf=shown)
    wanted = range(start, max(numbered, default=start - 1) + 1)
    lacking, early = sorted(set(wanted) - numbered.keys()), sorted(numbered.keys() - set(wanted))
    if lacking or early:
        problem = f"but not {lacking}" if lacking else f"of which {early} come before first={start}"
        least = min(numbered)
        remedy = f"pass first={least}" if sorted(numbered) == list(range(least, least + len(numbered))) else ""
        remedy = remedy or f"rename them to {start}, {start + 1}, … first"
        raise misfit(path, f"has numbers {sorted(numbered)}, {problem}; {remedy}")
    return [numbered[number] for number in wanted]


def _common_length(node: Node, start: Path, axis: int) -> int:
    """Return the length that all arrays of a subtree have on an axis."""
    lengths: dict[int, str] = {}
    for path, leaf in iter_leaves(node):
        if not _has_no_value(leaf):
            full = (*start, *path)
            shape = _edit_tree.require_array(leaf, full).shape or ()
            lengths.setdefault(shape[_edit_tree.axis_of(axis, len(shape), full)], show_path(full))
    if len(lengths) != 1 or math.prod(lengths) == 0:
        shown = one_line(Row((leaf,), (str(length),)) for length, leaf in lengths.items()) or "no arrays"
        raise RuleError(
            f"the arrays below {show_path(start)} need one length on axis {axis}, the number of layers; "
            f"found {shown}. Match only what is stacked, or name its axis"
        )
    return next(iter(lengths))


def _joined(function: Callable[..., Any], leaves: list[Array], axis: int, shape: tuple[int, ...], how: str) -> Derived:
    dtype = leaves[0].dtype
    assert dtype is not None  # they are arrays

    def join(*values: Any) -> Any:
        # Into memory of that dtype: numpy alone would drop a foreign byte order.
        return function(values, axis=axis, out=memory.empty(shape, dtype))

    return Derived(tuple(leaves), join, shape, dtype, how)
