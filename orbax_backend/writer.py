"""Write a planned tree as a flat Orbax PyTree directory.

    _METADATA                    the tree, and our type annotations (type_annotations.py)
    _sharding, array_metadatas/  shardings and PRNG implementations of jax arrays
    _strings.json                leaves of type str
    manifest.ocdbt, d/           arrays, as zarr v2, or v3 with checksums (ocdbt_writer.py, zarr.py)
    _CHECKPOINT_METADATA         when the save was
    flax_ckpt_compat.checksums   of the arrays and of the files above (recorded_checksums.py)
    commit_success.txt           written last

`_core/orbax_layout.py` has the names.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import sys
import time
import uuid
from collections.abc import Iterable
from typing import Any

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import LeafHandle, WriteOptions
from flax_ckpt_compat._core.errors import StorageError, is_of_handler, translated
from flax_ckpt_compat._core.local.syncing import sync_directory, write_file
from flax_ckpt_compat._core.local.temporaries import create_directory
from flax_ckpt_compat._core.memory import pause_gc
from flax_ckpt_compat._core.tree import is_jax_array, start_transfer

from . import stored_names
from .encode_leaves import EncodedLeaf
from .files import write_files
from .ocdbt_writer import Database
from .recorded_checksums import Record, file_of_database
from .save_plan import SavePlan
from .shardings import sharding_text
from .zarr import Encoding, chunk_shape

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def write(path: str, plan: SavePlan, options: WriteOptions) -> None:
    """Write the whole checkpoint to a new directory, synced to disk; see `Backend.write`."""
    begin(path, plan)
    record = Record() if options.checksums else None
    write_arrays(path, [(entry.name, stored) for entry, stored in plan.arrays], options, record)
    files = write_metadata(path, plan, options, 0)
    if record is not None:
        record.add_files(path, files)
    commit(path, plan, record)


def begin(path: str, plan: SavePlan) -> None:
    """Create the checkpoint's directories, with a file that is there until `commit`."""
    create_directory(path)
    open(os.path.join(path, layout.BEGUN), "xb").close()
    if plan.jax_arrays:
        create_directory(os.path.join(path, layout.ARRAY_METADATAS))


def encoding_of(options: WriteOptions) -> Encoding:
    """Return how chunks are stored."""
    return Encoding(options.compression is not None, options.compression == "zstd", options.part_bytes)


def write_metadata(
    path: str, plan: SavePlan, options: WriteOptions, process: int, *, lists_arrays: bool = True
) -> dict[str, bytes]:
    """Write a process's list of all jax arrays, and in process 0 what describes the tree; return path → content."""
    encoding, files = encoding_of(options), dict[str, Any]()
    with pause_gc():
        if lists_arrays and plan.jax_arrays:
            name = f"{layout.ARRAY_METADATAS}/{stored_names.ARRAY_METADATA_PREFIX}{process}"
            files[name] = _array_metadatas(plan, encoding.chunk_bytes)
        if process == 0:
            files[layout.TREE_METADATA] = _tree_metadata(plan, zarr3=encoding.checksums)
            if plan.jax_arrays:
                files[layout.SHARDING] = _shardings(plan)
            if plan.strings:
                files[layout.STRINGS] = plan.strings
        texts = {os.path.join(path, name): json.dumps(value).encode() for name, value in files.items()}
    # A store may tell versions by the bytes, and JSON may end in white space: no other save has the same version.
    blanks = f"{uuid.uuid4().int:0128b}".replace("0", " ").replace("1", "\n").encode() if options.part_bytes else b""
    contents = {file: text + blanks for file, text in texts.items()}
    write_files(contents)
    if lists_arrays and plan.jax_arrays:
        sync_directory(os.path.join(path, layout.ARRAY_METADATAS))
    return contents


