"""Writes a planned tree as a flat Orbax PyTree directory."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorstore as ts

from flax_ckpt_compat._core.backend import WriteOptions
from flax_ckpt_compat._core.errors import SettingError, StorageError
from flax_ckpt_compat._core.memory import collection_paused
from flax_ckpt_compat._core.tree import Shard

from . import metadata
from .files import make_directory, sync_directory, write_file, write_json
from .leaves import Stored
from .names import key_prefix
from .plan import Plan
from .zarr import dump_zarray

_COMPRESSORS: dict[str, dict[str, Any]] = {
    "zstd": {"id": "zstd", "level": 1},  # what Orbax 0.12.8 writes
    "gzip": {"id": "gzip", "level": 1},
    "zlib": {"id": "zlib", "level": 1},
    "blosc": {"id": "blosc", "blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": -1},
}
# Orbax 0.12.8's settings of the database, as its manifests record them (measured).
_DATABASE = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
    "compression": {"id": "zstd"},
    "version_tree_arity_log2": 4,
}
# Several data files let the driver write and sync them at the same time; 64 MiB was the fastest measured.
_DATA_FILE_BYTES = 64 << 20
_FILE_THREADS = 8
# Below this one key-value write is cheaper than opening the zarr driver, which writes without a copy.
_DRIVER_FROM_BYTES = 64 << 10
# Values up to this size lie inline in the B-tree, whose nodes are compressed anyway.
_COMPRESS_FROM_BYTES = 1025
_OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")


def write_plan(path: str, plan: Plan, options: WriteOptions) -> None:
    """Creates the directory ``path`` with the whole checkpoint in it, synced to disk.

    Raises:
        SettingError: an unknown compression.
        StorageError: the file system refused.
    """
    compressor = _compressor(options.compression)
    started_ns = time.time_ns()
    make_directory(path)
    database = _begin_arrays(path, metadata.arrays(plan), compressor)
    try:
        _write_json_files(path, plan, compressor is not None)
    finally:
        _end_arrays(path, database)  # TensorStore was writing in its own threads meanwhile
    write_json(os.path.join(path, metadata.STEP_METADATA), metadata.step_metadata(started_ns))
    sync_directory(path)
    # Last, because it says that everything else is there.
    write_file(os.path.join(path, metadata.COMMITTED), b"Checkpoint commit was successful")
    sync_directory(path)


def _compressor(name: str | None) -> dict[str, Any] | None:
    if name is None:
        return None
    if name not in _COMPRESSORS:
        raise SettingError(f"compression={name!r} is unknown; expected None or one of {sorted(_COMPRESSORS)}")
    return _COMPRESSORS[name]


def _write_json_files(path: str, plan: Plan, compressed: bool) -> None:
    with collection_paused():
        array_metadatas = metadata.array_metadatas(plan, compressed)
        shardings, tree = metadata.shardings(plan), metadata.tree_metadata(plan)
    if array_metadatas["array_metadatas"]:
        directory = os.path.join(path, metadata.ARRAY_METADATAS)
        make_directory(directory)
        write_json(os.path.join(directory, "process_0"), array_metadatas)
        sync_directory(directory)
        write_json(os.path.join(path, metadata.SHARDING), shardings)
    if plan.strings:
        write_json(os.path.join(path, metadata.STRINGS), plan.strings)
    write_json(os.path.join(path, metadata.METADATA), tree)


def _begin_arrays(path: str, arrays: list[tuple[str, Stored]], compressor: dict[str, Any] | None) -> _Database | None:
    """All arrays in one transaction on one new database, whose commit is under way; None without arrays."""
    if not arrays:
        return None
    _begin_transfers(arrays)
    with _storage_errors(path):
        database = _Database(path)
        for name, stored in arrays:
            database.put(name, stored, compressor)
        database.begin_commit()
    return database


def _end_arrays(path: str, database: _Database | None) -> None:
    if database is not None:
        with _storage_errors(path):
            database.end_commit()
        sync_directory(os.path.join(path, "d"))


def _begin_transfers(arrays: list[tuple[str, Stored]]) -> None:
    """Starts all copies from accelerators; on the CPU there is nothing to copy, and asking takes its time."""
    jax = sys.modules.get("jax")
    if jax is None or jax.default_backend() == "cpu":
        return
    for _, stored in arrays:
        if hasattr(stored.source, "copy_to_host_async"):
            stored.source.copy_to_host_async()


@contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise StorageError(
            f"the arrays of {path} could not be written: {error}; check the disk's space and permissions",
            path=path,
            errno=_errno(error),
        ) from error


def _errno(error: Exception) -> int | None:
    """The system's error number, which TensorStore only tells in its text."""
    found = _OS_ERROR_CODE.search(str(error))
    return int(found[1]) if found else None


