"""Join several layers into one, or split one into several."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.folding import Row, one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, map_leaves, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, is_array
from flax_ckpt_compat.rules import _arrays, _trees
from flax_ckpt_compat.rules._arrays import Array
from flax_ckpt_compat.rules._rule import Apply, rule


@rule
def stack(_rule_name: str, pattern: str, into: str, axis: int = 0) -> Apply:
    """Stack numbered subtrees into one, as for ``nn.scan`` over layers: ``stack(r"layer_(\\d+)", "layers")``.

    Applies to all such siblings (params, moments of the optimizer, …); each of their arrays gets a new axis, in the
    order of the numbers. If layers are a list (``blocks/0``), first ``rename(r"blocks/(\\d+)", r"block_\\1")``.

    Args:
        pattern: regular expression over one whole name, whose only group is the number.
        into: name of the subtree; ``layers/cell`` makes two levels.
        axis: the new axis of each array; negative counts from the end.

    Raises:
        TransformError: a bad pattern; when applied: it matches nothing, the numbers are not 0, 1, …, n-1, or two of
            the layers differ in their leaves, shapes or dtypes.
        NameCollisionError: when applied: there already is an ``into``.
    """
    compiled, levels = _numbered(pattern, _rule_name), _levels(into, _rule_name)

    def join(leaves: list[Array], path: Path) -> Derived:
        shape = leaves[0].shape or ()
        at = _arrays.axis_of(axis, len(shape) + 1, path, _rule_name)
        shape = (*shape[:at], len(leaves), *shape[at:])
        return _joined(np.stack, leaves, at, shape, f"stack of {len(leaves)}")

    def stacked(branch: Branch, path: Path) -> Branch | None:
        names = _in_order(compiled, branch, path, _rule_name)
        if not names:
            return None
        paths = [(*path, name) for name in names]
        nodes = [branch.children[name] for name in names]
        whole = _arrays.join_trees(nodes, paths, lambda node, _: _arrays.describe(node), join, _rule_name)
        return _trees.replaced(branch, path, [(name,) for name in names], [(levels, whole)], _rule_name)

    return lambda stored, _: _trees.change_branches(stored, stacked, _rule_name, near=pattern)


@rule
def unstack(_rule_name: str, name: str, into: str, axis: int = 0) -> Apply:
    """Split a subtree into numbered ones, the inverse of `stack`: ``unstack("layers", "layer_{}")``.

    Applies wherever the subtree occurs. Each of its arrays is sliced along the axis, and reads only the slice.

    Args:
        name: of the subtree, or several (``layers/cell``).
        into: name of each new subtree, with ``{}`` for the number.
        axis: the axis that is removed from each array; negative counts from the end.

    Raises:
        TransformError: ``into`` without ``{}``; when applied: there is no such subtree, its arrays differ in their
            lengths on that axis, or it holds leaves that are no arrays.
        NameCollisionError: when applied: there already is a new name.
    """
    if into.count("{}") != 1:
        raise TransformError(f"{_rule_name}: {into!r} needs one {{}}, where the number goes, such as 'layer_{{}}'")

    def unstacked(branch: Branch, path: Path) -> Branch | None:
        level = _trees.destination_in(branch, name)
        if not level:
            return None
        node, start = _trees.node_at(branch, level), (*path, *level)
        count = _common_length(node, start, axis, _rule_name)
        new = [
            (_trees.names_in(into.replace("{}", str(n))), map_leaves(_piece(n, count, start), node))
            for n in range(count)
        ]
        return _trees.replaced(branch, path, [level], new, _rule_name)

    def _piece(number: int, count: int, start: Path) -> Callable[[Path, Any], Node]:
        def one(path: Path, leaf: Any) -> Node:
            if _arrays.has_no_value(leaf):
                return leaf
            at = _arrays.axis_of(axis, len(leaf.shape), (*start, *path), _rule_name)
            return _arrays.axis_slice(leaf, at, number, number + 1, f"layer {number} of {count}", squeeze=True)

        return one

    return lambda stored, _: _trees.change_branches(stored, unstacked, _rule_name, near=name)


@rule
def fuse(_rule_name: str, names: Sequence[str], into: str, axis: int = -1) -> Apply:
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
    levels = _levels(into, _rule_name)
    if len(set(names)) < 2 or len(set(names)) < len(names) or isinstance(names, str):
        raise TransformError(f"{_rule_name}: expected a list of two or more different names")

    def alike(node: Node, path: Path) -> str:
        if not is_array(node):
            return _arrays.describe(node)
        at = _arrays.axis_of(axis, len(node.shape), path, _rule_name)
        shape = ", ".join("any" if n == at else str(size) for n, size in enumerate(node.shape))
        return f"{node.dtype}[{shape}]"

    def join(leaves: list[Array], path: Path) -> Derived:
        shapes = [leaf.shape or () for leaf in leaves]
        at = _arrays.axis_of(axis, len(shapes[0]), path, _rule_name)
        shape = (*shapes[0][:at], sum(shape[at] for shape in shapes), *shapes[0][at + 1 :])
        return _joined(np.concatenate, leaves, at, shape, f"{len(leaves)} joined")

    def fused(branch: Branch, path: Path) -> Branch | None:
        if not set(names) <= branch.children.keys():
            return None
        nodes = [branch.children[name] for name in names]
        whole = _arrays.join_trees(nodes, [(*path, name) for name in names], alike, join, _rule_name)
        return _trees.replaced(branch, path, [(name,) for name in names], [(levels, whole)], _rule_name)

    return lambda stored, _: _trees.change_branches(stored, fused, _rule_name, near=names[0])


@rule
def split(_rule_name: str, name: str, into: Sequence[str], axis: int = -1, sizes: Sequence[int] | None = None) -> Apply:
    """Split a subtree or leaf into several, the inverse of `fuse`: ``split("qkv", ["query", "key", "value"])``.

    Applies wherever it occurs. Each of its arrays is sliced along the axis; each part reads only its own data.

    Args:
        name: of the subtree or leaf, or several names (``attention/qkv``).
        into: names of the parts, in their order.
        axis: the axis that is split; negative counts from the end. `fuse` has examples.
        sizes: lengths of the parts on that axis; equal parts if not given.

    Raises:
        TransformError: when applied: there is no such subtree or leaf, or an array has no such parts.
        NameCollisionError: when applied: there already is a new name.
    """
    if not into or isinstance(into, str) or (sizes is not None and len(sizes) != len(into)):
        raise TransformError(f"{_rule_name}: expected a list of names, and as many sizes if any; got sizes {sizes}")

    def parts(branch: Branch, path: Path) -> Branch | None:
        level = _trees.destination_in(branch, name)
        if not level:
            return None
        node, start = _trees.node_at(branch, level), (*path, *level)
        new = [(_levels(part, _rule_name), map_leaves(_part(number, start), node)) for number, part in enumerate(into)]
        return _trees.replaced(branch, path, [level], new, _rule_name)

    def _part(number: int, start: Path) -> Callable[[Path, Any], Node]:
        def one(path: Path, leaf: Any) -> Node:
            if _arrays.has_no_value(leaf):
                return leaf
            array = _arrays.require_array(leaf, (*start, *path), _rule_name)
            at = _arrays.axis_of(axis, len(array.shape or ()), (*start, *path), _rule_name)
            lengths = _lengths((array.shape or ())[at], len(into), sizes, (*start, *path), _rule_name)
            first = sum(lengths[:number])
            return _arrays.axis_slice(array, at, first, first + lengths[number], f"part {number} of {len(into)}")

        return one

    return lambda stored, _: _trees.change_branches(stored, parts, _rule_name, near=name)


def _lengths(length: int, count: int, sizes: Sequence[int] | None, path: Path, rule_name: str) -> Sequence[int]:
    """Return the lengths of an axis' parts, which add up to its length."""
    lengths = [length // count] * count if sizes is None else sizes
    if sum(lengths) != length or min(lengths) < 0:
        shown = show_path(path)
        parts = f"{count} equal parts" if sizes is None else f"parts of {list(sizes)}"
        raise TransformError(f"{rule_name}: {shown} has length {length} on the axis, which is not {parts}", leaf=shown)
    return lengths


def _levels(name: str, rule_name: str) -> Path:
    if not name:
        raise TransformError(f"{rule_name}: a new name is empty")
    return _trees.names_in(name)


def _numbered(pattern: str, rule_name: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise TransformError(f"{rule_name}: {pattern!r} is no regular expression: {error}") from error
    if compiled.groups != 1:
        raise TransformError(f"{rule_name}: {pattern!r} needs exactly one group, the number: r'layer_(\\d+)'")
    return compiled


def _in_order(pattern: re.Pattern[str], branch: Branch, path: Path, rule_name: str) -> list[str]:
    """Return the names of matching children in the order of their numbers, which must be 0, 1, …, n-1."""
    numbered: dict[int, str] = {}
    for name in branch.children:
        if (match := pattern.fullmatch(name)) is None:
            continue
        shown = show_path((*path, name))
        if not (match[1] or "").isdecimal():
            raise TransformError(
                f"{rule_name}: the group matches {match[1]!r} in {shown}, expected a number", leaf=shown
            )
        other = numbered.setdefault(int(match[1]), name)
        if other != name:
            raise TransformError(f"{rule_name}: {shown} and {other} have the same number", leaf=shown)
    lacking = sorted(set(range(max(numbered, default=-1) + 1)) - numbered.keys())
    if lacking:
        shown = show_path(path)
        raise TransformError(f"{rule_name}: {shown} has numbers {sorted(numbered)}, but not {lacking}", leaf=shown)
    return [numbered[number] for number in range(len(numbered))]


def _common_length(node: Node, start: Path, axis: int, rule_name: str) -> int:
    """Return the length that all arrays of a subtree have on an axis."""
    lengths: dict[int, str] = {}
    for path, leaf in iter_leaves(node):
        if not _arrays.has_no_value(leaf):
            full = (*start, *path)
            shape = _arrays.require_array(leaf, full, rule_name).shape or ()
            lengths.setdefault(shape[_arrays.axis_of(axis, len(shape), full, rule_name)], show_path(full))
    if len(lengths) != 1 or math.prod(lengths) == 0:
        shown = one_line(Row((leaf,), (str(length),)) for length, leaf in lengths.items()) or "no arrays"
        raise TransformError(
            f"{rule_name}: {show_path(start)} has lengths on axis {axis} other than one and the same: {shown}"
        )
    return next(iter(lengths))


def _joined(function: Callable[..., Any], leaves: list[Array], axis: int, shape: tuple[int, ...], how: str) -> Derived:
    dtype = leaves[0].dtype
    assert dtype is not None  # they are arrays

    def join(*values: Any) -> Any:
        # Into memory of that dtype: numpy alone would drop a foreign byte order.
        return function(values, axis=axis, out=memory.empty(shape, dtype))

    return Derived(tuple(leaves), join, shape, dtype, how)
