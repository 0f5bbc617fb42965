"""Write arrays, or one process's shards of them, to a new OCDBT database.

Arrays in memory are written in one transaction; what another checkpoint holds is written in several, as it is read.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import tensorstore as ts

from flax_ckpt_compat._core import array_boxes, checksums, memory, thread_pools
from flax_ckpt_compat._core.local.syncing import can_sync, start_writeback
from flax_ckpt_compat._core.location import LOCAL, Location
from flax_ckpt_compat._core.orbax_layout import DATA_DIRECTORY, PROCESS_PREFIX, key_prefix
from flax_ckpt_compat._core.storage_errors import TENSORSTORE_ERRORS, translated
from flax_ckpt_compat._core.tree import Shard, is_jax_array

from .checksum_recording import Recorder
from .encode_leaves import EncodedLeaf, all_of
from .zarr import CHECKSUM_NBYTES, ArrayInfo, Encoding, dump_metadata, parse_array_metadata

# Values up to this size lie inline in the B-tree, whose nodes are compressed and have checksums anyway.
_INLINE_BYTES = 1024
# Nodes of a merged index, decoded: TensorStore's default, of which its caches hold many.
_MERGED_NODE_BYTES = 8 << 20
# Orbax 0.12.8's settings of the database, as its manifests record them (measured).
_DATABASE = {
    "max_inline_value_bytes": _INLINE_BYTES,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
    "compression": {"id": "zstd", "level": 1},  # for nodes; the default level takes twice the time
    "version_tree_arity_log2": 4,
}
# Several data files let the driver write and sync them at the same time; 64 MiB was the fastest measured.
_DATA_FILE_BYTES = 64 << 20
_FILE_THREADS = 8
# Below this one key-value write is cheaper than opening the zarr driver, which writes without a copy.
_DRIVER_FROM_BYTES = 64 << 10
_COMPRESS_FROM_BYTES = _INLINE_BYTES + 1
# Upper bound of one process's index, for the timeout of a store.
_INDEX_BYTES = 256 << 20
# What is read while it is written is committed in parts of this size, while the next part is read.
_BATCH_BYTES = 16 << 20
_POLL_SECONDS = 0.004
_WRITEBACK_FROM_BYTES = 8 << 20


class Database:
    """A new OCDBT database."""

    def __init__(
        self, path: str, store: Location | None = None, recorder: Recorder | None = None, *, merges: bool = False
    ) -> None:
        """Open the database in the directory ``path``, and a transaction.

        With ``merges``, others are merged into it, which lie in the same directory or in a folder of a ``store``.
        ``recorder`` records the checksums of chunks that have none of their own."""
        self._path, self._store_folder, self._recorder = path, store, recorder
        self._spec = {
            "driver": "ocdbt",
            "base": self._base(),
            "config": _DATABASE if not merges else {**_DATABASE, "max_decoded_node_bytes": _MERGED_NODE_BYTES},
            "assume_config": True,
            "target_data_file_size": _DATA_FILE_BYTES,
        }
        # No cache: nodes are cached by path, and another directory may have this path later.
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "file_io_concurrency": {"limit": _FILE_THREADS},
                # It also syncs directories, and fails where that is impossible; `writer.sync_database` does it then.
                "file_io_sync": can_sync(path),
            },
            parent=None if store is None else store.context(),
        )
        self._database = ts.KvStore.open(self._spec, context=self._context).result()
        self._begin()
        # Bytes of arrays in the transaction, and in the one that is being committed.
        self._staged = self._committing = 0
        self._committed: Any = None
        self._known_keys: dict[Any, list[str]] = {}

    def _begin(self) -> None:
        self._transaction = ts.Transaction(atomic=True)
        self._store = self._database.with_transaction(self._transaction)
        self._pending: list[tuple[Any, list[Shard], bool]] = []

    def make_room(self, nbytes: int) -> None:
        """Commit what is there, so that little memory is held besides an array of ``nbytes`` that is read next."""
        if self._staged and self._staged + nbytes > _BATCH_BYTES:
            self.start_commit()
            self._committing, self._staged = self._staged, 0
            self._begin()
        if self._committing and self._committing + nbytes > 2 * _BATCH_BYTES:
            self.finish_commit()
        self._staged += nbytes

    def _base(self, inside: str = "") -> dict[str, Any]:
        if self._store_folder is not None:
            return stacked_spec(self._path, self._store_folder, inside)
        return LOCAL.kvstore(os.path.join(self._path, inside))

    def put(self, name: str, stored: EncodedLeaf, encoding: Encoding, is_primary: bool = True) -> None:
        """Add one array; its memory must not change before the commit has finished.

        Of an array that is spread over processes, only the shards of this process are added. Large arrays are
        compressed; the primary process also writes the metadata.
        """
        needs_driver, whole = encoding.checksums and checksums.crc32c is None, None
        if stored.write_shape == stored.shape and not stored.spans_processes and not needs_driver:
            whole = stored.whole()
            if whole.nbytes < (_DRIVER_FROM_BYTES if encoding.codec is None else _COMPRESS_FROM_BYTES):
                self._put_small(name, stored, whole, encoding)
                return
        # Not the largest local shard: processes without any must decide as the others do.
        nbytes = math.prod(stored.write_shape) * stored.dtype.itemsize
        if encoding.codec is not None and nbytes < _COMPRESS_FROM_BYTES:
            encoding = Encoding(checksums=encoding.checksums)
        shards = ([all_of(whole)] if whole is not None else stored.shards()) if nbytes else []
        if encoding.codec is not None or nbytes >= _DRIVER_FROM_BYTES or needs_driver:
            self._put_by_driver(name, stored, shards, encoding, is_primary)
            return
        prefix, (text, info) = key_prefix(name), _metadata(stored.shape, stored.write_shape, stored.dtype, encoding)
        if is_primary:
            self._store[prefix + encoding.metadata_file] = text
        for key, shard in zip(self._chunk_keys(stored, info, shards), shards, strict=True):
            self._put_chunk(prefix + key, shard.data, encoding)

    def _chunk_keys(self, stored: EncodedLeaf, info: ArrayInfo, shards: list[Shard]) -> list[str]:
        """Return the keys of shards; those of jax arrays are the same for all of one shape and sharding."""
        known = (
            (stored.sharding, stored.shape, stored.write_shape, info.driver) if is_jax_array(stored.source) else None
        )
        if known is not None and (keys := self._known_keys.get(known)) is not None:
            return keys
        keys = [info.chunk_key(next(array_boxes.cells(shard.index, info.chunks))[0]) for shard in shards]
        if known is not None:
            self._known_keys[known] = keys
        return keys

    def _put_small(self, name: str, stored: EncodedLeaf, array: np.ndarray[Any, Any], encoding: Encoding) -> None:
        prefix, (file, text, chunk) = key_prefix(name), _small_form(stored.shape, stored.dtype, encoding.checksums)
        self._store[prefix + file] = text
        if array.nbytes:
            self._put_chunk(prefix + chunk, array, encoding)

    def _put_chunk(self, key: str, array: np.ndarray[Any, Any], encoding: Encoding) -> None:
        """Add the bytes of a small chunk without compression."""
        data = array.tobytes()
        if encoding.checksums:
            data += checksums.crc32c(data).to_bytes(CHECKSUM_NBYTES, "little")
        elif self._recorder is not None and len(data) > _INLINE_BYTES:
            self._recorder.add_bytes(key, data)
        self._store[key] = data

    def _put_by_driver(
        self, name: str, stored: EncodedLeaf, shards: list[Shard], encoding: Encoding, is_primary: bool
    ) -> None:
        if not is_primary and not shards:
            return
        spec = {
            "driver": "zarr3" if encoding.checksums else "zarr",
            "kvstore": {**self._spec, "path": key_prefix(name)},
            "metadata": dump_metadata(stored.shape, stored.write_shape, stored.dtype, encoding),
            # A reader cannot tell a chunk of zeros that was left out from one that was lost.
            "store_data_equal_to_fill_value": True,
            **({"create": True} if is_primary else {"open": True, "assume_metadata": True}),
        }
        opened = ts.open(spec, transaction=self._transaction, context=self._context)
        may_change = memory.may_change(stored.source)
        # Else TensorStore copies it first: what it sums must be what it writes, though another thread writes to it.
        self._pending.append((opened, shards, not (may_change and encoding.checksums)))
        if self._recorder is not None and not encoding.checksums:
            _, info = _metadata(stored.shape, stored.write_shape, stored.dtype, encoding)
            for shard in shards:
                self._recorder.add_shard(key_prefix(name), info, shard, may_change=may_change)

    def merge(self, names: Sequence[str]) -> None:
        """Add references to all values of finished databases in this directory."""
        children = {name: {"driver": "ocdbt", "base": self._base(name)} for name in names}
        opened = {name: ts.KvStore.open(spec, context=self._context) for name, spec in children.items()}
        copies = {}
        for name, child in opened.items():
            with self._merging(name) as folder:
                copies[name] = folder.wait(child).experimental_copy_range_to(self._store)
        for name, copied in copies.items():
            with self._merging(name) as folder:
                folder.wait(copied, _INDEX_BYTES)

    @contextmanager
    def _merging(self, name: str) -> Iterator[Location]:
        """Yield the directory of a database that is merged, and name it in errors."""
        folder = (self._store_folder or Location(self._path, LOCAL)) / name
        with translated(folder.path, "merged with those of the other processes", TENSORSTORE_ERRORS):
            yield folder

    def start_commit(self) -> None:
        """Start the commit, once the one before has finished; TensorStore continues in its own threads."""
        self.finish_commit()
        if self._recorder is not None:
            self._recorder.start()
        copies = []
        for opened, shards, can_reference in self._pending:
            array = opened.result()
            for shard in shards:
                written = array[shard.index].write(shard.data, can_reference_source_data_indefinitely=can_reference)
                copies.append(written.copy)
        for copied in copies:
            copied.result()
        self._committed = self._transaction.commit_async()

    def finish_commit(self) -> None:
        """Wait until what was committed, if anything, is written and synced, and its checksums are known."""
        if self._committed is None:
            return
        try:
            wait_with_writeback(self._committed, os.path.join(self._path, DATA_DIRECTORY), self._recorder)
        finally:
            if self._recorder is not None:
                self._recorder.finish()
        self._committed, self._committing = None, 0


@functools.lru_cache(maxsize=4096)
def _metadata(
    shape: tuple[int, ...], write_shape: tuple[int, ...], dtype: Any, encoding: Encoding
) -> tuple[bytes, ArrayInfo]:
    """Return the text of an array's metadata, and its parsed form."""
    text = json.dumps(dump_metadata(shape, write_shape, dtype, encoding), separators=(",", ":")).encode()
    return text, parse_array_metadata(text, zarr3=encoding.checksums)


