"""Split the distributed arrays of a multi-process save from the tree."""

from __future__ import annotations

import dataclasses
import functools
import math
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import numpy as np

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core.backend import ProcessInfo
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.load_tensorstore import load_tensorstore
from flax_ckpt_compat._core.local import temporaries
from flax_ckpt_compat._core.orbax_layout import ZARR2_METADATA
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
    shards_of,
    show_path,
)

from . import format


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DistributedArray:
    """A leaf with shards in several processes."""

    subpath: str  # path within the folder of arrays
    value: Any  # a ``jax.Array`` or `HostCopy`
    metadata: bytes  # content of its ``.zarray``

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole array."""
        return cast(tuple[int, ...], self.value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the array."""
        return cast(np.dtype[Any], self.value.dtype)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that this process writes; none if the array has no elements."""
        return (shard for shard in shards_of(self.value) if math.prod(shard.data.shape))

    def chunk_names(self) -> Iterator[str]:
        """Yield the names of its chunks; none if it has no elements."""
        return self._names_in(array_boxes.full_box(self.shape))

    def chunk_name(self, index: array_boxes.Box) -> str:
        """Return the name of the chunk of a shard with this index."""
        return next(self._names_in(index))

    def chunk(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the chunk of a shard, in C order: jax has no shards of different shapes."""
        return np.ascontiguousarray(data).reshape(_chunks(self.value))

    def _names_in(self, box: array_boxes.Box) -> Iterator[str]:
        return (".".join(map(str, cell)) or "0" for cell, _ in array_boxes.cells(box, _chunks(self.value)))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SharedTree:
    """A tree of a multi-process save."""

    tree: Node  # tree with `DistributedArray`s among its leaves
    arrays: tuple[DistributedArray, ...]  # those arrays, in the same order in all processes

    def document(self, prefix: str) -> Node:
        """Return the tree of the file, with references to arrays below ``prefix`` in place of distributed arrays."""
        return map_leaves(lambda _, leaf: _with_reference(leaf, prefix), self.tree)


def split(tree: Node, process: ProcessInfo) -> SharedTree:
    """Split the distributed arrays from a tree; raise UnsupportedLeafError if one cannot be stored as such."""
    found = {
        path: array for path, leaf in iter_leaves(tree) if (array := _distributed(path, leaf, process)) is not None
    }
    names = choose_subpaths(sorted(found), tree.children if isinstance(tree, Branch) else ())
    arrays = {path: DistributedArray(names[path], found[path], _metadata(path, found[path])) for path in sorted(found)}

    def replaced(path: Path, leaf: Any) -> Any:
        array = arrays.get(path, leaf)
        return KeyData(leaf.impl, array) if path in arrays and isinstance(leaf, KeyData) else array

    return SharedTree(map_leaves(replaced, tree), tuple(arrays.values()))


def _distributed(path: Path, leaf: Any, process: ProcessInfo) -> Any:
    """Return the leaf's array if it is not fully addressable, or None."""
    array = leaf.data if isinstance(leaf, KeyData) else leaf
    if not (isinstance(array, HostCopy) or is_jax_array(array)):
        return None
    sharding = array.sharding
    if sharding.is_fully_addressable:
        return None
    owners = {device.process_index for device in sharding.device_set}
    if len(owners) == 1 and owners != {process.index}:
        raise UnsupportedLeafError(
            f"{show_path(path)} lies wholly on the devices of process {owners.pop()}, and process {process.index} has "
            "no shard of it; shard or replicate it over the processes before saving",
            leaf=show_path(path),
        )
    return array


def _with_reference(leaf: Any, prefix: str) -> Any:
    if isinstance(leaf, KeyData):
        return KeyData(leaf.impl, _with_reference(leaf.data, prefix))
    if isinstance(leaf, DistributedArray):
        return format.PLACEHOLDER + (prefix + leaf.subpath).rstrip("/")
    return leaf


def _chunks(array: Any) -> tuple[int, ...]:
    return tuple(max(1, size) for size in array.sharding.shard_shape(tuple(array.shape)))


def _metadata(path: Path, array: Any) -> bytes:
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
    """Return the zarr metadata that TensorStore writes for the spec that jax uses."""
    tensorstore = load_tensorstore()

    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "memory"},
        "dtype": dtype,
        "metadata": {"compressor": {"id": "zstd"}, "shape": shape, "chunks": chunks},
    }
    store = tensorstore.open(spec, create=True, open=True, context=tensorstore.Context()).result()
    assert store.kvstore is not None
    return bytes(store.kvstore.read(ZARR2_METADATA).result().value)


# Bytes: the limit of most file systems for one name, and a subpath that fits into a path.
_MAX_NAME, _MAX_SUBPATH = 255, 1024
_SAFE = "arrays"


def choose_subpaths(paths: Sequence[Path], taken: Collection[str]) -> dict[Path, str]:
    """Choose a subpath for each array: its key path joined with ``/``, as in Flax, or a number if that is unsafe.

    Readers take the subpath from the file's text, so any unique one works. The key path is unsafe if it leaves the
    folder (``..``), is not a valid path, or collides with another leaf's (a key ``a/b`` beside ``a`` over ``b``;
    keys that some file systems do not distinguish, such as ``A`` and ``a``). All processes pass the paths in one order;
    ``taken`` are the names at the root of the tree."""
    safe = _SAFE
    while _folded(safe) in {_folded(name) for name in taken}:
        safe += "_"
    claimed: dict[Path, Path] = {}
    chosen = {}
    for number, path in enumerate(paths):
        plain = all(map(_is_plain, path)) and not (path and temporaries.is_generation(path[0]))
        plain = plain and len("/".join(path).encode()) <= _MAX_SUBPATH and _claim(path, claimed)
        chosen[path] = "/".join(path) if plain else f"{safe}/{number}"
    return chosen


def _is_plain(name: str) -> bool:
    """Return whether a name is the same to the file system and to TensorStore."""
    is_one = name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name) and not name.endswith(".__lock")
    return is_one and len(name.encode()) <= _MAX_NAME


def _claim(path: Path, claimed: dict[Path, Path]) -> bool:
    """Claim a path and its parents; return False if one differs only in case or form from a claimed one."""
    folded = tuple(map(_folded, path))
    parents = [(folded[:end], path[:end]) for end in range(1, len(path) + 1)]
    if any(claimed.get(key, plain) != plain for key, plain in parents):
        return False
    claimed.update(parents)
    return True


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
