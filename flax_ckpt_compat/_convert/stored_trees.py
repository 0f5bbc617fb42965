"""Describe a stored tree for a backend's writer: arrays are read when they are written."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind, read_all
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, Node, Path, StoredArray, iter_leaves, map_leaves

# Bytes. Neighbouring small arrays are read together; a few such batches are kept, because formats order dicts
# differently.
_SMALL = 256 << 10
_BATCH = 2 << 20
_BATCHES = 4


def to_write(node: Node) -> Node:
    """Return a tree of leaf handles as one to write: `StoredArray`s, and the values of all other leaves."""
    leaves = Leaves([leaf for _, leaf in iter_leaves(node) if isinstance(leaf, LeafHandle)])
    return map_leaves(lambda _, leaf: leaves.leaf(leaf), node)


class Leaves:
    """Leaves to write; small arrays are read with their neighbours, and all that is not an array at once."""

    def __init__(self, handles: Sequence[LeafHandle]):
        small = [one for one in handles if one.kind is LeafKind.ARRAY and one.nbytes <= _SMALL]
        self._read_small = _reader_of_small(small)
        others = [one for one in handles if one.kind is not LeafKind.ARRAY]
        self._values = dict(zip(others, read_all(others), strict=True))

    def leaf(self, leaf: Any) -> Any:
        """Return the leaf to write for a handle; anything else as it is."""
        if not isinstance(leaf, LeafHandle):
            return leaf
        if leaf.kind is LeafKind.ARRAY:
            assert leaf.dtype is not None
            read = functools.partial(self._read_small, leaf) if leaf.nbytes <= _SMALL else leaf.read
            return StoredArray(leaf.shape, leaf.dtype, leaf.sharding, read, leaf, *_parts(leaf))
        value = self._values[leaf]
        return KeyData(value.impl, in_memory(value.data, leaf.sharding)) if isinstance(value, KeyData) else value


def _parts(handle: LeafHandle) -> tuple[Any, Any]:
    """Return the chunks of a large array that is split evenly, as a sharded save has it, and what reads one."""
    chunks = handle.reader.chunks_of(handle)
    if handle.nbytes <= _SMALL or chunks == handle.shape or any(map(operator.mod, handle.shape, chunks)):
        return None, None
    return chunks, lambda box: handle.reader.read([ArraySlice(handle, box)])[0]


def without_shardings(node: Node) -> Node:
    """Return a tree whose arrays need no device when real Orbax restores them: numpy arrays, and keys on all devices.

    Real Orbax restores typed keys only as arrays with a sharding."""

    def drop(_: Path, leaf: Any) -> Any:
        if isinstance(leaf, KeyData) and isinstance(leaf.data, StoredArray):
            return KeyData(leaf.impl, dataclasses.replace(leaf.data, sharding=layout.MESH_OF_ALL))
        return dataclasses.replace(leaf, sharding=None) if isinstance(leaf, StoredArray) else leaf

    return map_leaves(drop, node)


def in_memory(array: np.ndarray[Any, Any], sharding: str | None = None) -> StoredArray:
    """Return an array in memory as a stored one."""
    return StoredArray(array.shape, array.dtype, sharding, lambda: array)


def _reader_of_small(handles: Sequence[LeafHandle]) -> Callable[[LeafHandle], Any]:
    """Return a function that reads one of these arrays, with its neighbours unless they are there."""
    batches: list[list[LeafHandle]] = []
    batch_of: dict[LeafHandle, int] = {}
    size = _BATCH + 1
    for handle in handles:
        if size + handle.nbytes > _BATCH:
            batches.append([])
            size = 0
        batches[-1].append(handle)
        batch_of[handle] = len(batches) - 1
        size += handle.nbytes + 256  # of the objects around it

    @functools.lru_cache(_BATCHES)
    def read(number: int) -> dict[LeafHandle, Any]:
        return dict(zip(batches[number], read_all(batches[number]), strict=True))

    return lambda handle: read(batch_of[handle])[handle]


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


def with_guessed_lists(node: Node) -> tuple[Node, list[Path]]:
    """Return a tree with dicts of '0', '1', … as lists, and the key paths of these; empty ones stay dicts."""
    guessed: list[Path] = []

    def convert(branch: Node, path: Path) -> Node:
        if not isinstance(branch, Branch):
            return branch
        if is_list := is_numbered(branch):
            guessed.append(path)
        children = {name: convert(child, (*path, name)) for name, child in branch.children.items()}
        return Branch(children, Container.LIST if is_list else branch.container, branch.int_keys)

    return convert(node, ()), guessed


def is_numbered(branch: Branch) -> bool:
    """Return whether a dict has the text keys '0', '1', … in order, as msgpack files store lists and tuples."""
    names = list(branch.children)
    is_dict = branch.container is Container.DICT and not branch.int_keys
    return is_dict and bool(names) and names == [str(index) for index in range(len(names))]


def in_stored_order(node: Node) -> Node:
    """Return a tree that Orbax's format keeps in the order of its names; it sorts dicts, but not fields."""
    if not isinstance(node, Branch):
        return node
    children = {name: in_stored_order(child) for name, child in node.children.items()}
    unsorted = node.container is Container.DICT and not node.int_keys and list(children) != sorted(children)
    return Branch(children, Container.NAMEDTUPLE if unsorted else node.container, node.int_keys)
