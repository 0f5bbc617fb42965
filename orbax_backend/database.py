"""A new OCDBT database that takes arrays, or the shards of them that one process holds, and commits them together."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import tensorstore as ts

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local.syncing import start_writeback
from flax_ckpt_compat._core.object_store import client, specs
from flax_ckpt_compat._core.orbax_layout import DATA_DIRECTORY, PROCESS_PREFIX, ZARR2_METADATA
from flax_ckpt_compat._core.tree import Shard

from .encode import Stored
from .sources import wait
from .stored_names import key_prefix
from .zarr import dump_zarray

# Orbax 0.12.8's settings of the database, as its manifests record them (measured).
_DATABASE = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
    "compression": {"id": "zstd", "level": 1},  # of the nodes; the default level takes twice the time
    "version_tree_arity_log2": 4,
}
# Several data files let the driver write and sync them at the same time; 64 MiB was the fastest measured.
_DATA_FILE_BYTES = 64 << 20
_FILE_THREADS = 8
# Below this one key-value write is cheaper than opening the zarr driver, which writes without a copy.
_DRIVER_FROM_BYTES = 64 << 10
# Values up to this size lie inline in the B-tree, whose nodes are compressed anyway.
_COMPRESS_FROM_BYTES = 1025
# As much as one process's index may have, for how long to wait for a store.
_INDEX_BYTES = 256 << 20
_OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")


class Database:
    """A new database, on which all is one transaction."""

    def __init__(self, path: str, url: str | None = None) -> None:
        """Begins it.

        Args:
            path: of its directory.
            url: of the folder of a store that has the databases that it takes over; None where they are in ``path``.
        """
        self._path, self._url = path, url
        self._spec = {
            "driver": "ocdbt",
            "base": self._base(),
            "config": _DATABASE,
            "assume_config": True,
            "target_data_file_size": _DATA_FILE_BYTES,
        }
        # Without a cache: nodes are cached by path, and this path will be another directory's one day.
        self._context = ts.Context(
            {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": _FILE_THREADS}},
            parent=None if url is None else specs.context(),
        )
        self._transaction = ts.Transaction(atomic=True)
        store = ts.KvStore.open(self._spec, context=self._context).result()
        self._store = store.with_transaction(self._transaction)
        self._pending: list[tuple[Any, Any]] = []
        self._committed: Any = None

    def _base(self, inside: str = "") -> dict[str, Any]:
        if self._url is not None:
            return layered(self._path, self._url, inside)
        return paths.local_kvstore(os.path.join(self._path, inside, ""))

    def put(self, name: str, stored: Stored, compressor: dict[str, Any] | None, leads: bool = True) -> None:
        """Adds one array; its memory must not change before the commit has ended.

        Args:
            name: that it is stored under.
            stored: of an array that is spread over processes, only the shards that this one holds are added.
            compressor: of large arrays.
            leads: also adds the array's metadata, which one process does.
        """
        if stored.part == stored.shape and not stored.spread:
            array = stored.whole()
            if array.nbytes < (_DRIVER_FROM_BYTES if compressor is None else _COMPRESS_FROM_BYTES):
                self._put_small(name, stored, array)
                return
        # Not the largest shard here: processes without any must decide as the others do.
        nbytes = math.prod(stored.part) * stored.dtype.itemsize
        used = compressor if nbytes >= _COMPRESS_FROM_BYTES else None
        shards = stored.shards() if nbytes else []
        if used is not None or nbytes >= _DRIVER_FROM_BYTES:
            self._put_by_driver(name, stored, shards, used, leads)
            return
        prefix = key_prefix(name)
        if leads:
            self._store[prefix + ZARR2_METADATA] = _zarray(stored.shape, stored.part, stored.dtype)
        for shard in shards:
            cell = [str(side.start // length) for side, length in zip(shard.index, stored.part, strict=True)]
            self._store[prefix + (".".join(cell) or "0")] = shard.data.tobytes()

    def _put_small(self, name: str, stored: Stored, array: np.ndarray[Any, Any]) -> None:
        prefix = key_prefix(name)
        self._store[prefix + ZARR2_METADATA] = _zarray(stored.shape, stored.shape, stored.dtype)
        if array.nbytes:
            self._store[prefix + (".".join("0" * array.ndim) or "0")] = array.tobytes()

    def _put_by_driver(
        self, name: str, stored: Stored, shards: list[Shard], compressor: dict[str, Any] | None, leads: bool
    ) -> None:
        if not leads and not shards:
            return
        spec = {
            "driver": "zarr",
            "kvstore": {**self._spec, "path": key_prefix(name)},
            "metadata": dump_zarray(stored.shape, stored.part, stored.dtype, compressor),
            # A reader cannot tell a chunk of zeros that was left out from one that was lost.
            "store_data_equal_to_fill_value": True,
            **({"create": True} if leads else {"open": True, "assume_metadata": True}),
        }
        opened = ts.open(spec, transaction=self._transaction, context=self._context)
        self._pending.append((opened, shards))

    def take_over(self, names: Sequence[str]) -> None:
        """Adds references to all values of these databases, which lie in this one's directory and have ended."""
        children = {name: {"driver": "ocdbt", "base": self._base(name)} for name in names}
        opened = {name: ts.KvStore.open(spec, context=self._context) for name, spec in children.items()}
        for name, child in opened.items():
            where = os.path.join(self._url or self._path, name)
            with storage_errors(where, "merged with those of the other processes"):
                store = wait(where, child)
                wait(where, store.experimental_copy_range_to(self._store), _INDEX_BYTES)

    def begin_commit(self) -> None:
        """Hands everything to TensorStore, which goes on by itself."""
        copies = []
        for opened, shards in self._pending:
            array = opened.result()
            for shard in shards:
                written = array[shard.index].write(_native(shard.data), can_reference_source_data_indefinitely=True)
                copies.append(written.copy)
        for copied in copies:
            copied.result()
        self._committed = self._transaction.commit_async()

    def end_commit(self) -> None:
        """Waits until everything is written and synced."""
        Writeback(os.path.join(self._path, DATA_DIRECTORY)).until_done(self._committed)


