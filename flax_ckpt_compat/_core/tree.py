"""Define the neutral tree that every format is written from and read into.

A node is a `Branch` or a leaf. When saving, leaves are values (arrays, Python scalars, str, bytes, None, `HostCopy`, or
`KeyData` of an array); when reading, `flax_ckpt_compat._core.backend.LeafHandle`s, or None. What is written of another
checkpoint has handles of arrays, too."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core.array_boxes import normalize_index
from flax_ckpt_compat._core.errors import NameCollisionError

if TYPE_CHECKING:  # below, functions import it: listings of checkpoints do without
    import numpy as np

Path = tuple[str, ...]
Node = Any  # Branch | leaf
_SHARD_TRIES, _SHARD_PAUSE = 1000, 0.001  # s; until another thread has listed the shards of an array


class Container(enum.Enum):
    """Container type of a branch in the user's tree. Not every format stores all of them."""

    DICT = "dict"
    LIST = "list"
    TUPLE = "tuple"
    NAMEDTUPLE = "namedtuple"

    @property
    def is_sequence(self) -> bool:
        """Return True for list and tuple: their children are named '0', '1', …, in order, without gaps."""
        return self in (Container.LIST, Container.TUPLE)


@dataclasses.dataclass(slots=True)
class Branch:
    """An inner node."""

    children: dict[str, Node]  # name → node, in the order of the user's tree (not sorted)
    container: Container = Container.DICT  # its type in the user's tree
    int_keys: frozenset[str] = frozenset()  # names that were Python ints in the user's dict
    type_name: str = ""  # of a namedtuple's class, where a format records it


class Numbers(Branch):
    """A branch of numbers, or None, alone: ``values`` is a dict or list, of which leaves are made when asked for."""

    __slots__ = ("_make", "values")

    def __init__(self, container: Container, values: Any, make: Callable[[], dict[str, Node]]):
        """Let a function make the children when they are asked for; from then on ``values`` is None."""
        self.container, self.int_keys, self.type_name = container, frozenset(), ""
        self.values, self._make = values, make

    def __getattr__(self, name: str) -> Any:
        if name != "children":
            raise AttributeError(name)
        self.children, self.values = self._make(), None
        return self.children


@dataclasses.dataclass(slots=True, eq=False)
class KeyData:
    """Implementation and key data of a typed PRNG key array."""

    impl: str  # jax's name of the implementation (``threefry2x32``, ``rbg``, ``unsafe_rbg``, …)
    data: Any  # uint32 array, the key array's shape followed by the implementation's key shape
    sharding: str | None = None  # saved sharding to write, as Orbax's JSON text, of an array that has none


@dataclasses.dataclass(slots=True, eq=False)  # frozen=True would triple the time to create one
class Shard:
    """A shard of an array, in host memory."""

    index: tuple[slice, ...]  # its slice of the whole array: start and stop on every axis, without steps
    data: np.ndarray[Any, Any]  # its values, C order


@dataclasses.dataclass(slots=True, eq=False)
class HostCopy:
    """A ``jax.Array`` copied to the host for an async save, so that the original may be donated."""

    shape: tuple[int, ...]  # shape of the whole array
    dtype: np.dtype[Any]
    shards: tuple[Shard, ...]  # each distinct shard once; together they cover the array
    sharding: Any  # the original's ``jax.sharding.Sharding``

    @property
    def nbytes(self) -> int:
        """Return the size of the whole array, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def shards_of(array: Any) -> Iterator[Shard]:
    """Return a `HostCopy`'s shards, or the addressable shards of a ``jax.Array``, each once (``replica_id`` 0)."""
    import numpy as np

    if isinstance(array, HostCopy):
        return iter(array.shards)
    return (Shard(index, np.asarray(data, order="C")) for index, data in first_shards(array))


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """Return the values of a `HostCopy`, or of a ``jax.Array`` that this process sees whole, as one array."""
    import numpy as np

    if isinstance(array, HostCopy):
        if len(array.shards) == 1:
            return array.shards[0].data
    elif not array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    elif next(iter(array.sharding.device_set)).platform != "cpu":  # where it is nothing, and takes time
        start_transfer(array)
    assembled = np.empty(array.shape, array.dtype)  # jax would do so from its list of shards; see `first_shards`
    for shard in shards_of(array):
        assembled[shard.index] = shard.data
    return assembled


