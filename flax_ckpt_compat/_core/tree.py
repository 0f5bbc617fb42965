"""The neutral tree that both formats are written from and read into.

A node is a `Branch` or a leaf. When saving, leaves are the values themselves (arrays, Python
scalars, `KeyData`, `HostCopy`, None); when reading, they are `flax_ckpt_compat._core.backend.LeafHandle`s, or None.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy as np

from flax_ckpt_compat._core.errors import NameCollisionError

Path = tuple[str, ...]
Node = Any  # Branch | leaf; the leaf's type depends on the direction, see the module docstring


class Container(enum.Enum):
    """What a branch was in the user's tree. Formats that keep less than this say so in their docs."""

    DICT = "dict"
    LIST = "list"
    TUPLE = "tuple"
    NAMEDTUPLE = "namedtuple"

    @property
    def is_sequence(self) -> bool:
        """True for list and tuple, whose children are named '0', '1', …, in order, without gaps."""
        return self in (Container.LIST, Container.TUPLE)


@dataclasses.dataclass(slots=True)
class Branch:
    """An inner node.

    Attributes:
        children: name → node, in the order of the user's tree (not sorted).
        container: what it was.
        int_keys: those names that were Python ints in the user's dict.
    """

    children: dict[str, Node]
    container: Container = Container.DICT
    int_keys: frozenset[str] = frozenset()


@dataclasses.dataclass(slots=True, eq=False)
class KeyData:
    """A typed PRNG key array, taken apart.

    Attributes:
        impl: jax's name of the implementation (``threefry2x32``, ``rbg``, ``unsafe_rbg``, …).
        data: uint32 array, the key array's shape followed by the implementation's key shape.
    """

    impl: str
    data: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A box of an array, on the host.

    Attributes:
        index: where it lies in the whole array: start and stop on every axis, without steps.
        data: its values, C order.
    """

    index: tuple[slice, ...]
    data: np.ndarray[Any, Any]


@dataclasses.dataclass(slots=True, eq=False)
class HostCopy:
    """A ``jax.Array`` copied to the host when a background save began, so that donating it does no harm.

    Attributes:
        shape, dtype: of the whole array.
        shards: each distinct shard once; together they cover the array.
        sharding: the ``jax.sharding.Sharding`` that it had.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: tuple[Shard, ...]
    sharding: Any

    @classmethod
    def whole(cls, data: np.ndarray[Any, Any], sharding: Any) -> HostCopy:
        """A copy in one piece."""
        index = tuple(slice(0, length) for length in data.shape)
        return cls(data.shape, data.dtype, (Shard(index, data),), sharding)

    @property
    def nbytes(self) -> int:
        """Size of the whole array, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """The values in one piece, put together anew unless they are in one."""
        if len(self.shards) == 1:
            return self.shards[0].data
        gathered = np.empty(self.shape, self.dtype)
        for shard in self.shards:
            gathered[shard.index] = shard.data
        return gathered


def normalize_index(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """An index without steps, such as jax's (which leaves out what is whole), as start and stop on every axis."""
    return tuple(slice(*side.indices(length)[:2]) for side, length in zip(index, shape, strict=True))


def is_jax_array(leaf: object) -> bool:
    """True for a ``jax.Array``; such a leaf implies that jax is loaded, so jax is never imported for it."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def iter_leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields (key path, leaf) in tree order. None is a leaf; a branch without children yields itself."""
    if not isinstance(node, Branch) or not node.children:
        yield path, node
        return
    for name, child in node.children.items():
        yield from iter_leaves(child, (*path, name))


def iter_branches(node: Node, path: Path = ()) -> Iterator[tuple[Path, Branch]]:
    """Yields (key path, branch), the outer ones first."""
    if isinstance(node, Branch):
        yield path, node
        for name, child in node.children.items():
            yield from iter_branches(child, (*path, name))


def topmost(node: Node, paths: Set[Path], path: Path = ()) -> Iterator[Path]:
    """Yields the key paths of the topmost nodes, below the root, all of whose leaves are among some."""
    leaves = [(*path, *rest) for rest, _ in iter_leaves(node)]
    count = sum(leaf in paths for leaf in leaves)
    if count == len(leaves) and path:
        yield path
    elif count and isinstance(node, Branch):
        for name, child in node.children.items():
            yield from topmost(child, paths, (*path, name))


def map_leaves(function: Callable[[Path, Any], Any], node: Node, path: Path = ()) -> Node:
    """A tree of the same branches with every leaf replaced by ``function(path, leaf)``; None is a leaf."""
    if not isinstance(node, Branch):
        return function(path, node)
    children = {name: map_leaves(function, child, (*path, name)) for name, child in node.children.items()}
    return Branch(children, node.container, node.int_keys)


def from_leaves(leaves: Mapping[Path, Any], like: Node = None) -> Node:
    """The inverse of `iter_leaves`.

    Args:
        leaves: key path → leaf, or branch without children; children come in this order.
        like: tree whose branches tell what containers they were, wherever the names of the children are the same.

    Raises:
        NameCollisionError: a key path that is a leaf and also leads to others.
    """
    if () in leaves and len(leaves) == 1:
        return leaves[()]
    root = Branch({})
    for path, leaf in leaves.items():
        node = root
        for name in path[:-1]:
            node = node.children.setdefault(name, Branch({}))
            if not isinstance(node, Branch):
                raise _collision(path)
        if not path or path[-1] in node.children:
            raise _collision(path)
        node.children[path[-1]] = leaf
    return _in_containers(root, like)


def _collision(path: Path) -> NameCollisionError:
    shown = show_path(path)
    return NameCollisionError(f"{shown} would be two things at once, a leaf and a subtree, or two leaves", leaf=shown)


def _in_containers(node: Node, like: Node) -> Node:
    if not isinstance(node, Branch) or not isinstance(like, Branch):
        return node
    children = {name: _in_containers(child, like.children.get(name)) for name, child in node.children.items()}
    if children.keys() != like.children.keys():
        return Branch(children, int_keys=like.int_keys & children.keys())
    return Branch(children, like.container, like.int_keys)


def show_path(path: Path) -> str:
    """The key path as people read it: names joined with ``/``; the whole tree is ``<root>``."""
    return "/".join(path) if path else "<root>"
