"""Arrays that are spread over the processes that save together, taken out of a tree."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from flax_ckpt_compat._core.backend import ProcessInfo
from flax_ckpt_compat._core.errors import StorageError, UnsupportedLeafError
from flax_ckpt_compat._core.local import temporaries
from flax_ckpt_compat._core.tree import (
    Branch,
    HostCopy,
    KeyData,
    Node,
    Path,
    Shard,
    is_jax_array,
    iter_leaves,
    map_leaves,
    normalize_index,
    show_path,
)

from . import format


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SpreadArray:
    """A leaf of which each process holds a part.

    Attributes:
        subpath: its place in the folder of arrays.
        value: a ``jax.Array`` or `HostCopy`.
        metadata: what its ``.zarray`` says.
    """

    subpath: str
    value: Any
    metadata: bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return cast(tuple[int, ...], self.value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the array."""
        return cast(np.dtype[Any], self.value.dtype)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of one process's shard, at least 1 on every axis, as jax cuts arrays."""
        return _chunks(self.value)

    def shards(self) -> Iterator[Shard]:
        """What this process has to write: the first replica of each of its shards."""
        if isinstance(self.value, HostCopy):
            yield from self.value.shards
            return
        for shard in self.value.addressable_shards:
            if shard.replica_id == 0:
                yield Shard(normalize_index(shard.index, self.shape), np.asarray(shard.data))

    def names(self) -> Iterator[str]:
        """The names of its chunks; none where it has no elements."""
        counts = [math.ceil(size / chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        return map(_name, itertools.product(*map(range, counts)))

    def name_of(self, shard: Shard) -> str:
        """The name of the chunk that a shard is."""
        return _name(side.start // chunk for side, chunk in zip(shard.index, self.chunks, strict=True))

    def check_same(self, folder: str, shape: tuple[int, ...], dtype: Any) -> None:
        """Raises if process 0 has described it as something else."""
        if (shape, dtype) != (self.shape, self.dtype):
            found = f"{dtype}{shape} by process 0 and {self.dtype}{self.shape} by this one"
            message = f"{folder}: {self.subpath or 'the array'} is saved as {found}; all processes have to save one"
            raise StorageError(f"{message} tree", path=folder)

    def incomplete(self, folder: str, lost: list[str]) -> StorageError:
        """The error for chunks that were not written."""
        message = f"{folder}: {len(lost)} of the chunks of {self.subpath or 'the array'} were not written"
        return StorageError(
            f"{message} ({', '.join(lost[:3])}, …); do all processes save the same tree, and into a directory that "
            "they share?",
            path=folder,
        )


def _name(index: Iterable[int]) -> str:
    return ".".join(map(str, index)) or "0"


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """The text that stands for an array in the file."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SharedTree:
    """What several processes save together.

    Attributes:
        tree: with `SpreadArray`s among its leaves.
        arrays: those, in an order that is the same in all processes.
    """

    tree: Node
    arrays: tuple[SpreadArray, ...]

    def document(self, before: str) -> Node:
        """The tree as the file holds it.

        Args:
            before: what stands before every array's path in the folder of arrays.
        """
        return map_leaves(lambda _, leaf: _referred(leaf, before), self.tree)


def split(tree: Node, process: ProcessInfo) -> SharedTree:
    """Finds the arrays that are spread over processes.

    Raises:
        UnsupportedLeafError: one that cannot be stored as an array of several processes.
    """
    found = {path: array for path, leaf in iter_leaves(tree) if (array := _spread(path, leaf, process)) is not None}
    names = choose(sorted(found), tree.children if isinstance(tree, Branch) else ())
    arrays = {path: SpreadArray(names[path], found[path], _metadata(path, found[path])) for path in sorted(found)}
    taken_out = map_leaves(lambda path, leaf: _replaced(leaf, arrays[path]) if path in arrays else leaf, tree)
    return SharedTree(taken_out, tuple(arrays.values()))


def _spread(path: Path, leaf: Any, process: ProcessInfo) -> Any:
    """The leaf's array if several processes hold it, or None."""
    array = leaf.data if isinstance(leaf, KeyData) else leaf
    if not (isinstance(array, HostCopy) or is_jax_array(array)):
        return None
    sharding = array.sharding
    if sharding.is_fully_addressable:
        return None
    owners = {device.process_index for device in sharding.device_set}
    if len(owners) == 1 and owners != {process.index}:
        raise UnsupportedLeafError(
            f"{show_path(path)} lies wholly on the devices of process {owners.pop()}, and process {process.index} sees "
            "nothing of it; spread or replicate it over the processes before saving",
            leaf=show_path(path),
        )
    return array


def _replaced(leaf: Any, array: SpreadArray) -> Any:
    return KeyData(leaf.impl, array) if isinstance(leaf, KeyData) else array


def _referred(leaf: Any, before: str) -> Any:
    if isinstance(leaf, KeyData):
        return KeyData(leaf.impl, _referred(leaf.data, before))
    if isinstance(leaf, SpreadArray):
        return Reference(format.PLACEHOLDER + (before + leaf.subpath).rstrip("/"))
    return leaf


def _chunks(array: Any) -> tuple[int, ...]:
    return tuple(max(1, size) for size in array.sharding.shard_shape(tuple(array.shape)))


def _metadata(path: Path, array: Any) -> bytes:
    if not isinstance(array, HostCopy) and array.is_deleted():
        raise UnsupportedLeafError(
            f"{show_path(path)} was deleted or donated; save before donating its buffer", leaf=show_path(path)
        )
    name = array.dtype.name
    try:
        return _zarray(tuple(array.shape), _chunks(array), name)
    except ValueError as error:
        raise UnsupportedLeafError(
            f"{show_path(path)}: an array of several processes in a msgpack checkpoint cannot be of dtype {name} "
            f"({error}); convert it, or save in Orbax's format",
            leaf=show_path(path),
        ) from error


@functools.lru_cache(maxsize=1024)
def _zarray(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> bytes:
    """What TensorStore writes as ``.zarray`` of the array that jax asks it for."""
    import tensorstore

    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "memory"},
        "dtype": dtype,
        "metadata": {"compressor": {"id": "zstd"}, "shape": shape, "chunks": chunks},
    }
    store = tensorstore.open(spec, create=True, open=True, context=tensorstore.Context()).result()
    assert store.kvstore is not None
    return bytes(store.kvstore.read(".zarray").result().value)


# Of what most file systems allow for one name, and of what a path has room for.
_MAX_NAME, _MAX_SUBPATH = 255, 1024
_SAFE = "arrays"


def choose(paths: Sequence[Path], taken: Collection[str]) -> dict[Path, str]:
    """A subpath for each array: its key path joined with ``/``, as in Flax, where that is safe; else a number.

    Readers take the subpath from the file's text, so any will do that leads to one array alone. The plain one
    may leave the folder (``..``), not be a path, or lead to another leaf's array too (a key ``a/b`` beside
    a key ``a`` over ``b``; keys that some file systems do not tell apart, such as ``A`` and ``a``).

    Args:
        paths: key paths, in an order that all processes agree on.
        taken: the names at the root of the tree.
    """
    safe = _SAFE
    while _folded(safe) in {_folded(name) for name in taken}:
        safe += "_"
    spelled: dict[Path, Path] = {}
    chosen = {}
    for number, path in enumerate(paths):
        plain = all(map(_is_plain, path)) and not (path and temporaries.is_generation(path[0]))
        plain = plain and len("/".join(path).encode()) <= _MAX_SUBPATH and _claim(path, spelled)
        chosen[path] = "/".join(path) if plain else f"{safe}/{number}"
    return chosen


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name) and len(name.encode()) <= _MAX_NAME


def _claim(path: Path, spelled: dict[Path, Path]) -> bool:
    """Notes the folders on the way; False where one of them is spelled otherwise than before."""
    folded = tuple(map(_folded, path))
    ways = [(folded[:end], path[:end]) for end in range(1, len(path) + 1)]
    if any(spelled.get(way, plain) != plain for way, plain in ways):
        return False
    spelled.update(ways)
    return True


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
