"""Write a multi-process save: a msgpack file, and its folder of arrays on a local disk or in a store.

The distributed arrays are split from the tree, and each process writes the chunks of which it has the shards.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import zstandard

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core.backend import ProcessInfo, ProcessSave
from flax_ckpt_compat._core.dtypes import zarr_name
from flax_ckpt_compat._core.errors import StorageError, UnsupportedLeafError, translated
from flax_ckpt_compat._core.local import gda_folder, presence, temporaries
from flax_ckpt_compat._core.local.syncing import sync_descriptor, sync_directory
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_METADATA
from flax_ckpt_compat._core.thread_pools import in_parallel
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
from .encode import check_tree, write_tree
from .gda_read import ZSTD_LEVEL, with_sum

# Syncing and requests mostly wait.
_THREADS = 16
# Characters: as UTF-8, fewer bytes than most file systems take for one name, and for a path.
_MAX_SUBPATH = 256
_PLAIN_NAME = re.compile(r"(?!\.{1,2}\Z)[^/\\\0]{1,63}(?<!\.__lock)")  # TensorStore takes some for its locks
_NUMBERED = "arrays"  # folder of those with a number for a name


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DistributedArray:
    """A leaf with shards in several processes."""

    subpath: str  # path within the folder of arrays
    value: Any  # a ``jax.Array`` or `HostCopy`

    @property
    def _chunk_shape(self) -> array_boxes.Shape:
        return tuple(max(1, size) for size in self.value.sharding.shard_shape(tuple(self.value.shape)))

    def metadata(self) -> dict[str, Any]:
        """Return its ``.zarray``, as TensorStore writes it for the spec that jax uses."""
        return {
            "chunks": self._chunk_shape,
            "compressor": {"id": "zstd", "level": ZSTD_LEVEL},
            "dimension_separator": ".",
            "dtype": zarr_name(self.value.dtype),
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": tuple(self.value.shape),
            "zarr_format": 2,
        }

    def files(self) -> list[str]:
        """Return the paths of its metadata and of all its chunks, of which there are none without elements."""
        whole = array_boxes.full_box(tuple(self.value.shape))
        return [os.path.join(self.subpath, ZARR2_METADATA), *self._chunk_files(whole)]

    def chunks(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield path and content of the chunks that this process writes: jax has no shards of different shapes."""
        for shard in shards_of(self.value):
            for file in self._chunk_files(shard.index):
                yield file, np.ascontiguousarray(shard.data).reshape(self._chunk_shape)

    def _chunk_files(self, box: array_boxes.Box) -> list[str]:
        names = [".".join(map(str, cell)) or "0" for cell, _ in array_boxes.cells(box, self._chunk_shape)]
        return [os.path.join(self.subpath, name) for name in names]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SharedTree:
    """A tree of a multi-process save."""

    tree: Node
    arrays: dict[Path, DistributedArray]  # by key path, in the same order in all processes

    def document(self, prefix: str) -> Node:
        """Return the tree of the file, with references to arrays below ``prefix`` in place of distributed arrays."""

        def replaced(path: Path, leaf: Any) -> Any:
            if (array := self.arrays.get(path)) is None:
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


def choose_subpaths(paths: Sequence[Path]) -> dict[Path, str]:
    """Choose a subpath for each array: its key path joined with ``/``, as in Flax, or a number if that is unsafe.

    Readers take the subpath from the file's text, so any unique one works. Paths that differ only by what some file
    systems do not distinguish, such as ``A`` and ``a``, are unsafe. All processes pass the paths in one order."""
    alike = collections.Counter(map(_folded, {path[:end] for path in paths for end in range(1, len(path) + 1)}))

    def is_safe(path: Path) -> bool:
        is_reserved = bool(path) and (temporaries.is_generation(path[0]) or _folded(path)[0] == _NUMBERED)
        is_plain = len("/".join(path)) <= _MAX_SUBPATH and all(map(_PLAIN_NAME.fullmatch, path))
        return is_plain and not is_reserved and all(alike[_folded(path[:end])] == 1 for end in range(1, len(path) + 1))

    return {path: "/".join(path) if is_safe(path) else f"{_NUMBERED}/{number}" for number, path in enumerate(paths)}


