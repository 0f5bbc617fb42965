"""Describe a tree of leaf handles for a backend's writer: arrays are read when they are written."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind, batches, read_all
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, Node, Path, StoredArray, iter_leaves, map_leaves

# Bytes. Neighbouring small arrays are read together.
_SMALL, _BATCH = 256 << 10, 2 << 20
# In Orbax's words: replicated over all devices there are, however many (numpy's -1).
_MESH_OF_ALL = '{"sharding_type": "NamedSharding", "shape": [-1], "axis_names": ["devices"], "partition_spec": []}'


def kind_of(leaf: Any) -> LeafKind | None:
    """Return the kind of a leaf's handle; None of an empty node."""
    return leaf.kind if isinstance(leaf, LeafHandle) else None


def to_write(trees: dict[str, Node], count: Callable[[int], None], *, keep_shardings: bool) -> dict[str, Node]:
    """Return trees of leaf handles as those to write: `StoredArray`s, and the values of all other leaves.

    ``count`` takes the bytes of arrays, or parts of them, as they are read. Without their shardings, arrays need no
    device when real Orbax restores them: it gives numpy arrays, and keys on all devices."""
    handles = [leaf for tree in trees.values() for _, leaf in iter_leaves(tree) if isinstance(leaf, LeafHandle)]
    others = [leaf for leaf in handles if leaf.kind is not LeafKind.ARRAY]
    values = dict(zip(others, read_all(others), strict=True))
    small = [leaf for leaf in handles if leaf.kind is LeafKind.ARRAY and leaf.nbytes <= _SMALL]
    together = list(batches(small, _BATCH))
    batch_of = {leaf: number for number, batch in enumerate(together) for leaf in batch}

    @functools.lru_cache(4)  # a few, because formats order dicts differently
    def read_batch(number: int) -> dict[LeafHandle, Any]:
        return dict(zip(together[number], read_all(together[number]), strict=True))

    def counted(array: Any) -> Any:
        count(array.nbytes)
        return array

    def leaf_to_write(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, LeafHandle):
            return leaf
        if leaf.kind is not LeafKind.ARRAY:
            value = values[leaf]
            if not isinstance(value, KeyData):
                return value
            # Real Orbax restores typed keys only as arrays with a sharding.
            sharding = leaf.sharding if keep_shardings else _MESH_OF_ALL
            return KeyData(value.impl, StoredArray(leaf.shape, value.data.dtype, sharding, lambda: value.data))
        assert leaf.dtype is not None
        chunks = leaf.reader.chunks_of(leaf)[0]
        # A large array that is split evenly, as a sharded save has it, stays so.
        is_split = leaf.nbytes > _SMALL and chunks != leaf.shape and not any(map(operator.mod, leaf.shape, chunks))
        return StoredArray(
            leaf.shape,
            leaf.dtype,
            leaf.sharding if keep_shardings else None,
            lambda: counted(np.asarray(read_batch(batch_of[leaf])[leaf] if leaf in batch_of else leaf.read())),
            chunks if is_split else None,
            lambda box: counted(leaf.reader.read([ArraySlice(leaf, box)])[0]),
        )

    return {item: map_leaves(leaf_to_write, tree) for item, tree in trees.items()}


def with_containers_of(node: Node, like: Node) -> Node:
    """Return a tree with the container types of a target that has leaves at the same key paths."""
    if node is None and isinstance(like, Branch) and not like.children:
        return Branch({}, like.container)  # real Orbax stores optax.EmptyState and its like as None
    if not isinstance(node, Branch) or not isinstance(like, Branch):
        return node
    children = {name: with_containers_of(child, like.children[name]) for name, child in node.children.items()}
    if like.container is not Container.DICT:  # in the order of the target's fields or items
        children = {name: children[name] for name in like.children}
    return Branch(children, like.container, like.int_keys)


def with_guessed_lists(node: Node, guessed: list[Path], path: Path = ()) -> Node:
    """Return a tree with dicts of '0', '1', … as lists, whose key paths are added to ``guessed``; empty ones stay."""
    if not isinstance(node, Branch):
        return node
    names = list(node.children)
    is_plain = node.container is Container.DICT and not node.int_keys
    is_list = is_plain and bool(names) and names == [str(index) for index in range(len(names))]
    guessed += [path] * is_list
    children = {name: with_guessed_lists(child, guessed, (*path, name)) for name, child in node.children.items()}
    return Branch(children, Container.LIST if is_list else node.container, node.int_keys)


def in_stored_order(node: Node) -> Node:
    """Return a tree that Orbax's format keeps in the order of its names; it sorts dicts, but not fields."""
    if not isinstance(node, Branch):
        return node
    children = {name: in_stored_order(child) for name, child in node.children.items()}
    unsorted = node.container is Container.DICT and not node.int_keys and list(children) != sorted(children)
    return Branch(children, Container.NAMEDTUPLE if unsorted else node.container, node.int_keys)