@functools.lru_cache(maxsize=4096)
def _small_form(shape: tuple[int, ...], dtype: Any, checksums: bool) -> tuple[str, bytes, str]:
    """Return the metadata's file and text of an array in one chunk without compression, and the chunk's key."""
    encoding = Encoding(checksums=checksums)
    text, info = _metadata(shape, shape, dtype, encoding)
    return encoding.metadata_file, text, info.chunk_key((0,) * len(shape))


def stacked_spec(local: str, store: Location, inside: str = "") -> dict[str, Any]:
    """Return the spec of a local directory, or of ``inside`` in it, with the process databases of a store in it."""
    stored = store.kvstore()
    return {
        "driver": "kvstack",
        "layers": [
            {"base": LOCAL.kvstore(local)},
            {"base": {**stored, "path": stored["path"] + PROCESS_PREFIX}, "prefix": PROCESS_PREFIX},
        ],
        "path": inside and f"{inside}/",
    }


def file_locator(local: str, store: Location) -> Callable[[str], Location]:
    """Return a function that resolves file names of `stacked_spec`'s directory."""
    return lambda file: (store if file.startswith(PROCESS_PREFIX) else Location(local, LOCAL)) / file


def wait_with_writeback(future: Any, directory: str, recorder: Recorder | None = None) -> None:
    """Wait for TensorStore's future; meanwhile start the kernel's writeback of growing files, which only saves time.

    Tell ``recorder`` when the files of the directory have all bytes that it knows."""
    started: dict[int, int] = {}
    future.force()
    # Not by the future's own timeout: a TimeoutError may be of the program, whose signal handler limits a save's time.
    ended = thread_pools.end_of(future)
    while not ended.wait(_POLL_SECONDS):
        with suppress(OSError):
            written = _start_writeback(directory, started)
            if recorder is not None and written >= recorder.nbytes:
                recorder.written()
    future.result()


def _start_writeback(directory: str, started: dict[int, int]) -> int:
    """Hand over what files have grown by, and return the size of all.

    ``started`` is by inode, as files get their final names at the end."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            size, start = entry.stat().st_size, started.get(entry.inode(), 0)
            total += size
            if size - start >= _WRITEBACK_FROM_BYTES:
                descriptor = os.open(entry.path, os.O_RDONLY)
                try:
                    start_writeback(descriptor, start, size - start)
                finally:
                    os.close(descriptor)
                started[entry.inode()] = size
    return total
