"""Write a planned tree as a flat Orbax PyTree directory.

    _METADATA                    the tree, and our type annotations (metadata.py, type_annotations.py)
    _sharding, array_metadatas/  shardings and PRNG implementations of jax arrays (metadata.py)
    _strings.json                leaves of type str
    manifest.ocdbt, d/           arrays, as zarr v2 (database.py, zarr.py)
    _CHECKPOINT_METADATA         when the save was
    commit_success.txt           written last

`_core/orbax_layout.py` has the names.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from flax_ckpt_compat._core.backend import WriteOptions
from flax_ckpt_compat._core.errors import SettingError
from flax_ckpt_compat._core.memory import pause_gc
from flax_ckpt_compat._core.orbax_layout import (
    ARRAY_METADATA_PREFIX,
    ARRAY_METADATAS,
    COMMIT_FILE,
    DATA_DIRECTORY,
    JAX_ARRAY,
    SHARDING,
    STEP_METADATA,
    STRINGS,
    TREE_METADATA,
)
from flax_ckpt_compat._core.storage_errors import TENSORSTORE_ERRORS, translated

from . import metadata
from .database import Database
from .encode import EncodedLeaf
from .files import make_directory, sync_directory, write_file, write_files
from .save_plan import SavePlan

_COMPRESSORS: dict[str, dict[str, Any]] = {
    "zstd": {"id": "zstd", "level": 1},  # what Orbax 0.12.8 writes
    "gzip": {"id": "gzip", "level": 1},
    "blosc": {"id": "blosc", "blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": -1},
}


def write(path: str, plan: SavePlan, options: WriteOptions) -> None:
    """Write the whole checkpoint to a new directory, synced to disk; see `Backend.write`.

    Raises:
        SettingError: the compression is not None, ``zstd``, ``gzip`` or ``blosc``; nothing was written.
        StorageError: the file system refused.
    """
    codec, lists_arrays = compressor(options.compression), metadata.has_jax_arrays(plan)
    make_directory(path)
    database = start_arrays(path, metadata.arrays(plan), codec)
    try:
        if lists_arrays:
            make_directory(os.path.join(path, ARRAY_METADATAS))
        listed = array_metadatas(path, plan, codec is not None, 0) if lists_arrays else {}
        write_files({**listed, **tree_files(path, plan)})
        if lists_arrays:
            sync_directory(os.path.join(path, ARRAY_METADATAS))
    finally:
        finish_arrays(path, database)  # TensorStore has been writing in its own threads
    commit(path, plan)


def compressor(name: str | None) -> dict[str, Any] | None:
    """Return zarr's spec of a codec, None for none; raise SettingError if it is unknown."""
    if name is None:
        return None
    if name not in _COMPRESSORS:
        raise SettingError(f"compression={name!r} is unknown; expected None or one of {sorted(_COMPRESSORS)}")
    return _COMPRESSORS[name]


def array_metadatas(path: str, plan: SavePlan, compressed: bool, process: int) -> dict[str, bytes]:
    """Return the file with a process's list of all jax arrays: its path and content."""
    content = metadata.array_metadatas(plan, compressed)
    return {os.path.join(path, ARRAY_METADATAS, f"{ARRAY_METADATA_PREFIX}{process}"): content.encode()}


def tree_files(path: str, plan: SavePlan) -> dict[str, bytes]:
    """Return path → content of the JSON files of the primary process."""
    files = {TREE_METADATA: metadata.tree_metadata(plan)}
    if metadata.has_jax_arrays(plan):
        files[SHARDING] = metadata.shardings(plan)
    if plan.strings:
        files[STRINGS] = json.dumps(plan.strings)
    return {os.path.join(path, name): content.encode() for name, content in files.items()}


def start_arrays(
    path: str, arrays: list[tuple[str, EncodedLeaf]], compressor: dict[str, Any] | None, is_primary: bool = True
) -> Database | None:
    """Start to write arrays to a new database in ``path``; return None without arrays.

    Of arrays that are spread over processes, only this process's shards are written; the primary process writes all
    metadata.
    """
    if not arrays:
        return None
    _start_transfers(arrays)
    with translated(path, "written", TENSORSTORE_ERRORS):
        database = Database(path)
        with pause_gc():
            for name, stored in arrays:
                database.put(name, stored, compressor, is_primary)
        database.start_commit()
    return database


def finish_arrays(path: str, database: Database | None) -> None:
    """Wait for the arrays, and sync their directory."""
    if database is not None:
        with translated(path, "written", TENSORSTORE_ERRORS):
            database.finish_commit()
        sync_database(path)


def sync_database(path: str) -> None:
    """Sync the directory of a database's data files, which exists if any value was written."""
    files = os.path.join(path, DATA_DIRECTORY)
    if os.path.isdir(files):
        sync_directory(files)


def commit(path: str, plan: SavePlan) -> None:
    """Write the step metadata and the commit file."""
    step = json.dumps(metadata.step_metadata(plan.started_ns))
    write_file(os.path.join(path, STEP_METADATA), step.encode())
    sync_directory(path)
    # Last: it marks the checkpoint as complete.
    write_file(os.path.join(path, COMMIT_FILE), b"Checkpoint commit was successful")
    sync_directory(path)


def _start_transfers(arrays: list[tuple[str, EncodedLeaf]]) -> None:
    """Start copies from accelerators to the host; on the CPU there are none, and the calls take time."""
    jax = sys.modules.get("jax")
    sources = [stored.source for _, stored in arrays if stored.value_type == JAX_ARRAY]
    # default_backend() initializes jax's backends, which numpy arrays do not need.
    if jax is None or not sources or jax.default_backend() == "cpu":
        return
    for source in sources:
        if hasattr(source, "copy_to_host_async"):
            source.copy_to_host_async()
