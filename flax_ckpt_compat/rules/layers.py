"""Join several layers into one, or split one into several."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.text_formatting import one_line
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
    compiled = _patterns.whole_names(pattern)
    if compiled.groups != 1:
        raise RuleError(f"{pattern!r} needs exactly one group, the number: r'layer_(\\d+)'")

    def number(match: re.Match[str]) -> int:
        if not (match[1] or "").isdecimal():
            raise RuleError(f"the group matches {match[1]!r} in {match.string}, expected a number", leaf=match.string)
        return int(match[1])

    def row(place: Path, layers: dict[int, Path]) -> list[Path]:
        numbers = sorted(layers)
        if numbers != [*range(first, first + len(numbers))]:
            raise misfit(place, f"has numbers {numbers}, expected consecutive ones from first={first} on")
        return [layers[one] for one in numbers]

    def join(leaves: list[Array]) -> Derived:
        shape = leaves[0].shape or ()
        at = _edit_tree.axis_of(axis, (*shape, 1))
        return _joined(np.stack, leaves, at, (*shape[:at], len(leaves), *shape[at:]), f"stack of {len(leaves)}")

    return _inner_first(
        compiled, _joining(_patterns.new_names(into), number, row, _edit_tree.describe, join), near=pattern
    )


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

    def names(start: Path, lengths: dict[Path, int]) -> list[str]:
        count = next(iter(lengths.values()), 0)
        if not count or {*lengths.values()} != {count}:
            found = one_line(f"{show_path(path)}: {length}" for path, length in lengths.items()) or "no arrays"
            raise RuleError(
                f"the arrays below {show_path(start)} need one length on axis {axis}, the number of layers; found "
                f"{found}. Match only what is stacked, or name its axis"
            )
        return [into.replace("{}", str(first + number)) for number in range(count)]

    def layer(array: Array, at: int, number: int, count: int) -> Derived:
        return _edit_tree.axis_slice(array, at, number, number + 1, f"layer {number} of {count}", squeeze=True)

    return _dividing(pattern, axis, names, layer)


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
    if len(set(names)) < max(len(names), 2):
        raise RuleError(f"expected a list of two or more different names, found {names!r:.100}")

    def row(_: Path, siblings: dict[int, Path]) -> list[Path]:
        return [siblings[number] for number in range(len(names))] if len(siblings) == len(names) else []

    def alike(node: Node) -> str:
        if not is_array(node):
            return _edit_tree.describe(node)
        at = _edit_tree.axis_of(axis, node.shape)
        return f"{node.dtype}[{', '.join('any' if n == at else str(size) for n, size in enumerate(node.shape))}]"

    def join(leaves: list[Array]) -> Derived:
        shapes = [leaf.shape or () for leaf in leaves]
        at = _edit_tree.axis_of(axis, shapes[0])
        shape = (*shapes[0][:at], sum(shape[at] for shape in shapes), *shapes[0][at + 1 :])
        return _joined(np.concatenate, leaves, at, shape, f"{len(leaves)} joined")

    numbers = {name: number for number, name in enumerate(names)}
    compiled = _patterns.whole_names("|".join(map(re.escape, names)))
    joining = _joining(_patterns.new_names(into), lambda match: numbers[match[0]], row, alike, join)
    return _inner_first(compiled, joining, near=names[0])


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
    if not into or (sizes is not None and len(sizes) != len(into)):
        raise RuleError(f"expected a list of names, and as many sizes if any; got sizes {sizes}")

    def part(array: Array, at: int, number: int, count: int) -> Derived:
        length = (array.shape or ())[at]
        lengths = [length // count] * count if sizes is None else sizes
        if sum(lengths) != length or min(lengths) < 0:
            parts = f"{count} equal parts" if sizes is None else f"parts of {list(sizes)}"
            raise ValueError(f"it has length {length} on the axis, which is not {parts}")
        first = sum(lengths[:number])
        return _edit_tree.axis_slice(array, at, first, first + lengths[number], f"part {number} of {count}")

    return _dividing(pattern, axis, lambda *_: into, part)


Found = dict[Path, tuple[Path, re.Match[str]]]  # key path of a matching node → that of the branch above, and the match


def _inner_first(pattern: re.Pattern[str], change: Callable[[Node, Found], Node | None], *, near: str) -> Apply:
    """Return the `apply` of a rule that changes the nodes that match, first those in inner branches.

    ``change`` takes a tree and what was found in branches of one depth; it returns None to leave all of that."""

    def apply(stored: Node, _: Node) -> Node:
        tree, is_changed = stored, False
        for depth in sorted({len(path) for path, _ in iter_branches(stored)}, reverse=True):
            found = {
                (*place, *level): (place, match)
                for place, branch in iter_branches(tree)
                if len(place) == depth
                for level, match in _patterns.below(branch, place, pattern)
            }
            if found and (new := change(tree, found)) is not None:
                tree, is_changed = new, True
        if not is_changed:
            raise RuleError(f"matches nothing in the checkpoint; {_patterns.near_names(near, stored)}")
        return tree

    return apply


def _joining(
    into: Path,
    number: Callable[[re.Match[str]], int],
    row: Callable[[Path, dict[int, Path]], list[Path]],
    describe: Callable[[Node], str],
    join: Callable[[list[Array]], Derived],
) -> Callable[[Node, Found], Node | None]:
    """Return the change that joins rows of nodes into one each, which takes the place of the first.

    ``row`` takes a branch and its nodes by number, and returns them in order, or none; ``describe`` says of leaves that
    can be joined the same."""

    def joined(tree: Node, found: Found) -> Node | None:
        numbered: dict[Path, dict[int, Path]] = {}
        for path, (place, match) in found.items():
            other = numbered.setdefault(place, {}).setdefault(number(match), path)
            if other != path:
                raise misfit(path, f"and {show_path(other)} have the same number; match only one of them")
        rows = {place: paths for place, nodes in numbered.items() if (paths := row(place, nodes))}
        ends = {paths[0]: (*place, *into) for place, paths in rows.items()}
        whole = {path: leaf for paths in rows.values() for path, leaf in _join(tree, paths, describe, join)}
        gone = {path for paths in rows.values() for path in paths}

        def new_leaves(path: Path, leaf: Any) -> list[tuple[Path, Node]]:
            start = _edit_tree.prefix_in(path, gone)
            if start is None:
                return [(path, leaf)]
            return [((*ends[start], *path[len(start) :]), whole[path])] if start in ends else []

        return _edit_tree.rebuild(tree, new_leaves) if rows else None

    return joined


def _join(
    tree: Node, paths: list[Path], describe: Callable[[Node], str], join: Callable[[list[Array]], Derived]
) -> Iterator[tuple[Path, Node]]:
    """Yield the leaves below the first of several nodes, each joined with those of the others."""
    nodes = [dict(iter_leaves(node_at(tree, path))) for path in paths]
    for below in dict.fromkeys(path for node in nodes for path in node):
        full = [(*path, *below) for path in paths]
        with _edit_tree.fitting(full[0], nodes[0].get(below)):
            texts = [describe(node[below]) if below in node else "not there" for node in nodes]
            usual = max(texts, key=texts.count)
            for path, text in zip(full, texts, strict=True):
                if text != usual:
                    like = show_path(full[texts.index(usual)])
                    raise misfit(path, f"is {text}, but {like} is {usual}; they must be alike: change or drop it first")
            leaves = [node[below] for node in nodes]
            yield full[0], leaves[0] if _has_no_value(leaves[0]) else join(list(map(_edit_tree.require_array, leaves)))


def _dividing(
    pattern: str,
    axis: int,
    names: Callable[[Path, dict[Path, int]], Sequence[str]],
    part: Callable[[Array, int, int, int], Derived],
) -> Apply:
    """Return the `apply` of a rule that divides the matching nodes on an axis.

    ``names`` takes a node's key path and the lengths of its arrays; ``part`` array, axis, number and count."""

    def divided(tree: Node, found: Found) -> Node:
        axes: dict[Path, int] = {}
        ends: dict[Path, list[Path]] = {}
        for start, (place, _) in found.items():
            lengths: dict[Path, int] = {}
            for path, leaf in iter_leaves(node_at(tree, start), start):
                if not _has_no_value(leaf):
                    with _edit_tree.fitting(path, leaf):
                        shape = _edit_tree.require_array(leaf).shape or ()
                        axes[path] = _edit_tree.axis_of(axis, shape)
                        lengths[path] = shape[axes[path]]
            ends[start] = [(*place, *_patterns.new_names(name)) for name in names(start, lengths)]

        def new_leaves(path: Path, leaf: Any) -> list[tuple[Path, Node]]:
            start = _edit_tree.prefix_in(path, ends)
            if start is None:
                return [(path, leaf)]
            new = [(*end, *path[len(start) :]) for end in ends[start]]
            if path not in axes:
                return [(end, leaf) for end in new]
            with _edit_tree.fitting(path, leaf):
                return [(end, part(leaf, axes[path], number, len(new))) for number, end in enumerate(new)]

        return _edit_tree.rebuild(tree, new_leaves)

    return _inner_first(_patterns.whole_names(pattern), divided, near=pattern)


def _has_no_value(leaf: Node) -> bool:
    """Return whether a leaf holds no stored value: None, left to the target, an empty branch."""
    return leaf is None or isinstance(leaf, Own | Branch)


def _joined(function: Callable[..., Any], leaves: list[Array], axis: int, shape: tuple[int, ...], how: str) -> Derived:
    dtype = leaves[0].dtype
    assert dtype is not None  # they are arrays

    def join(*values: Any) -> Any:
        # Into memory of that dtype: numpy alone would drop a foreign byte order.
        return function(values, axis=axis, out=memory.empty(shape, dtype))

    return Derived(tuple(leaves), join, shape, dtype, how)
