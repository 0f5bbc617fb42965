"""Split the distributed arrays of a multi-process save from the tree."""

from __future__ import annotations

import collections
import dataclasses
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core.backend import ProcessInfo
from flax_ckpt_compat._core.dtypes import zarr_name
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.local import temporaries
from flax_ckpt_compat._core.orbax_layout import ZARR2_METADATA
from flax_ckpt_compat._core.tree import (
    HostCopy,
    KeyData,
    Node,
    Path,
    is_jax_array,
    iter_leaves,
    map_leaves,
    shards_of,
    show_path,
)

from . import format
from .check_tree import check_tree
from .gda_read import ZSTD_LEVEL


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DistributedArray:
    """A leaf with shards in several processes."""

    subpath: str  # path within the folder of arrays
    value: Any  # a ``jax.Array`` or `HostCopy`

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the array."""
        return cast(np.dtype[Any], self.value.dtype)

    @property
    def _chunks(self) -> array_boxes.Shape:
        shape = tuple(self.value.shape)
        return tuple(max(1, size) for size in self.value.sharding.shard_shape(shape))

    def metadata(self) -> dict[str, Any]:
        """Return its ``.zarray``, as TensorStore writes it for the spec that jax uses."""
        return {
            "chunks": self._chunks,
            "compressor": {"id": "zstd", "level": ZSTD_LEVEL},
            "dimension_separator": ".",
            "dtype": zarr_name(self.dtype),
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": tuple(self.value.shape),
            "zarr_format": 2,
        }

    def file(self, name: str) -> str:
        """Return the path of one of its files in the folder of arrays."""
        return f"{self.subpath}/{name}" if self.subpath else name

    def files(self) -> list[str]:
        """Return the paths of its metadata and of all its chunks, of which there are none without elements."""
        return [self.file(ZARR2_METADATA), *self._chunk_files(array_boxes.full_box(tuple(self.value.shape)))]

    def chunks(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield path and content of the chunks that this process writes: jax has no shards of different shapes."""
        for shard in shards_of(self.value):
            for file in self._chunk_files(shard.index):
                yield file, np.ascontiguousarray(shard.data).reshape(self._chunks)

    def _chunk_files(self, box: array_boxes.Box) -> list[str]:
        return [self.file(".".join(map(str, cell)) or "0") for cell, _ in array_boxes.cells(box, self._chunks)]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SharedTree:
    """A tree of a multi-process save."""

    tree: Node
    by_path: dict[Path, DistributedArray]  # its distributed arrays, in the same order in all processes

    @property
    def arrays(self) -> list[DistributedArray]:
        """Return the distributed arrays."""
        return list(self.by_path.values())

    def document(self, prefix: str) -> Node:
        """Return the tree of the file, with references to arrays below ``prefix`` in place of distributed arrays."""

        def replaced(path: Path, leaf: Any) -> Any:
            if (array := self.by_path.get(path)) is None:
                return leaf
            text = format.PLACEHOLDER + (prefix + array.subpath).rstrip("/")
            return KeyData(leaf.impl, text) if isinstance(leaf, KeyData) else text

        return map_leaves(replaced, self.tree)


def split(tree: Node, process: ProcessInfo) -> SharedTree:
    """Find the distributed arrays of a tree; raise UnsupportedLeafError if a msgpack file cannot hold a leaf."""
    found = {
        path: array for path, leaf in iter_leaves(tree) if (array := _distributed(path, leaf, process)) is not None
    }
    check_tree(map_leaves(lambda path, leaf: None if path in found else leaf, tree))
    names = choose_subpaths(sorted(found))
    return SharedTree(tree, {path: DistributedArray(name, found[path]) for path, name in names.items()})


def _distributed(path: Path, leaf: Any, process: ProcessInfo) -> Any:
    """Return the leaf's array if it is not fully addressable, or None."""
    array = leaf.data if isinstance(leaf, KeyData) else leaf
    if not (isinstance(array, HostCopy) or is_jax_array(array)):
        return None
    sharding = array.sharding
    if sharding.is_fully_addressable:
        return None
    owners, name = {device.process_index for device in sharding.device_set}, array.dtype.name
    if len(owners) == 1 and owners != {process.index}:
        why = f"lies wholly on the devices of process {owners.pop()}, and process {process.index} has no shard of it; "
        why += "shard or replicate it over the processes before saving"
    elif not isinstance(array.dtype, np.dtype) or zarr_name(array.dtype) is None:
        why = f"is an array of several processes, of which a msgpack checkpoint cannot hold the dtype {name}; "
        why += "convert it, or save in Orbax's format"
    else:
        return array
    raise UnsupportedLeafError(f"{show_path(path)} {why}", leaf=show_path(path))


# Characters: as UTF-8, fewer bytes than most file systems take for one name, and for a path.
_MAX_SUBPATH = 256
_PLAIN_NAME = re.compile(r"(?!\.{1,2}\Z)[^/\\\0]{1,63}(?<!\.__lock)")  # TensorStore takes some for its locks
_NUMBERED = "arrays"  # folder of those with a number for a name


def choose_subpaths(paths: Sequence[Path]) -> dict[Path, str]:
    """Choose a subpath for each array: its key path joined with ``/``, as in Flax, or a number if that is unsafe.

    Readers take the subpath from the file's text, so any unique one works. Paths that differ only by what some file
    systems do not distinguish, such as ``A`` and ``a``, are unsafe. All processes pass the paths in one order."""
    alike = collections.Counter(map(_folded, {path[:end] for path in paths for end in range(1, len(path) + 1)}))

    def is_safe(path: Path) -> bool:
        return _is_plain(path) and all(alike[_folded(path[:end])] == 1 for end in range(1, len(path) + 1))

    return {path: "/".join(path) if is_safe(path) else f"{_NUMBERED}/{number}" for number, path in enumerate(paths)}


def _is_plain(path: Path) -> bool:
    """Return whether a key path is the same to the file system and to TensorStore."""
    is_reserved = bool(path) and (temporaries.is_generation(path[0]) or _folded(path)[0] == _NUMBERED)
    return not is_reserved and len("/".join(path)) <= _MAX_SUBPATH and all(map(_PLAIN_NAME.fullmatch, path))


def _folded(path: Path) -> Path:
    return tuple([unicodedata.normalize("NFC", name).casefold() for name in path])
