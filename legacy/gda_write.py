"""Write a multi-process save: a msgpack file, and its folder of arrays on a local disk or in a store."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable
from typing import Any

from flax_ckpt_compat._core.backend import ProcessSave
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.load_tensorstore import load_tensorstore, use_tensorstore
from flax_ckpt_compat._core.local import atomic, file_checksums, gda_folder, presence
from flax_ckpt_compat._core.location import LOCAL, Location, of_text
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_METADATA
from flax_ckpt_compat._core.storage_errors import TENSORSTORE_ERRORS, translated
from flax_ckpt_compat._core.thread_pools import Once, Pool, in_parallel
from flax_ckpt_compat._core.tree import Shard

from .encode import write_tree
from .gda_split import DistributedArray

# Syncing and requests mostly wait.
_THREADS = 16
# Bytes of shards that are compressed and written at the same time.
_IN_FLIGHT = 2**29


def begin(save: ProcessSave) -> None:
    """Create the folder of arrays and their metadata, if there are arrays; see `Backend.begin_multiprocess`."""
    prepared, upload = save.prepared, save.upload
    if not prepared.arrays:
        return
    if upload is None:
        gda_folder.begin(save.path)
    metadata = {_subpath(array, ZARR2_METADATA): array.metadata for array in prepared.arrays}
    if upload is not None:
        in_parallel(lambda name: upload.write(f"{upload.tag}/{name}", metadata[name]), metadata)
        return
    base = _base(save)
    for name, text in metadata.items():
        file = (base / name).path
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "xb") as opened:
            opened.write(text)


def write_process_part(save: ProcessSave) -> None:
    """Write this process's shards, and in process 0 the file, which is local also for a save to a store."""
    upload, sums = save.upload, save.options.checksums
    written = _write_shards(_base(save), save.prepared.arrays, sums=sums)
    if upload is not None:
        upload.check_active([f"{upload.tag}/{name}" for name in written])
    if save.process.index == 0:
        prefix = gda_folder.generation_prefix(save.path) if upload is None else f"{upload.tag}/"
        write_tree(save.path, save.prepared.document(prefix), sums=sums)


def finish(save: ProcessSave) -> None:
    """Check that all chunks exist; sync the metadata and all names, or write the commit file of ``gs://``."""
    prepared, upload = save.prepared, save.upload
    if not prepared.arrays:
        return
    base = _base(save)
    if upload is not None:
        written = set(upload.written())
        for array in prepared.arrays:
            wanted = [ZARR2_METADATA, *array.chunk_names()]
            lost = [name for name in wanted if f"{upload.tag}/{_subpath(array, name)}" not in written]
            _require(base, array, lost)
        if upload.needs_commit_file:  # real Flax and jax look for the file before they read arrays
            upload.write(COMMIT_FILE, f"Checkpoint commit was successful to {upload.folder}".encode())
        return
    folders = {folder for folder, _, _ in os.walk(gda_folder.folder_of(save.path))}
    in_parallel(lambda array: _check_and_sync(base, array, sums=save.options.checksums), prepared.arrays, _THREADS)
    in_parallel(atomic.sync_directory, folders, _THREADS)


def _base(save: ProcessSave) -> Location:
    """Return the folder that the arrays' subpaths are relative to."""
    if save.upload is not None:
        return of_text(save.upload.folder) / save.upload.tag
    return Location(gda_folder.folder_of(save.path), LOCAL) / gda_folder.generation_prefix(save.path).rstrip("/")


def _subpath(array: DistributedArray, name: str) -> str:
    return f"{array.subpath}/{name}" if array.subpath else name


def _write_shards(base: Location, arrays: Iterable[DistributedArray], *, sums: bool) -> list[str]:
    """Write and sync this process's shards with bounded memory; return their paths relative to ``base``.

    With ``sums``, checksums of each file are recorded in an attribute of it, as `write_tree` does.
    `finish` syncs their names, once a folder.
    """
    opened: dict[str, Once] = {}
    pending: collections.deque[tuple[Once, int]] = collections.deque()
    written, total = [], 0
    # Its end waits for running writes: none may continue into a folder that is about to be removed.
    with Pool(_THREADS, "flax-ckpt-write") as pool:
        for array in arrays:
            for shard in array.shards():
                if array.subpath not in opened:
                    opened[array.subpath] = pool.submit(_open, base / array.subpath, array)
                pending.append(
                    (pool.submit(_write, opened[array.subpath], base, array, shard, sums), shard.data.nbytes)
                )
                written.append(os.path.join(array.subpath, array.chunk_name(shard.index)))
                total += shard.data.nbytes
                while pending and (total > _IN_FLIGHT or pending[0][0].done):
                    task, nbytes = pending.popleft()
                    total -= nbytes
                    task.result()
        for task, _ in pending:
            task.result()
    return written


def _write(opened: Once, base: Location, array: DistributedArray, shard: Shard, sums: bool) -> None:
    folder = base / array.subpath
    store = opened.result()[shard.index]
    if folder.is_remote:
        folder.storage.retry(folder.path, "written", lambda: store.write(shard.data).commit, shard.data.nbytes)
        return
    with translated(folder.path, "written", TENSORSTORE_ERRORS):
        store.write(shard.data, can_reference_source_data_indefinitely=True).result()
        file_checksums.seal((folder / array.chunk_name(shard.index)).path, sums=sums)


def _open(folder: Location, array: DistributedArray) -> Any:
    """Open the array that process 0 created, and check its shape and dtype."""
    use_tensorstore(folder.path)
    tensorstore = load_tensorstore()
    # Shards are whole chunks, so a cache gains nothing. TensorStore would sync the folder for each chunk.
    context = tensorstore.Context(
        {"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False}, parent=folder.context()
    )
    spec = {"driver": "zarr", "kvstore": folder.kvstore()}
    operation = "opened" if folder.is_remote else "written"
    store = folder.storage.retry(folder.path, operation, lambda: tensorstore.open(spec, open=True, context=context))
    shape, dtype = tuple(store.shape), store.dtype.numpy_dtype
    if (shape, dtype) != (array.shape, array.dtype):
        found = f"{dtype}{shape} by process 0 and {array.dtype}{array.shape} by this one"
        message = f"{folder}: {array.subpath or 'the array'} is saved as {found}; all processes have to save one tree"
        raise StorageError(message, path=folder.path)
    return store


def _check_and_sync(base: Location, array: DistributedArray, *, sums: bool) -> None:
    folder = (base / array.subpath).path
    listed = set(os.listdir(folder))
    # On network file systems a listing may be stale, so check unlisted names directly too.
    missing = [name for name in array.chunk_names() if name not in listed]
    _require(base, array, [name for name in missing if not presence.exists(os.path.join(folder, name))])
    file_checksums.seal(os.path.join(folder, ZARR2_METADATA), sums=sums)


def _require(base: Location, array: DistributedArray, missing: list[str]) -> None:
    """Raise if chunks, or the metadata, of an array are missing."""
    if missing:
        folder = base / array.subpath
        message = f"{folder}: {len(missing)} of the chunks of {array.subpath or 'the array'} were not written"
        shown = ", ".join([*missing[:3], *(["…"] if len(missing) > 3 else [])])
        message += f" ({shown}); do all processes save the same tree, and into a directory that "
        raise StorageError(message + "they share?", path=folder.path)
