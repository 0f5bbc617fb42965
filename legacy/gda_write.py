"""Write a multi-process save: a msgpack file, and its folder of arrays on a local disk or in a store."""

from __future__ import annotations

import itertools
import os

import numpy as np
import zstandard

from flax_ckpt_compat._core.backend import ProcessSave
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import gda_folder, presence
from flax_ckpt_compat._core.local.syncing import sync_descriptor, sync_directory
from flax_ckpt_compat._core.location import LocalLocation, Location, of_text
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_METADATA
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Shard

from . import gda_read
from .encode import write_tree
from .gda_split import DistributedArray

# Syncing and requests mostly wait.
_THREADS = 16


def begin(save: ProcessSave) -> None:
    """Create the folder of arrays and their metadata, if there are arrays; see `Backend.begin_multiprocess`."""
    prepared, upload = save.prepared, save.upload
    if not prepared.arrays:
        return
    if upload is None:
        gda_folder.begin(save.path)
    metadata = {_subpath(array, ZARR2_METADATA): _metadata(array, save) for array in prepared.arrays}
    if upload is not None:
        in_parallel(lambda name: upload.write(f"{upload.tag}/{name}", metadata[name]), metadata)
        return
    base = _base(save)

    def write(name: str) -> None:
        file = (base / name).path
        os.makedirs(os.path.dirname(file), exist_ok=True)
        _write_file(file, metadata[name])

    in_parallel(write, metadata, _THREADS)  # each is synced


def write_process_part(save: ProcessSave) -> None:
    """Write this process's shards, and in process 0 the file, which is local also for a save to a store."""
    upload = save.upload
    written = _write_shards(save)
    if upload is not None:
        upload.check_active([f"{upload.tag}/{name}" for name in written])
    if save.process.index == 0:
        prefix = gda_folder.generation_prefix(save.path) if upload is None else f"{upload.tag}/"
        write_tree(save.path, save.prepared.document(prefix), save.options)


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
    in_parallel(lambda array: _check_chunks(base, array), prepared.arrays, _THREADS)
    in_parallel(sync_directory, folders, _THREADS)


def _base(save: ProcessSave) -> Location:
    """Return the folder that the arrays' subpaths are relative to."""
    if save.upload is not None:
        return of_text(save.upload.folder) / save.upload.tag
    return LocalLocation(gda_folder.folder_of(save.path)) / gda_folder.generation_prefix(save.path).rstrip("/")


def _subpath(array: DistributedArray, name: str) -> str:
    return f"{array.subpath}/{name}" if array.subpath else name


def _metadata(array: DistributedArray, save: ProcessSave) -> bytes:
    return gda_read.with_sum(array.metadata) if save.options.checksums else array.metadata


def _write_shards(save: ProcessSave) -> list[str]:
    """Write and sync this process's shards with bounded memory; return their paths relative to the folder.

    `finish` syncs their names, once a folder."""

    def write(array: DistributedArray) -> list[str]:  # one after another, so that few are in memory at once
        return [_write_shard(save, array, shard) for shard in array.shards()]

    # Their end is waited for: none may continue into a folder that is about to be removed.
    return list(itertools.chain.from_iterable(in_parallel(write, save.prepared.arrays, _THREADS)))


def _write_shard(save: ProcessSave, array: DistributedArray, shard: Shard) -> str:
    """Encode a shard and write it as a chunk; return its path relative to the folder."""
    name = _subpath(array, array.chunk_name(shard.index))
    compressor = zstandard.ZstdCompressor(level=gda_read.LEVEL, write_checksum=save.options.checksums)
    encoded = compressor.compress(array.chunk(shard.data).reshape(-1).view(np.uint8).data)
    if (upload := save.upload) is not None:
        upload.write(f"{upload.tag}/{name}", encoded)
    else:
        path = (_base(save) / name).path
        with translated(path, "written"):
            _write_file(path, encoded)
    save.options.meter.add(shard.data.nbytes, array.subpath)
    return name


def _write_file(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        sync_descriptor(file.fileno(), path)


def _check_chunks(base: Location, array: DistributedArray) -> None:
    folder = (base / array.subpath).path
    with translated(folder, "listed"):
        listed = set(os.listdir(folder))
    # On network file systems a listing may be stale, so check unlisted names directly too.
    missing = [name for name in [ZARR2_METADATA, *array.chunk_names()] if name not in listed]
    _require(base, array, [name for name in missing if not presence.exists(os.path.join(folder, name))])


def _require(base: Location, array: DistributedArray, missing: list[str]) -> None:
    """Raise if chunks, or the metadata, of an array are missing."""
    if missing:
        folder = base / array.subpath
        message = f"{folder}: {len(missing)} of the chunks of {array.subpath or 'the array'} were not written"
        shown = ", ".join([*missing[:3], *(["…"] if len(missing) > 3 else [])])
        message += f" ({shown}); do all processes save the same tree, and into a directory that "
        raise StorageError(message + "they share?", path=folder.path)
