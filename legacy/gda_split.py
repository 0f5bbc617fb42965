"""Split the distributed arrays of a multi-process save from the tree."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core.backend import ProcessInfo
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.load_tensorstore import load_tensorstore
from flax_ckpt_compat._core.local import temporaries
from flax_ckpt_compat._core.orbax_layout import ZARR2_METADATA
from flax_ckpt_compat._core.tree import (
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
    names = choose_subpaths(sorted(found))
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
_NUMBERED = "arrays"  # folder of those with a number for a name


def choose_subpaths(paths: Sequence[Path]) -> dict[Path, str]:
    """Choose a subpath for each array: its key path joined with ``/``, as in Flax, or a number if that is unsafe.

    Readers take the subpath from the file's text, so any unique one works. A key path is unsafe if it leaves the
    folder (``..``), is not a valid path, or differs from another one only by what some file systems do not distinguish,
    such as ``A`` and ``a``. All processes pass the paths in one order."""
    alike = collections.Counter(map(_folded, {path[:end] for path in paths for end in range(1, len(path) + 1)}))

    def is_safe(path: Path) -> bool:
        return _is_plain(path) and all(alike[_folded(path[:end])] == 1 for end in range(1, len(path) + 1))

    return {path: "/".join(path) if is_safe(path) else f"{_NUMBERED}/{number}" for number, path in enumerate(paths)}


def _is_plain(path: Path) -> bool:
    """Return whether a key path is the same to the file system and to TensorStore."""
    if path and (temporaries.is_generation(path[0]) or _folded(path)[0] == _NUMBERED):
        return False
    if len("/".join(path).encode()) > _MAX_SUBPATH:
        return False
    return not any(
        name in ("", ".", "..")
        or {"/", "\\", "\0"} & set(name)
        or name.endswith(".__lock")
        or len(name.encode()) > _MAX_NAME
        for name in path
    )


def _folded(path: Path) -> Path:
    return tuple([unicodedata.normalize("NFC", name).casefold() for name in path])
