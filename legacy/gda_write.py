"""Write a multi-process save: a msgpack file, and its folder of arrays on a local disk or in a store."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import zstandard

from flax_ckpt_compat._core.backend import ProcessSave
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import gda_folder, presence
from flax_ckpt_compat._core.local.syncing import sync_descriptor, sync_directory
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_METADATA
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.thread_pools import in_parallel

from .encode import write_tree
from .gda_read import ZSTD_LEVEL, with_sum
from .gda_split import DistributedArray

# Syncing and requests mostly wait.
_THREADS = 16


def begin(save: ProcessSave) -> None:
    """Create the folder of arrays and their metadata, if there are arrays; see `Backend.begin_multiprocess`."""
    arrays: list[DistributedArray] = save.prepared.arrays
    if not arrays:
        return
    if save.upload is None:
        gda_folder.begin(save.path)

    def write(array: DistributedArray) -> None:
        if save.upload is None:
            os.makedirs(os.path.join(gda_folder.folder_of(save.path), _prefix(save), array.subpath), exist_ok=True)
        fields = array.metadata()
        text = json.dumps(with_sum(fields) if save.options.checksums else fields)
        _write_file(save, array.file(ZARR2_METADATA), text.encode())

    in_parallel(write, arrays, _THREADS)


def write_process_part(save: ProcessSave) -> None:
    """Write this process's shards, and in process 0 the file, which is local also for a save to a store."""
    # Their end is waited for: none may continue into a folder that is about to be removed.
    written = in_parallel(lambda array: _write_chunks(save, array), save.prepared.arrays, _THREADS)
    if save.upload is not None:
        save.upload.check_active([_prefix(save) + name for name in itertools.chain.from_iterable(written)])
    if save.process.index == 0:
        write_tree(save.path, save.prepared.document(_prefix(save)), save.options)


def finish(save: ProcessSave) -> None:
    """Check that all chunks exist; sync all names, or write the commit file of ``gs://``."""
    arrays, upload, prefix = save.prepared.arrays, save.upload, _prefix(save)
    if not arrays:
        return
    folder = gda_folder.folder_of(save.path) if upload is None else upload.folder
    there = set(presence.files_below(folder) if upload is None else upload.written())
    lost = [file for array in arrays for file in array.files() if prefix + file not in there]
    if upload is None:  # on network file systems a listing may be stale
        lost = [file for file in lost if not presence.isfile(os.path.join(folder, prefix, file))]
    if lost:
        shown = ", ".join([*lost[:3], *(["…"] if len(lost) > 3 else [])])
        message = f"{folder}: {len(lost)} files of arrays were not written ({shown}); do all processes save the same "
        raise StorageError(message + "tree, and into a directory that they share?", path=folder)
    if upload is None:
        in_parallel(sync_directory, [inner for inner, _, _ in os.walk(folder)], _THREADS)
    elif upload.needs_commit_file:  # real Flax and jax look for the file before they read arrays
        upload.write(COMMIT_FILE, f"Checkpoint commit was successful to {upload.folder}".encode())


def _prefix(save: ProcessSave) -> str:
    """Return what precedes the arrays' subpaths in the folder, and in references to them."""
    return gda_folder.generation_prefix(save.path) if save.upload is None else f"{save.upload.tag}/"


def _write_chunks(save: ProcessSave, array: DistributedArray) -> list[str]:
    """Encode and write this process's chunks of an array, one after another, so that few are in memory at once."""
    written = []
    for name, chunk in array.chunks():
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=save.options.checksums)
        _write_file(save, name, compressor.compress(chunk.reshape(-1).view(np.uint8).data))
        save.options.meter.add(chunk.nbytes, array.subpath)
        written.append(name)
    return written


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
