"""Writes a planned tree as a flat Orbax PyTree directory."""

from __future__ import annotations

import os
import sys
from typing import Any

from flax_ckpt_compat._core.backend import WriteOptions
from flax_ckpt_compat._core.errors import SettingError
from flax_ckpt_compat._core.memory import collection_paused

from . import metadata
from .database import Database, storage_errors
from .files import make_directory, sync_directory, write_file, write_json
from .leaves import Stored
from .plan import Plan

_COMPRESSORS: dict[str, dict[str, Any]] = {
    "zstd": {"id": "zstd", "level": 1},  # what Orbax 0.12.8 writes
    "gzip": {"id": "gzip", "level": 1},
    "zlib": {"id": "zlib", "level": 1},
    "blosc": {"id": "blosc", "blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": -1},
}


def write_plan(path: str, plan: Plan, options: WriteOptions) -> None:
    """Creates the directory ``path`` with the whole checkpoint in it, synced to disk.

    Raises:
        SettingError: an unknown compression.
        StorageError: the file system refused.
    """
    used = compressor(options.compression)
    make_directory(path)
    database = begin_arrays(path, metadata.arrays(plan), used)
    try:
        if metadata.has_jax_arrays(plan):
            make_directory(os.path.join(path, metadata.ARRAY_METADATAS))
        write_array_metadatas(path, plan, used is not None, 0)
        write_tree(path, plan)
    finally:
        end_arrays(path, database)  # TensorStore was writing in its own threads meanwhile
    finish(path, plan)


def compressor(name: str | None) -> dict[str, Any] | None:
    """Zarr's description of a codec.

    Raises:
        SettingError: there is none of that name.
    """
    if name is None:
        return None
    if name not in _COMPRESSORS:
        raise SettingError(f"compression={name!r} is unknown; expected None or one of {sorted(_COMPRESSORS)}")
    return _COMPRESSORS[name]


def write_array_metadatas(path: str, plan: Plan, compressed: bool, process: int) -> None:
    """Writes the list of all jax arrays that each process leaves; its directory exists unless there are none."""
    if not metadata.has_jax_arrays(plan):
        return
    directory = os.path.join(path, metadata.ARRAY_METADATAS)
    with collection_paused():
        content = metadata.array_metadatas(plan, compressed)
    write_json(os.path.join(directory, f"process_{process}"), content)
    sync_directory(directory)


def write_tree(path: str, plan: Plan) -> None:
    """Writes the JSON files that one process writes for all."""
    with collection_paused():
        shardings, tree = metadata.shardings(plan), metadata.tree_metadata(plan)
    if metadata.has_jax_arrays(plan):
        write_json(os.path.join(path, metadata.SHARDING), shardings)
    if plan.strings:
        write_json(os.path.join(path, metadata.STRINGS), plan.strings)
    write_json(os.path.join(path, metadata.METADATA), tree)


def begin_arrays(
    path: str, arrays: list[tuple[str, Stored]], compressor: dict[str, Any] | None, leads: bool = True
) -> Database | None:
    """All arrays in one transaction on a new database in ``path``, whose commit is under way; None without arrays.

    Args:
        path: of the database.
        arrays: name and content of each; of one that is spread over processes, this process's shards are written.
        compressor: of large arrays.
        leads: also writes the arrays' metadata.
    """
    if not arrays:
        return None
    _begin_transfers(arrays)
    with storage_errors(path):
        database = Database(path)
        with collection_paused():
            for name, stored in arrays:
                database.put(name, stored, compressor, leads)
        database.begin_commit()
    return database


def end_arrays(path: str, database: Database | None) -> None:
    """Waits for the arrays, and makes their files durable."""
    if database is not None:
        with storage_errors(path):
            database.end_commit()
        sync_database(path)


def sync_database(path: str) -> None:
    """Makes the names of a database's data files durable; it has none if no value was written."""
    files = os.path.join(path, "d")
    if os.path.isdir(files):
        sync_directory(files)


def finish(path: str, plan: Plan) -> None:
    """Writes what says that the checkpoint in ``path`` is whole."""
    write_json(os.path.join(path, metadata.STEP_METADATA), metadata.step_metadata(plan.started_ns))
    sync_directory(path)
    # Last, because it says that everything else is there.
    write_file(os.path.join(path, metadata.COMMITTED), b"Checkpoint commit was successful")
    sync_directory(path)


def _begin_transfers(arrays: list[tuple[str, Stored]]) -> None:
    """Starts all copies from accelerators; on the CPU there is nothing to copy, and asking takes its time."""
    jax = sys.modules.get("jax")
    if jax is None or jax.default_backend() == "cpu":
        return
    for _, stored in arrays:
        if hasattr(stored.source, "copy_to_host_async"):
            stored.source.copy_to_host_async()