@functools.lru_cache(maxsize=256)  # leaves share few shardings and shapes
def first_replicas(sharding: Any, shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
    """Return device and index of the shards with ``replica_id`` 0 that this process holds."""
    first: dict[str, tuple[Any, tuple[slice, ...]]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        box = normalize_index(index, shape)
        first.setdefault(str(box), (device, box))
    return {device: box for device, box in first.values() if device in sharding.addressable_devices}


def first_shards(array: Any) -> Iterator[tuple[tuple[slice, ...], Any]]:
    """Yield index and data of each of an array's `first_replicas`.

    jax lists the shards of an array on first use, without a lock: if two threads ask for them at once, one finds some
    of them only, and then some are there twice, at other positions (0.4.38 to 0.10.2, measured)."""
    left = first_replicas(array.sharding, array.shape).copy()
    is_whole = array.is_fully_replicated  # each of its shards is the whole array
    for _ in range(_SHARD_TRIES):
        with suppress(IndexError):
            for position in itertools.count():
                if not left:
                    return
                data = array.addressable_data(position)
                for device in [*left] if is_whole else left.keys() & data.devices():
                    yield left.pop(device), data
        time.sleep(_SHARD_PAUSE)
    raise RuntimeError(f"jax lists no shard on {[*left]} of an array of shape {array.shape}")


def start_transfer(array: Any) -> None:
    """Start the copy of a ``jax.Array`` from accelerators to the host."""
    with suppress(IndexError):  # see `first_shards`: the shards are then copied one after another
        array.copy_to_host_async()


def is_jax_array(leaf: object) -> bool:
    """Return whether a leaf is a ``jax.Array``, without importing jax: such a leaf implies that it is loaded."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def iter_leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (key path, leaf) in tree order. None is a leaf; a branch without children yields itself."""
    left = [(path, node)]  # not recursive: each leaf would pass through a generator per level
    while left:
        path, node = left.pop()
        if isinstance(node, Branch) and node.children:
            left += [((*path, name), child) for name, child in reversed(node.children.items())]
        else:
            yield path, node


def iter_branches(node: Node, path: Path = ()) -> Iterator[tuple[Path, Branch]]:
    """Yield (key path, branch), parents first."""
    if isinstance(node, Branch):
        yield path, node
        for name, child in node.children.items():
            yield from iter_branches(child, (*path, name))


def topmost(node: Node, paths: Set[Path]) -> list[Path]:
    """Return the key paths of the topmost nodes below the root with all their leaves in ``paths``."""
    leaves = [path for path, _ in iter_leaves(node) if path] if paths else []
    not_whole = {path[:end] for path in leaves if path not in paths for end in range(len(path))}
    nodes_above = ((path[:end] for end in range(1, len(path) + 1)) for path in leaves if path in paths)
    return [*dict.fromkeys(next(node for node in above if node not in not_whole) for above in nodes_above)]


def node_at(node: Node, path: Path) -> Node:
    """Return the node at a key path below a node, or None."""
    for name in path:
        node = node.children.get(name) if isinstance(node, Branch) else None
    return node


def map_leaves(function: Callable[[Path, Any], Any], node: Node, path: Path = ()) -> Node:
    """Replace every leaf by ``function(path, leaf)`` in a copy of the tree; None is a leaf."""
    if not isinstance(node, Branch):
        return function(path, node)
    children = {name: map_leaves(function, child, (*path, name)) for name, child in node.children.items()}
    return Branch(children, node.container, node.int_keys, node.type_name)


def from_leaves(leaves: Mapping[Path, Any], like: Node = None, origins: Mapping[Path, Path] | None = None) -> Node:
    """Build a tree from leaves, or branches without children, in this order, in the containers that ``like`` has for
    them: those at their ``origins``, the leaves' key paths there, where a branch moved as a whole; else at its own."""
    if () in leaves and len(leaves) == 1:
        return leaves[()]
    root = Branch({})
    for path, leaf in leaves.items():
        node: Node = root
        for name in path[:-1]:
            if isinstance(node, Branch):
                if name not in node.children:  # no branch is made in vain for each of many leaves
                    node.children[name] = Branch({})
                node = node.children[name]
        if not path or not isinstance(node, Branch) or path[-1] in node.children:
            shown = show_path(path)
            raise NameCollisionError(f"{shown} would be two leaves, or lie below a leaf or above one", leaf=shown)
        node.children[path[-1]] = leaf
    if like is not None:
        _take_containers(root, like, origins or {})
    return root


def _take_containers(node: Node, like: Node, origins: Mapping[Path, Path], path: Path = ()) -> Path | None:
    """Give a new node the container of the branch that it was, else of that at its path; return the path it had."""
    if not isinstance(node, Branch) or not node.children:
        return origins.get(path, path)
    had = {name: _take_containers(child, like, origins, (*path, name)) for name, child in node.children.items()}
    olds = {old[:-1] for name, old in had.items() if old and old[-1] == name}
    old = olds.pop() if len(olds) == 1 else None
    places = [node_at(like, place) for place in dict.fromkeys((path, old)) if place is not None]
    node.int_keys = getattr(places[-1], "int_keys", frozenset()) & had.keys()
    for was in places:
        if isinstance(was, Branch) and had.keys() == was.children.keys():
            node.container, node.int_keys, node.type_name = was.container, was.int_keys, was.type_name
    return old


def joined(path: Path) -> str:
    """Return the text that patterns are matched with: names joined with ``/``, of which names may have some, too."""
    return "/".join(path)


def show_path(path: Path) -> str:
    """Format a key path for messages and reports: names joined with ``/``; the whole tree is ``<root>``.

    A slash within a name is ``\\/``, a backslash there ``\\\\``, so that no two paths look alike; as a regular
    expression, this still matches `joined`."""
    text = "/".join(path)
    if "\\" in text or text.count("/") >= len(path) > 0:
        text = "/".join(name.replace("\\", r"\\").replace("/", r"\/") for name in path)
    return text if path else "<root>"
