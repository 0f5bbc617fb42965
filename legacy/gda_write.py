"""Writing what several processes save together: a msgpack file, and its folder of arrays."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.backend import ProcessInfo
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic, gda_folder
from flax_ckpt_compat._core.object_store import client, multiprocess
from flax_ckpt_compat._core.object_store.multiprocess import MultiprocessUpload
from flax_ckpt_compat._core.thread_pools import Pool

from . import gda_upload
from .gda_tree import SharedTree, SpreadArray
from .write import write_tree

_METADATA = ".zarray"
# Syncing is waiting for the disk, most of all.
_THREADS = 16
# Of shards that are compressed and written at once.
_IN_FLIGHT = 2**30


def begin(path: str, prepared: SharedTree, upload: MultiprocessUpload | None = None) -> None:
    """Makes the folder of arrays and all in it but the data; no folder where there are no arrays."""
    if not prepared.arrays:
        return
    if upload is not None:
        base, described = _base(path, upload), {array.subpath: array.metadata for array in prepared.arrays}
        client.in_parallel(
            lambda subpath: client.write(f"{os.path.join(base, subpath, _METADATA)}", described[subpath]), described
        )
        return
    base = os.path.join(gda_folder.folder_of(path), gda_folder.begin(path))
    for array in prepared.arrays:
        folder = os.path.join(base, array.subpath)
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, _METADATA), "xb") as file:
            file.write(array.metadata)


def _base(path: str, upload: MultiprocessUpload | None) -> str:
    """The folder that the paths of the arrays are relative to."""
    if upload is not None:
        return f"{upload.folder}/{upload.tag}"
    return os.path.join(gda_folder.folder_of(path), gda_folder.generation_prefix(path))


def write_process_part(
    path: str, prepared: SharedTree, process: ProcessInfo, upload: MultiprocessUpload | None = None
) -> None:
    """Writes this process's shards, and in process 0 the file, which is local also of a save to a store."""
    base = _base(path, upload)
    if upload is None:
        _write_shards(base, prepared.arrays)
    else:
        multiprocess.check_goes_on(upload, gda_upload.write_shards(base, prepared.arrays, upload))
    if process.index == 0:
        write_tree(path, prepared.document(gda_folder.generation_prefix(path) if upload is None else f"{upload.tag}/"))


def end(path: str, prepared: SharedTree, upload: MultiprocessUpload | None = None) -> None:
    """Checks that all chunks of all arrays are there, and syncs what `begin` made and all names.

    Raises:
        StorageError: some are not; names the array.
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
    """Raises what one of them raised."""
    for _ in results:
        pass


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_shards(base: str, spread: Iterable[SpreadArray]) -> None:
    """Writes and syncs the chunks; some at once, and never all. Their names are synced by `end`, once a folder."""
    import tensorstore

    # Shards fall on whole chunks: nothing is gained by keeping them. TensorStore would sync a folder for each chunk.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})
    waiting: collections.deque[_Write] = collections.deque()
    total = 0
    with _threads() as pool:
        syncs = []
        try:
            for array in spread:
                for write in _begin_writes(tensorstore, base, array, context):
                    waiting.append(write)
                    total += write.nbytes
                while total > _IN_FLIGHT or (waiting and waiting[0].future.done()):
                    total -= waiting[0].nbytes
                    syncs.append(pool.submit(_sync, waiting.popleft().finish()))
            while waiting:
                syncs.append(pool.submit(_sync, waiting.popleft().finish()))
        finally:
            # After a failure nothing may go on writing into a folder that is about to be removed.
            for write in waiting:
                write.future.exception()
        _drain(sync.result() for sync in syncs)


class _Write(NamedTuple):
    """A chunk that is being written."""

    base: str
    array: SpreadArray
    future: Any
    nbytes: int
    name: str

    def finish(self) -> str:
        """Waits for it; the path of its file."""
        with _translated(self.base, self.array):
            self.future.result()
        return os.path.join(self.base, self.array.subpath, self.name)


def _begin_writes(tensorstore: Any, base: str, array: SpreadArray, context: Any) -> Iterator[_Write]:
    store = None
    for shard in array.shards():
        if not math.prod(shard.data.shape):
            continue
        with _translated(base, array):
            store = store or _open(tensorstore, os.path.join(base, array.subpath), array, context)
            future = store[shard.index].write(shard.data, can_reference_source_data_indefinitely=True)
        yield _Write(base, array, future, shard.data.nbytes, array.name_of(shard))


@contextmanager
def _translated(base: str, array: SpreadArray) -> Iterator[None]:
    """TensorStore's errors as ours."""
    try:
        yield
    except StorageError:
        raise
    except (ValueError, RuntimeError, OSError) as error:
        folder, name = os.path.join(base, array.subpath), array.subpath or "the array"
        message = f"{folder}: writing {name} failed: {error}"
        raise StorageError(message, path=folder, errno=getattr(error, "errno", None)) from error


def _open(tensorstore: Any, folder: str, array: SpreadArray, context: Any) -> Any:
    spec = {"driver": "zarr", "kvstore": paths.local_kvstore(folder)}
    store = tensorstore.open(spec, open=True, context=context).result()
    array.check_same(folder, tuple(store.shape), store.dtype.numpy_dtype)
    return store


def _check(base: str, array: SpreadArray) -> None:
    folder = os.path.join(base, array.subpath)
    there = set(os.listdir(folder))
    # Asked for by its name as well: over a network, a list of names may be older than the file.
    lost = [name for name in array.names() if name not in there and not os.path.exists(os.path.join(folder, name))]
    if lost:
        raise array.incomplete(folder, lost)
