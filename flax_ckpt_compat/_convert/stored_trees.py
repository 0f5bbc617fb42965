"""Describe a tree of leaf handles for a backend's writer: arrays are read when they are written."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import Format, LeafHandle, LeafKind, Reader, batches, read_all
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, Node, Path, iter_leaves, map_leaves

# Bytes. Neighbouring small arrays are read together.
_SMALL, _BATCH = 256 << 10, 2 << 20


def kind_of(leaf: Any) -> LeafKind | None:
    """Return the kind of a leaf's handle; None of an empty node."""
    return leaf.kind if isinstance(leaf, LeafHandle) else None


def to_write(trees: dict[str, Node], count: Callable[[int], None], *, keep_shardings: bool) -> dict[str, Node]:
    """Return trees of leaf handles as those to write: handles of arrays, and the values of all other leaves.

    ``count`` takes the bytes of arrays, or parts of them, as they are read. Without their shardings, arrays need no
    device when real Orbax restores them: it gives numpy arrays, and keys on all devices."""
    handles = [leaf for tree in trees.values() for _, leaf in iter_leaves(tree) if isinstance(leaf, LeafHandle)]
    others = [leaf for leaf in handles if leaf.kind is not LeafKind.ARRAY]
    values = dict(zip(others, read_all(others), strict=True))
    reader = _ReaderToWrite(handles, count, keep_shardings)

    def leaf_to_write(_: Path, leaf: Any) -> Any:
        value = values.get(leaf, leaf) if isinstance(leaf, LeafHandle) else leaf  # others may have no hash
        if isinstance(value, KeyData) and keep_shardings:
            value.sharding = leaf.sharding
        return dataclasses.replace(leaf, reader=reader, locator=leaf) if isinstance(value, LeafHandle) else value

    return {item: map_leaves(leaf_to_write, tree) for item, tree in trees.items()}


class _ReaderToWrite(Reader):
    """Reader of arrays while they are written; locators are their stored leaves. Small ones are read together."""

    format, places_on_device, keeps_lists, tree, location = Format.MSGPACK, False, False, None, Location("")

    def __init__(self, handles: Sequence[LeafHandle], count: Callable[[int], None], keep_shardings: bool):
        self._count, self._keep_shardings = count, keep_shardings
        small = [leaf for leaf in handles if leaf.kind is LeafKind.ARRAY and leaf.nbytes <= _SMALL]
        together = list(batches(small, _BATCH))
        self._batch_of = {leaf: number for number, batch in enumerate(together) for leaf in batch}
        # A few, because formats order dicts differently.
        self._batch = functools.lru_cache(4)(
            lambda number: dict(zip(together[number], read_all(together[number]), strict=True))
        )

    def read(self, handles: Sequence[LeafHandle], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        return list(map(self._read, handles))

    def _read(self, one: LeafHandle) -> Any:
        leaf = one.locator.part(one.index) if one.index else one.locator
        array = np.asarray(self._batch(self._batch_of[leaf])[leaf] if leaf in self._batch_of else leaf.read())
        self._count(array.nbytes)
        return array

    def chunks_of(self, handle: LeafHandle) -> tuple[tuple[int, ...], bool]:
        """Return the chunks of a large array that is split evenly, as a sharded save has it; see `Reader.chunks_of`."""
        chunks = handle.locator.reader.chunks_of(handle.locator)[0]
        is_split = handle.nbytes > _SMALL and not any(map(operator.mod, handle.shape, chunks))
        return chunks if is_split else handle.shape, False

    def sharding_of(self, handle: LeafHandle) -> str | None:
        return handle.locator.sharding if self._keep_shardings else None


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