class _Database:
    """A new OCDBT database that takes arrays and commits them together."""

    def __init__(self, path: str) -> None:
        self._spec = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": os.path.join(path, "")},
            "config": _DATABASE,
            "assume_config": True,
            "target_data_file_size": _DATA_FILE_BYTES,
        }
        # Without a cache: nodes are cached by path, and this path will be another directory's one day.
        self._context = ts.Context(
            {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": _FILE_THREADS}}
        )
        self._transaction = ts.Transaction(atomic=True)
        store = ts.KvStore.open(self._spec, context=self._context).result()
        self._store = store.with_transaction(self._transaction)
        self._pending: list[tuple[Any, Any]] = []
        self._committed: Any = None

    def put(self, name: str, stored: Stored, compressor: dict[str, Any] | None) -> None:
        """Adds one array; its memory must not change before the commit has ended."""
        if stored.part == stored.shape:
            array = stored.whole()
            if array.nbytes < (_DRIVER_FROM_BYTES if compressor is None else _COMPRESS_FROM_BYTES):
                self._put_small(name, stored, array)
                return
        shards = stored.shards()
        largest = max((shard.data.nbytes for shard in shards), default=0)
        used = compressor if largest >= _COMPRESS_FROM_BYTES else None
        if used is not None or largest >= _DRIVER_FROM_BYTES:
            self._put_by_driver(name, stored, shards, used)
            return
        prefix = key_prefix(name)
        self._store[prefix + ".zarray"] = _zarray(stored.shape, stored.part, stored.dtype)
        for shard in shards if largest else ():
            cell = [str(side.start // length) for side, length in zip(shard.index, stored.part, strict=True)]
            self._store[prefix + (".".join(cell) or "0")] = shard.data.tobytes()

    def _put_small(self, name: str, stored: Stored, array: np.ndarray[Any, Any]) -> None:
        prefix = key_prefix(name)
        self._store[prefix + ".zarray"] = _zarray(stored.shape, stored.shape, stored.dtype)
        if array.nbytes:
            self._store[prefix + (".".join("0" * array.ndim) or "0")] = array.tobytes()

    def _put_by_driver(self, name: str, stored: Stored, shards: list[Shard], compressor: dict[str, Any] | None) -> None:
        spec = {
            "driver": "zarr",
            "kvstore": {**self._spec, "path": key_prefix(name)},
            "metadata": dump_zarray(stored.shape, stored.part, stored.dtype, compressor),
            "create": True,
            # A reader cannot tell a chunk of zeros that was left out from one that was lost.
            "store_data_equal_to_fill_value": True,
        }
        opened = ts.open(spec, transaction=self._transaction, context=self._context)
        self._pending.append((opened, shards))

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
        self._committed.result()


def _native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """TensorStore takes the machine's byte order, and swaps to a foreign one itself."""
    return array if array.dtype.isnative else array.byteswap().view(array.dtype.newbyteorder())


@functools.lru_cache(maxsize=4096)
def _zarray(shape: tuple[int, ...], part: tuple[int, ...], dtype: Any) -> bytes:
    return json.dumps(dump_zarray(shape, part, dtype, None), separators=(",", ":")).encode()
