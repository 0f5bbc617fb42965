"""Write a multi-process save: a msgpack file and its folder of arrays."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.backend import ProcessInfo, WriteOptions
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic, gda_folder
from flax_ckpt_compat._core.object_store import client, multiprocess
from flax_ckpt_compat._core.object_store.multiprocess import MultiprocessUpload
from flax_ckpt_compat._core.thread_pools import Pool

from . import gda_upload
from .gda_tree import DistributedArray, SharedTree
from .write import write_tree

_METADATA = ".zarray"
# Syncing mostly waits for the disk.
_THREADS = 16
# Bytes of shards that are compressed and written at the same time.
_IN_FLIGHT = 2**30


def begin(
    path: str,
    prepared: SharedTree,
    _options: WriteOptions,
    _process: ProcessInfo,
    upload: MultiprocessUpload | None = None,
) -> None:
    """Create the folder of arrays and their metadata, if there are arrays; see `Backend.begin_multiprocess`."""
    if not prepared.arrays:
        return
    if upload is not None:
        base, metadata = _base(path, upload), {array.subpath: array.metadata for array in prepared.arrays}
        client.in_parallel(
            lambda subpath: client.write(os.path.join(base, subpath, _METADATA), metadata[subpath]), metadata
        )
        return
    base = os.path.join(gda_folder.folder_of(path), gda_folder.begin(path))
    for array in prepared.arrays:
        folder = os.path.join(base, array.subpath)
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, _METADATA), "xb") as file:
            file.write(array.metadata)


def _base(path: str, upload: MultiprocessUpload | None) -> str:
    """Return the folder that the arrays' subpaths are relative to."""
    if upload is not None:
        return f"{upload.folder}/{upload.tag}"
    return os.path.join(gda_folder.folder_of(path), gda_folder.generation_prefix(path))


def write_process_part(
    path: str,
    prepared: SharedTree,
    _options: WriteOptions,
    process: ProcessInfo,
    upload: MultiprocessUpload | None = None,
) -> None:
    """Write this process's shards, and in process 0 the file, which is local also for a save to a store."""
    base = _base(path, upload)
    if upload is None:
        _write_shards(base, prepared.arrays)
    else:
        multiprocess.check_active(upload, gda_upload.write_shards(base, prepared.arrays, upload))
    if process.index == 0:
        write_tree(path, prepared.document(gda_folder.generation_prefix(path) if upload is None else f"{upload.tag}/"))


def finish(
    path: str,
    prepared: SharedTree,
    _options: WriteOptions,
    _process: ProcessInfo,
    upload: MultiprocessUpload | None = None,
) -> None:
    """Check that all chunks exist, and sync the metadata of `begin` and all names.

    Raises:
        StorageError: a chunk is missing; names the array.
    """
    if not prepared.arrays:
        return
    base = _base(path, upload)
    if upload is not None:
        gda_upload.check(base, prepared.arrays, upload)
        return
    folders = {folder for folder, _, _ in os.walk(gda_folder.folder_of(path))}
    with _threads() as pool:
        _drain(pool.map(lambda array: _check(base, array), prepared.arrays))
        _drain(pool.map(lambda array: _sync(os.path.join(base, array.subpath, _METADATA)), prepared.arrays))
        _drain(pool.map(atomic.sync_directory, folders))


def _threads() -> Pool:
    return Pool(_THREADS, thread_name_prefix="flax-ckpt-write")


def _drain(results: Iterable[None]) -> None:
    """Wait for all results; raise the first error."""
    for _ in results:
        pass


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_shards(base: str, arrays: Iterable[DistributedArray]) -> None:
    """Write and sync the chunks with bounded memory; `finish` syncs their names, once a folder."""
    import tensorstore

    # Shards are whole chunks, so a cache gains nothing. TensorStore would sync the folder for each chunk.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})
    pending: collections.deque[_Write] = collections.deque()
    total = 0
    with _threads() as pool:
        syncs = []
        try:
            for array in arrays:
                for write in _begin_writes(tensorstore, base, array, context):
                    pending.append(write)
                    total += write.nbytes
                while total > _IN_FLIGHT or (pending and pending[0].future.done()):
                    total -= pending[0].nbytes
                    syncs.append(pool.submit(_sync, pending.popleft().finish()))
            while pending:
                syncs.append(pool.submit(_sync, pending.popleft().finish()))
        finally:
            # After a failure, no write may continue into a folder that is about to be removed.
            for write in pending:
                write.future.exception()
        _drain(sync.result() for sync in syncs)


class _Write(NamedTuple):
    """A chunk that is being written."""

    base: str
    array: DistributedArray
    future: Any
    nbytes: int
    name: str

    def finish(self) -> str:
        """Wait for the write and return the path of its file."""
        with _translated(self.base, self.array):
            self.future.result()
        return os.path.join(self.base, self.array.subpath, self.name)


def _begin_writes(tensorstore: Any, base: str, array: DistributedArray, context: Any) -> Iterator[_Write]:
    store = None
    for shard in array.shards():
        if not math.prod(shard.data.shape):
            continue
        with _translated(base, array):
            store = store or _open(tensorstore, os.path.join(base, array.subpath), array, context)
            future = store[shard.index].write(shard.data, can_reference_source_data_indefinitely=True)
        yield _Write(base, array, future, shard.data.nbytes, array.name_of(shard))


@contextmanager
def _translated(base: str, array: DistributedArray) -> Iterator[None]:
    """Translate TensorStore's errors into StorageError."""
    try:
        yield
    except StorageError:
        raise
    except (ValueError, RuntimeError, OSError) as error:
        folder, name = os.path.join(base, array.subpath), array.subpath or "the array"
        message = f"{folder}: writing {name} failed: {error}"
        raise StorageError(message, path=folder, errno=getattr(error, "errno", None)) from error


def _open(tensorstore: Any, folder: str, array: DistributedArray, context: Any) -> Any:
    spec = {"driver": "zarr", "kvstore": paths.local_kvstore(folder)}
    store = tensorstore.open(spec, open=True, context=context).result()
    array.check_matches(folder, tuple(store.shape), store.dtype.numpy_dtype)
    return store


def _check(base: str, array: DistributedArray) -> None:
    folder = os.path.join(base, array.subpath)
    listed = set(os.listdir(folder))
    # On network file systems a listing may be stale, so check unlisted names directly too.
    missing = [name for name in array.names() if name not in listed and not os.path.exists(os.path.join(folder, name))]
    if missing:
        raise array.incomplete(folder, missing)
