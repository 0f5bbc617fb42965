"""A save by several processes: each writes a database of its own, and process 0 makes one of all."""

from __future__ import annotations

import hashlib
import json
import os

from flax_ckpt_compat._core.backend import Share, WriteOptions
from flax_ckpt_compat._core.errors import StorageError, TeamError
from flax_ckpt_compat._core.tree import box_of, show_path

from . import metadata
from .database import Database, storage_errors
from .files import make_directory, sync_directory, write_file
from .files import storage_errors as file_errors
from .grid import Shape
from .index import MANIFEST, Extent, Index, open_index
from .jobs import Job
from .leaves import STRING, Stored
from .names import key_prefix
from .plan import Plan
from .sharding import ShardingTexts
from .writer import (
    begin_arrays,
    compressor,
    end_arrays,
    finish,
    sync_database,
    write_array_metadatas,
    write_tree,
)
from .zarr import parse_array_metadata

# In the directory of a process's database until the end: what it took the tree for, written when all else is.
_ENDED = "ended"


def begin(path: str, plan: Plan, options: WriteOptions) -> None:
    """Process 0 makes the directories; see `flax_ckpt_compat._core.backend.Backend.begin_shared`.

    Raises:
        SettingError: an unknown compression.
        StorageError: the file system refused.
    """
    compressor(options.compression)
    make_directory(path)
    if metadata.has_jax_arrays(plan):
        make_directory(os.path.join(path, metadata.ARRAY_METADATAS))


def write(path: str, plan: Plan, options: WriteOptions, share: Share) -> None:
    """Writes this process's shards, and in process 0 all that is not spread.

    Raises:
        StorageError: the file system refused, or is not the one that process 0 sees.
    """
    if not os.path.isdir(path):
        raise StorageError(
            f"process {share.index} does not find {path}, which process 0 made: all processes must save to one "
            f"directory that they share, on a network file system or an object store",
            path=path,
        )
    used, leads = compressor(options.compression), share.index == 0
    own = _database_of(path, share.index)
    make_directory(own)
    arrays = [(name, stored) for name, stored in metadata.arrays(plan) if leads or stored.spread]
    database = begin_arrays(own, arrays, used, leads)
    try:
        write_array_metadatas(path, plan, used is not None, share.index)
        if leads:
            write_tree(path, plan)
    finally:
        end_arrays(own, database)
    write_file(os.path.join(own, _ENDED), _digest(plan).encode())
    sync_directory(own)


def end(path: str, plan: Plan, share: Share) -> None:
    """Process 0 makes one checkpoint of all shares, once it has seen that nothing is missing.

    Raises:
        TeamError: a process wrote something else than this one.
        StorageError: a part of a share is missing, or the file system refused.
    """
    digest = _digest(plan)
    for process in range(share.count):
        _check_ended(path, process, digest)
    arrays = metadata.arrays(plan)
    if arrays:
        databases = [_database_of(path, process) for process in range(share.count)]
        with storage_errors(path):
            top = Database(path)
            # A process that holds the first replica of nothing has written nothing.
            top.take_over([own for own in databases if os.path.exists(os.path.join(own, MANIFEST))])
            top.begin_commit()
            top.end_commit()
        sync_database(path)
        _check_complete(path, plan)
    for process in range(share.count):
        _forget_ended(path, process)
    finish(path, plan)


def _database_of(path: str, process: int) -> str:
    return os.path.join(path, f"ocdbt.process_{process}")


def _digest(plan: Plan) -> str:
    """What has to be the same in all processes, for their shards to fit together."""
    texts = ShardingTexts()
    spread = [
        (name, stored.dtype.name, stored.shape, stored.part, str(stored.mark), texts.of(stored.sharding))
        for name, stored in metadata.arrays(plan)
        if stored.spread
    ]
    return hashlib.sha256(json.dumps(spread).encode()).hexdigest()


def _check_ended(path: str, process: int, digest: str) -> None:
    file = os.path.join(_database_of(path, process), _ENDED)
    try:
        with file_errors(file, "read"), open(file, encoding="ascii") as opened:
            found = opened.read()
    except StorageError as error:
        raise StorageError(
            f"{path}: the share of process {process} is missing (it should have written {file}); all processes must "
            f"save to one directory that they share. Nothing was saved",
            path=path,
            errno=error.errno,
        ) from error
    if found != digest:
        raise TeamError(
            f"{path}: the arrays that process {process} spreads have other names, shapes, dtypes or shardings than "
            f"those of process 0; call save_checkpoint_multiprocess with the same tree in all processes. Nothing was "
            f"saved",
            path=path,
        )


def _forget_ended(path: str, process: int) -> None:
    file = os.path.join(_database_of(path, process), _ENDED)
    with file_errors(file, "removed"):
        os.remove(file)


def _check_complete(path: str, plan: Plan) -> None:
    """Looks for every chunk of every array, because a shard that is missing is best missed now."""
    index, sizes = open_index(path, use_ocdbt=True), dict[str, int]()
    for entry in plan.entries:
        if entry.stored is None or entry.stored.value_type == STRING:
            continue
        shown = show_path(tuple(name for name, _ in entry.keys))
        _check_array(path, index, entry.name, entry.stored, shown, sizes)


def _check_array(path: str, index: Index, name: str, stored: Stored, shown: str, sizes: dict[str, int]) -> None:
    prefix = key_prefix(name)
    text = index.get(prefix + ".zarray")
    if text is None:
        raise _incomplete(path, shown, "its metadata is missing, which process 0 writes")
    info = parse_array_metadata(text, zarr3=False)
    for cell, _ in Job(name, info, ()).cells():
        place = index.find(prefix + info.chunk_key(cell))
        if place is None:
            raise _incomplete(path, shown, f"{_whose(stored, cell, info.chunks)} is missing")
        if isinstance(place, Extent) and place.offset + place.length > _size(path, place.file, sizes):
            whose = _whose(stored, cell, info.chunks)
            raise _incomplete(path, shown, f"{whose} should be in {place.file}, which is missing or too short")


def _incomplete(path: str, shown: str, what: str) -> StorageError:
    error = StorageError(
        f"{path}: the leaf {shown!r} is not complete: {what}. All processes must save to one directory that they "
        f"share, and nothing else may change it. Nothing was saved",
        path=path,
    )
    error.leaf = shown
    return error


def _whose(stored: Stored, cell: Shape, chunks: Shape) -> str:
    """A chunk and the process that holds the first replica of it."""
    at = [number * length for number, length in zip(cell, chunks, strict=True)]
    devices = stored.sharding.devices_indices_map(stored.shape) if stored.spread else {}
    holders = (
        device.process_index
        for device, index in devices.items()
        if all(side.start <= start < side.stop for side, start in zip(box_of(index, stored.shape), at, strict=True))
    )
    return f"the chunk {list(cell)} of process {next(holders, 0)}"


def _size(path: str, file: str, sizes: dict[str, int]) -> int:
    if file not in sizes:
        full = os.path.join(path, file)
        sizes[file] = os.path.getsize(full) if os.path.isfile(full) else -1
    return sizes[file]
