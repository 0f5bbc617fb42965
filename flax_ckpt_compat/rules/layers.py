"""Join several layers into one, or split one into several."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, is_array
from flax_ckpt_compat.rules import _nodes
from flax_ckpt_compat.rules._rule import Trees, rule
from flax_ckpt_compat.rules.arrays import axis_of, axis_slice, describe, fitting


@rule
def stack(trees: Trees, pattern: str, into: str, axis: int = 0, first: int = 0) -> Node:
    """Stack numbered subtrees into one, as for ``nn.scan`` over layers: ``stack(r"layer_(\\d+)", "layers")``.

    Applies to all such layers side by side (in params, moments of the optimizer, …); each of their arrays gets a new
    axis, in the order of the numbers. Layers of a list: ``stack(r"blocks/(\\d+)", "blocks")``.

    Args:
        pattern: matches one or several whole names anywhere; its only group is the number.
        into: name of the subtree; ``layers/cell`` makes two levels.
        axis: the new axis of each array.
        first: the number of the first layer; the others follow without gaps.
    """
    if _nodes.whole_names(pattern).groups != 1:
        raise TransformError(f"{pattern!r} needs exactly one group, the number: r'layer_(\\d+)'")

    def row(place: Path, nodes: Nodes) -> list[Path]:
        texts = {path: match[1] or "none" for path, match in nodes.items()}
        numbers = {path: int(text) if re.fullmatch(r"\d{1,99}", text) else math.inf for path, text in texts.items()}
        order = sorted(nodes, key=lambda path: numbers[path])
        if [numbers[path] for path in order] != [*range(first, first + len(nodes))]:
            wrong = next(path for path, number in zip(order, itertools.count(first)) if numbers[path] != number)
            found = one_line(text if len(text) < 20 else f"{text[:9]}…" for text in texts.values())
            expected = f"expected consecutive ones from first={first} on, each once; match only one row of them"
            raise _nodes.misfit(wrong, f"is one of {show_path(place)} with numbers {found}, {expected}")
        return order

    def widened(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        at, _ = axis_of(axis, (*shape, 1))
        return at, (*shape[:at], 1, *shape[at:])

    return _joining(trees, pattern, into, row, widened)


@rule
def unstack(trees: Trees, pattern: str, into: str, axis: int = 0, first: int = 0) -> Node:
    """Split subtrees into numbered ones, the inverse of `stack`: ``unstack("layers", "layer_{}")``.

    Applies wherever the subtree occurs. Each of its arrays is sliced along the axis, and reads only the slice.

    Args:
        pattern: matches one or several whole names (``layers/cell``) anywhere.
        into: name of each new subtree, with ``{}`` for the number.
        axis: the axis that is removed from each array, on which all have one length.
        first: the number of the first layer.
    """
    if into.count("{}") != 1:
        raise TransformError(f"{into!r} needs one {{}}, where the number goes, such as 'layer_{{}}'")

    def names(start: Path, lengths: dict[Path, int]) -> list[str]:
        count = next(iter(lengths.values()), 0)
        if not count or {*lengths.values()} != {count}:
            found = one_line(f"{show_path(path)}: {length}" for path, length in lengths.items()) or "no arrays"
            raise TransformError(
                f"the arrays below {show_path(start)} need one length on axis {axis}, the number of layers; found "
                f"{found}. Match only what is stacked, or name its axis"
            )
        return [into.replace("{}", str(first + number)) for number in range(count)]

    return _dividing(trees, pattern, axis, names, lambda _, count: [1] * count, squeeze=True)


@rule
def fuse(trees: Trees, names: Sequence[str], into: str, axis: int = -1) -> Node:
    """Concatenate siblings into one subtree or leaf: ``fuse(["query", "key", "value"], "qkv")``.

    Args:
        names: of the siblings, in the order of the parts; applies wherever they all occur side by side.
        into: name of the result.
        axis: the axis of concatenation: kernels of linen's attention are (embed, heads, head_dim) and biases
            (heads, head_dim), so -1 joins head_dim and -2 heads; kernels of Dense are (in, out).
    """

    def row(_: Path, nodes: Nodes) -> list[Path]:
        siblings = {match[0]: path for path, match in nodes.items()}
        is_whole = siblings.keys() == set(names) and len(nodes) == len(names)
        return [siblings[name] for name in names] if is_whole else []

    return _joining(trees, "|".join(map(re.escape, names)), into, row, lambda shape: (axis_of(axis, shape)[0], shape))


@rule
def split(trees: Trees, pattern: str, into: Sequence[str], axis: int = -1, sizes: Sequence[int] | None = None) -> Node:
    """Split subtrees or leaves into several, the inverse of `fuse`: ``split("qkv", ["query", "key", "value"])``.

    Applies wherever it occurs. Each of its arrays is sliced along the axis; each part reads only its own data.

    Args:
        pattern: matches one or several whole names (``attention/qkv``) anywhere.
        into: names of the parts, in their order.
        axis: the axis that is split; `fuse` has examples.
        sizes: lengths of the parts on that axis, which must make it up; equal parts if not given.
    """
    if not into or (sizes is not None and len(sizes) != len(into)):
        raise TransformError(f"expected a list of names, and as many sizes if any; got sizes {sizes}")

    def lengths(length: int, count: int) -> Sequence[int]:
        found = [length // count] * count if sizes is None else sizes
        if sum(found) != length or min(found) < 0:
            parts = f"{count} equal parts" if sizes is None else f"parts of {list(sizes)}"
            raise ValueError(f"it has length {length} on the axis, which is not {parts}")
        return found

    return _dividing(trees, pattern, axis, lambda *_: into, lengths)


NamesOf = Callable[[Path, dict[Path, int]], Sequence[str]]
SizesOf = Callable[[int, int], Sequence[int]]
Part = Callable[[tuple[int, ...]], tuple[int, tuple[int, ...]]]
Nodes = dict[Path, re.Match[str]]  # those that match, by key path
NewLeaves = Iterable[tuple[Path, Node]]  # with their key paths
Changed = Iterator[tuple[Path, NewLeaves]]  # by the leaves' key paths


def _inner_first(trees: Trees, pattern: str, change: Callable[[Node, Path, Nodes], Changed]) -> Node:
    """Change the nodes that match, first those in inner branches.

    ``change`` takes a tree, a branch and the nodes below it, and yields leaves with what to put for each."""
    names, tree, is_changed = _nodes.whole_names(pattern), trees.stored, False
    branches = sorted((path for path, _ in iter_branches(tree)), key=len, reverse=True)  # inner changes move none
    new: dict[Path, NewLeaves] = {}  # of one depth, until they are in the tree
    for _depth, places in itertools.groupby(branches, len):
        for place in places:
            below = _nodes.below(node_at(tree, place), place, names)
            if nodes := {(*place, *level): match for level, match in below}:
                new.update(change(tree, place, nodes))
        if new:
            tree, is_changed = _nodes.rebuild(tree, lambda path, leaf: new.pop(path, [(path, leaf)])), True
    if not is_changed:
        raise TransformError(f"matches nothing in the checkpoint; {_nodes.near_names(pattern, tree)}")
    return tree


def _joining(trees: Trees, pattern: str, into: str, row: Callable[[Path, Nodes], list[Path]], part: Part) -> Node:
    """Join rows of matching nodes into one each, in the place of the first.

    ``row`` takes a branch and the nodes below it, and returns them in order, or none; ``part`` takes the shape of an
    array and returns the axis on which the arrays are concatenated, and the shape that it has then."""
    levels = _nodes.new_names(into)

    def kind(path: Path, leaf: Node) -> Any:
        if is_array(leaf):
            with fitting(path, leaf):
                at, shape = part(leaf.shape)
            return leaf.dtype, shape[:at], shape[at + 1 :]
        if _has_no_value(leaf):
            return describe(leaf)
        raise _nodes.misfit(path, f"is {describe(leaf)}, expected an array; move it or drop it first")

    def joined(tree: Node, place: Path, nodes: Nodes) -> Changed:
        paths = row(place, nodes)
        leaves = [dict(iter_leaves(node_at(tree, path))) for path in paths]
        for below in dict.fromkeys(path for one in leaves for path in one):
            full = [(*path, *below) for path in paths]
            kinds = [kind(path, one[below]) if below in one else None for path, one in zip(full, leaves, strict=True)]
            usual = max(dict.fromkeys(kinds), key=kinds.count)
            for path, one in zip(full, kinds, strict=True):
                if one != usual:
                    is_there = one is not None or node_at(tree, path) is not None
                    text = describe(node_at(tree, path)) if is_there else "not there"
                    like = show_path(full[kinds.index(usual)])
                    raise _nodes.misfit(path, f"is {text}, unlike {like}; they must be alike: change or drop it first")
            rows = [one[below] for one in leaves]
            yield full[0], [((*place, *levels, *below), _concatenated(rows, part) if is_array(rows[0]) else rows[0])]
            yield from ((path, ()) for path in full[1:])

    return _inner_first(trees, pattern, joined)


def _concatenated(leaves: list[Any], part: Part) -> Derived:
    at, first = part(leaves[0].shape)
    shapes = [part(leaf.shape)[1] for leaf in leaves]
    whole, dtype = (*first[:at], sum(shape[at] for shape in shapes), *first[at + 1 :]), leaves[0].dtype

    def join(*values: Any) -> Any:
        # Into memory of that dtype: numpy alone would drop a foreign byte order.
        return np.concatenate([*map(np.reshape, values, shapes)], at, out=memory.empty(whole, dtype))

    return Derived(tuple(leaves), join, whole, dtype, f"{len(leaves)} joined")


def _dividing(trees: Trees, pattern: str, axis: int, names: NamesOf, sizes: SizesOf, *, squeeze: bool = False) -> Node:
    """Divide the matching nodes on an axis, which goes with ``squeeze``.

    ``names`` takes a node's key path and the lengths of its arrays, ``sizes`` a length and the number of parts."""

    def divided(tree: Node, place: Path, nodes: Nodes) -> Changed:
        for start in nodes:
            leaves = dict(iter_leaves(node_at(tree, start), start))
            lengths: dict[Path, int] = {}
            for path, leaf in leaves.items():
                if not _has_no_value(leaf):
                    with fitting(path, leaf):
                        _, lengths[path] = axis_of(axis, leaf.shape if is_array(leaf) else ())
            ends = [(*place, *_nodes.new_names(name)) for name in names(start, lengths)]
            for path, leaf in leaves.items():
                yield path, parts(path, leaf, start, ends)

    def parts(path: Path, leaf: Any, start: Path, ends: list[Path]) -> NewLeaves:
        new = [(*end, *path[len(start) :]) for end in ends]
        if _has_no_value(leaf):
            yield from ((end, leaf) for end in new)
            return
        with fitting(path, leaf):
            (at, length), stop = axis_of(axis, leaf.shape), 0
            for number, (end, size) in enumerate(zip(new, sizes(length, len(new)), strict=True)):
                begin, stop = stop, stop + size
                yield end, axis_slice(leaf, at, begin, stop, f"part {number} of {len(new)}", squeeze=squeeze)

    return _inner_first(trees, pattern, divided)


def _has_no_value(leaf: Node) -> bool:
    """Return whether a leaf holds no stored value: None, left to the target, an empty branch."""
    return leaf is None or isinstance(leaf, Own | Branch)