def _folded(path: Path) -> Path:
    return tuple([unicodedata.normalize("NFC", name).casefold() for name in path])


def begin(save: ProcessSave) -> None:
    """Create the folder of arrays and their metadata, if there are arrays; see `Backend.begin_multiprocess`."""
    arrays: Collection[DistributedArray] = save.prepared.arrays.values()
    if not arrays:
        return
    if save.upload is None:
        gda_folder.begin(save.path)

    def write(array: DistributedArray) -> None:
        if save.upload is None:
            os.makedirs(os.path.join(gda_folder.folder_of(save.path), _prefix(save), array.subpath), exist_ok=True)
        fields = array.metadata()
        text = json.dumps(with_sum(fields) if save.options.checksums else fields)
        _write_file(save, os.path.join(array.subpath, ZARR2_METADATA), text.encode())

    in_parallel(write, arrays, _THREADS)


def write_process_part(save: ProcessSave) -> None:
    """Write this process's shards, and in process 0 the file, which is local also for a save to a store."""
    # Their end is waited for: none may continue into a folder that is about to be removed.
    in_parallel(lambda array: _write_chunks(save, array), save.prepared.arrays.values(), _THREADS)
    if save.process.index == 0:
        write_tree(save.path, save.prepared.document(_prefix(save)), save.options)


def finish(save: ProcessSave) -> None:
    """Check that all chunks exist; sync all names, or write the commit file of ``gs://``."""
    arrays, upload, prefix = save.prepared.arrays.values(), save.upload, _prefix(save)
    if not arrays:
        return
    folder = gda_folder.folder_of(save.path) if upload is None else upload.folder
    there = set(Location(folder).files_below() if upload is None else upload.written())
    lost = [file for array in arrays for file in array.files() if prefix + file not in there]
    if upload is None:  # on network file systems a listing may be stale
        lost = [file for file in lost if not presence.isfile(os.path.join(folder, prefix, file))]
    if lost:
        shown = ", ".join([*lost[:3], *(["…"] if len(lost) > 3 else [])])
        message = f"{folder}: {len(lost)} files of arrays were not written ({shown}); do all processes save the same "
        raise StorageError(message + "tree, and into a directory that they share?", path=folder)
    if upload is None:
        in_parallel(sync_directory, [inner for inner, _, _ in os.walk(folder)], _THREADS)
    elif upload.client.needs_commit_file:  # real Flax and jax look for the file before they read arrays
        upload.write(COMMIT_FILE, f"Checkpoint commit was successful to {upload.folder}".encode())


def _prefix(save: ProcessSave) -> str:
    """Return what precedes the arrays' subpaths in the folder, and in references to them."""
    return gda_folder.generation_prefix(save.path) if save.upload is None else f"{save.upload.tag}/"


def _write_chunks(save: ProcessSave, array: DistributedArray) -> None:
    """Encode and write this process's chunks of an array, one after another, so that few are in memory at once."""
    for name, chunk in array.chunks():
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=save.options.checksums)
        _write_file(save, name, compressor.compress(chunk.reshape(-1).view(np.uint8).data))
        save.options.meter.add(chunk.nbytes, array.subpath)


def _write_file(save: ProcessSave, name: str, data: bytes) -> None:
    """Write a file of an array, and sync it; `finish` syncs its name."""
    if save.upload is not None:
        save.upload.write(_prefix(save) + name, data)
        return
    path = os.path.join(gda_folder.folder_of(save.path), _prefix(save), name)
    with translated(path, "written"), open(path, "xb") as file:
        file.write(data)
        file.flush()
        sync_descriptor(file.fileno(), path)
