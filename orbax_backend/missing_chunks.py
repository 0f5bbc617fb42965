"""Check that a checkpoint that several processes wrote is complete: every chunk is stored, in a file that has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.array_boxes import Shape, cells, full_box
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.jax_shards import normalize_index
from flax_ckpt_compat._core.tree import show_path

from .encode_leaves import EncodedLeaf
from .files import ByteRange
from .open_index import Index
from .save_plan import Entry, SavePlan
from .zarr import ArrayInfo, Encoding, parse_array_metadata


def check_complete(
    path: str, plan: SavePlan, encoding: Encoding, index: Index, size: Callable[[str], int | OSError | None]
) -> None:
    """Check that all chunks of the planned arrays are stored; name the leaf and the process of a missing one.

    ``size`` returns the bytes in a file, relative to the checkpoint, or an error, or None if there is none."""
    size = functools.cache(size)

    @functools.lru_cache(maxsize=64)
    def chunks_of(text: bytes) -> tuple[ArrayInfo, dict[str, Shape]]:
        info = parse_array_metadata(text, zarr3=encoding.checksums)
        return info, {info.chunk_key(cell): cell for cell, _ in cells(full_box(info.shape), info.chunks)}

    for entry, _ in plan.arrays:
        prefix = layout.key_prefix(entry.name)
        text = index.get(prefix + encoding.metadata_file)
        if text is None:
            raise _incomplete(path, entry, "its metadata is missing, which process 0 writes")
        info, keys = chunks_of(text)
        for cell, value in zip(keys.values(), index.find_all([prefix + key for key in keys]), strict=True):
            if value is None:
                raise _incomplete(path, entry, f"{_chunk_owner(entry, info, cell)} is missing")
            if isinstance(value, ByteRange):
                nbytes = size(value.file)
                if not isinstance(nbytes, int) or nbytes < value.offset + value.length:
                    what = f"should be in {value.file}, which is missing or too short"
                    raise _incomplete(path, entry, f"{_chunk_owner(entry, info, cell)} {what}")


def _incomplete(path: str, entry: Entry, what: str) -> StorageError:
    keystr = show_path(tuple(name for name, _ in entry.keys))
    error = StorageError(
        f"{path}: the leaf {keystr!r} is not complete: {what}. All processes must save to one directory that they "
        f"share, and nothing else may change it. Nothing was saved",
        path=path,
    )
    error.leaf = keystr
    return error


def _chunk_owner(entry: Entry, info: ArrayInfo, cell: Shape) -> str:
    """Name a chunk and the process that writes it."""
    stored = cast(EncodedLeaf, entry.stored)
    at = [number * length for number, length in zip(cell, info.chunks, strict=True)]
    devices = stored.sharding.devices_indices_map(stored.shape) if stored.spans_processes else {}
    holders = (
        device.process_index
        for device, index in devices.items()
        if all(
            side.start <= start < side.stop
            for side, start in zip(normalize_index(index, stored.shape), at, strict=True)
        )
    )
    return f"the chunk {list(cell)} of process {next(holders, entry.writer)}"