def write_arrays(
    path: str, arrays: list[tuple[str, EncodedLeaf]], options: WriteOptions, record: Record | None, primary: bool = True
) -> None:
    """Write this process's shards, in the ``primary`` one all metadata, to a new database, and sync it."""
    sums = None if record is None else record.chunks
    database = Database(path, encoding_of(options), options, sums)
    reads = any(isinstance(stored.source, LeafHandle) for _, stored in arrays)
    try:
        start_transfers([stored for _, stored in arrays])
        with translated(path, "written"):
            with pause_gc(enabled=not reads):
                for name, stored in arrays:
                    if reads:
                        database.make_room(stored.source.nbytes)
                    database.add_array(name, stored, primary)
            database.finish()
    except BaseException as error:
        # A handler of the program's that ends the save does not wait for a disk that may hang.
        database.abandon(wait=isinstance(error, Exception) and not is_of_handler(error))
        raise


def commit(path: str, plan: SavePlan, record: Record | None) -> None:
    """Write the step metadata, the checksums and the commit file."""
    try:
        os.unlink(os.path.join(path, layout.BEGUN))
    except OSError as error:
        why = f"its directory was renamed or removed while it was written ({error.strerror})"
        raise StorageError(f"{path}: {why}, so parts are lost; save it again", path=path, errno=error.errno) from error
    metadata = {
        "item_handlers": _HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": plan.started_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
    files = {os.path.join(path, layout.STEP_METADATA): json.dumps(metadata).encode()}
    if record is not None:
        record.add_files(path, {**files, os.path.join(path, layout.COMMIT_FILE): layout.COMMITTED})
        files |= file_of_database(record, path, path)
    write_files(files)
    # Last: it marks the checkpoint as complete. One sync is enough: nobody reads the directory before its final name.
    write_file(os.path.join(path, layout.COMMIT_FILE), layout.COMMITTED)
    sync_directory(path)


def start_transfers(arrays: Iterable[EncodedLeaf]) -> None:
    """Start copies from accelerators to the host; on the CPU there are none, and the calls take time."""
    placed = [stored.source for stored in arrays if stored.value_type == layout.JAX_ARRAY]
    sources = list(filter(is_jax_array, placed))
    # default_backend() initializes jax's backends, which numpy arrays do not need.
    if sources and sys.modules["jax"].default_backend() != "cpu":
        for source in sources:
            start_transfer(source)


def _tree_metadata(plan: SavePlan, *, zarr3: bool) -> dict[str, Any]:
    """Return the content of ``_METADATA``."""
    tree: dict[str, Any] = {}
    for entry in plan.entries:
        stored = entry.stored
        value: dict[str, Any] = {"value_type": entry.value_type, "skip_deserialize": stored is None}
        if stored is not None and stored.value_type == layout.JAX_ARRAY:
            value["write_shape"] = stored.write_shape
        keys = [{"key": name, "key_type": kind} for name, kind in zip(entry.path, entry.kinds, strict=True)]
        tree[str(entry.path)] = {"key_metadata": keys, "value_metadata": value}
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": plan.annotations.to_json(),
    }


def _shardings(plan: SavePlan) -> dict[str, str]:
    """Return the content of ``_sharding``: URL-safe base64 of the name → JSON text."""
    encoder = functools.cache(sharding_text)
    texts = [(name, encoder(stored.sharding)) for name, stored in plan.jax_arrays]
    return {base64.urlsafe_b64encode(name.encode()).decode(): text for name, text in texts if text is not None}


def _array_metadatas(plan: SavePlan, chunk_bytes: int) -> dict[str, Any]:
    """Return the content of ``array_metadatas/process_N``; ``chunk_bytes`` is the limit of chunks."""
    chunks, arrays = functools.cache(functools.partial(chunk_shape, limit=chunk_bytes)), []
    for name, stored in plan.jax_arrays:
        impl = stored.annotation.impl if stored.annotation else None
        array = {
            "param_name": name,
            "write_shape": stored.write_shape,
            "chunk_shape": chunks(stored.shape, stored.write_shape, stored.dtype.itemsize),
            "ext_metadata": {"random_key_impl": impl} if impl else None,
        }
        arrays.append({"array_metadata": array})
    return {"array_metadatas": arrays}
