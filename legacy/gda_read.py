"""Arrays of several processes: a folder beside the file, one plain zarr v2 array per leaf.

Every release of Flax writes them with zstd and the fill value null, which makes TensorStore store all
chunks, also those of zeros (measured); so a chunk that is not there was lost.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from flax_ckpt_compat._core import dtypes, memory, paths
from flax_ckpt_compat._core.errors import CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.object_store import store_errors
from flax_ckpt_compat._core.tree import Path, show_path

_SUFFIX = "_gda"
# Of arrays that are read at once.
_IN_FLIGHT = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class FolderArray:
    """An array in a zarr folder.

    Attributes:
        checkpoint: the msgpack file that refers to it.
        folder: the zarr folder.
        shape: of the array.
        dtype: of the array, in native byte order.
        index: the box of it that is to be read, or None for all.
    """

    checkpoint: str
    folder: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    index: tuple[slice, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def locate(checkpoint: str, subpath: str, path: Path) -> FolderArray:
    """Finds the array that a placeholder names and reads its ``.zarray``.

    Args:
        checkpoint: path of the msgpack file.
        subpath: what stands behind the placeholder's prefix; empty for a checkpoint that is one array.
        path: key path of the leaf, for errors.

    Raises:
        CorruptCheckpointError: it leads out of the folder, is absent, or does not decode.
    """
    if subpath.startswith("/") or "\0" in subpath or ".." in subpath.split("/"):
        raise _corrupt(checkpoint, path, f"a reference {subpath!r} that leads out of the folder of arrays")
    folder = os.path.join(checkpoint + _SUFFIX, subpath) if subpath else checkpoint + _SUFFIX
    try:
        text = paths.read(f"{folder}/.zarray", 2**20)
    except (FileNotFoundError, NotADirectoryError) as error:
        found = f"no array {folder}; it was not copied along with the checkpoint"
        raise _corrupt(checkpoint, path, found) from error
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read: {error.strerror}", path=folder, errno=error.errno) from error
    try:
        return _described(checkpoint, folder, json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _corrupt(checkpoint, path, f"{folder}/.zarray that does not decode ({error})") from error


def _described(checkpoint: str, folder: str, fields: Any) -> FolderArray:
    shape = fields["shape"]
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is not a shape")
    dtype = dtypes.dtype_from_name(fields["dtype"]).newbyteorder("=")
    return FolderArray(checkpoint, folder, tuple(shape), dtype)


class Reads:
    """Reads of arrays and of boxes of them that go on at the same time; each array is opened once."""

    def __init__(self) -> None:
        self._stores: dict[str, Any] = {}
        self._waiting: list[tuple[FolderArray, Path, Any]] = []
        self._bytes = 0

    def begin(self, array: FolderArray, path: Path) -> np.ndarray[Any, Any]:
        """Fresh memory, which has the values of the array, or of the box of it, once `finish` has returned.

        Raises:
            CorruptCheckpointError: it does not open, or one begun before cannot be read.
        """
        import tensorstore

        with _translated(array, path):
            store = self._stores.get(array.folder)
            if store is None:
                store = self._stores[array.folder] = _open(tensorstore, array)
            if array.index is not None:
                store = store[array.index][tensorstore.d[:].translate_to[0]]
            result = memory.empty(tuple(store.shape), array.dtype)
            self._waiting.append((array, path, tensorstore.array(result).write(store)))
        self._bytes += result.nbytes
        if self._bytes > _IN_FLIGHT:
            self.finish()
        return result

    def finish(self) -> None:
        """Waits for all.

        Raises:
            CorruptCheckpointError: chunks are missing or do not decode.
        """
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        for array, path, read in waiting:
            with _translated(array, path):
                read.result()


def _open(tensorstore: Any, array: FolderArray) -> Any:
    where = paths.tensorstore_folder(array.folder)
    spec = {"driver": "zarr", "kvstore": where, "fill_missing_data_reads": False}
    store = tensorstore.open(spec, open=True, read=True, context=paths.tensorstore_context(array.folder)).result()
    _check_unchanged(array, store.shape, store.dtype.numpy_dtype)
    return store


@contextmanager
def _translated(array: FolderArray, path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        if paths.is_url(array.folder) and store_errors.is_refusal(error):
            raise store_errors.refused(array.folder, "read", error) from error
        raise _corrupt(array.checkpoint, path, f"an array in {array.folder} that cannot be read ({error})") from error


def _check_unchanged(array: FolderArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if shape != array.shape or dtype != array.dtype:
        raise ValueError(f"it is now {dtype}{shape}, it was {array.dtype}{array.shape}")


def _corrupt(checkpoint: str, path: Path, found: str) -> CorruptCheckpointError:
    leaf = show_path(path)
    message = f"{checkpoint}: {leaf}: expected an array of several processes in {checkpoint}{_SUFFIX}, found {found}"
    return CorruptCheckpointError(
        f"{message}; copy that folder anew from where it was saved", path=checkpoint, leaf=leaf
    )