@contextmanager
def storage_errors(path: str, doing: str = "written") -> Iterator[None]:
    """Translates TensorStore's errors about the arrays in ``path``; ``doing`` completes "could not be …"."""
    try:
        yield
    except StorageError:
        raise
    except (ValueError, OSError) as error:
        remedy = "check the disk's space and permissions"
        if paths.is_url(path):
            remedy = "nothing else may change what is there while it is saved; save it again"
        raise StorageError(
            f"the arrays of {path} could not be {doing}: {error}; {remedy}",
            path=path,
            errno=_errno(error),
        ) from error


def _errno(error: Exception) -> int | None:
    """The system's error number, which TensorStore only tells in its text."""
    found = _OS_ERROR_CODE.search(str(error))
    return int(found[1]) if found else None


def _native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """TensorStore takes the machine's byte order, and swaps to a foreign one itself."""
    return array if array.dtype.isnative else array.byteswap().view(array.dtype.newbyteorder())


@functools.lru_cache(maxsize=4096)
def _zarray(shape: tuple[int, ...], part: tuple[int, ...], dtype: Any) -> bytes:
    return json.dumps(dump_zarray(shape, part, dtype, None), separators=(",", ":")).encode()


def layered(local: str, url: str, inside: str = "") -> dict[str, Any]:
    """A directory that has the databases of single processes from a store, and all else on the local disk.

    Args:
        local: path of the directory that is to be uploaded.
        url: of the folder in the store.
        inside: name of a directory in it, instead of all.
    """
    stored = client.spec(url)
    return {
        "driver": "kvstack",
        "layers": [
            {"base": paths.local_kvstore(f"{local}/")},
            {"base": {**stored, "path": stored["path"] + PROCESS_PREFIX}, "prefix": PROCESS_PREFIX},
        ],
        "path": inside and f"{inside}/",
    }


def locator(local: str, url: str) -> Callable[[str], str]:
    """Return what finds a file of that directory; see `layered`."""
    return lambda file: f"{url}/{file}" if file.startswith(PROCESS_PREFIX) else os.path.join(local, file)


_EVERY = 0.01  # seconds
_LEAST = 8 << 20


class Writeback:
    """Follows the files in a directory as they grow; only hints, so that nothing depends on it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        # What was handed over, by inode: files get their names at the end.
        self._begun: dict[int, int] = {}

    def until_done(self, future: Any) -> None:
        """Waits for TensorStore's future, and raises what it raises."""
        while not future.done():
            with suppress(TimeoutError):
                future.exception(timeout=_EVERY)
            with suppress(OSError):
                self._go_on()
        future.result()

    def _go_on(self) -> None:
        with os.scandir(self._directory) as entries:
            for entry in entries:
                size, begun = entry.stat().st_size, self._begun.get(entry.inode(), 0)
                if size - begun >= _LEAST:
                    self._begin(entry.path, begun, size)
                    self._begun[entry.inode()] = size

    def _begin(self, path: str, start: int, stop: int) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            start_writeback(descriptor, start, stop - start)
        finally:
            os.close(descriptor)
