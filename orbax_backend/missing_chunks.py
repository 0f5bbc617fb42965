"""Check that a checkpoint that several processes wrote is complete: every chunk is stored, in a file that has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.array_boxes import Shape, cells, full_box
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.jax_shards import normalize_index
from flax_ckpt_compat._core.tree import show_path

from .encode_leaves import EncodedLeaf
from .files import ByteRange
from .open_index import Index, StoredValue
from .save_plan import Entry, SavePlan
from .zarr import ArrayInfo, Encoding, parse_array_metadata


def check_complete(
    path: str, plan: SavePlan, encoding: Encoding, index: Index, size: Callable[[str], int | OSError | None]
) -> None:
    """Check that all chunks of the planned arrays are stored; name the leaf and the process of a missing one.

    ``size`` returns the bytes in a file, relative to the checkpoint, or an error, or None if there is none."""
    arrays = list(_stored_arrays(path, plan, encoding, index))
    for array in arrays:
        for cell, value in array.values(index):
            if value is None:
                raise _incomplete(path, array.entry, f"{_chunk_owner(array, cell)} is missing")
    ends = index.ends()
    sizes = {file: size(file) for file in ends}
    short = {file for file, found in sizes.items() if not isinstance(found, int) or found < ends[file]}
    for array in arrays if short else ():
        for cell, value in array.values(index):
            if isinstance(value, ByteRange) and value.file in short:
                found = sizes[value.file]
                if not isinstance(found, int) or found < value.offset + value.length:
                    what = f"should be in {value.file}, which is missing or too short"
                    raise _incomplete(path, array.entry, f"{_chunk_owner(array, cell)} {what}")


class _Chunks(NamedTuple):
    """The chunks of arrays that are stored alike."""

    info: ArrayInfo  # metadata of the arrays
    cells: dict[str, Shape]  # index of each chunk, by its key


class _Array(NamedTuple):
    """A planned array, the prefix of its keys, and its chunks."""

    entry: Entry
    prefix: str
    chunks: _Chunks

    def values(self, index: Index) -> Iterator[tuple[Shape, StoredValue | None]]:
        """Yield every chunk, with its value in the index."""
        for key, cell in self.chunks.cells.items():
            yield cell, index.find(self.prefix + key)


def _stored_arrays(path: str, plan: SavePlan, encoding: Encoding, index: Index) -> Iterator[_Array]:
    """Yield the planned arrays, as their metadata in the index describes them."""

    @functools.lru_cache(maxsize=64)
    def chunks_of(text: bytes) -> _Chunks:
        info = parse_array_metadata(text, zarr3=encoding.checksums)
        found = {info.chunk_key(cell): cell for cell, _ in cells(full_box(info.shape), info.chunks)}
        return _Chunks(info, found)

    for entry, _ in plan.arrays:
        prefix = layout.key_prefix(entry.name)
        text = index.get(prefix + encoding.metadata_file)
        if text is None:
            raise _incomplete(path, entry, "its metadata is missing, which process 0 writes")
        yield _Array(entry, prefix, chunks_of(text))


def _incomplete(path: str, entry: Entry, what: str) -> StorageError:
    keystr = show_path(tuple(name for name, _ in entry.keys))
    error = StorageError(
        f"{path}: the leaf {keystr!r} is not complete: {what}. All processes must save to one directory that they "
        f"share, and nothing else may change it. Nothing was saved",
        path=path,
    )
    error.leaf = keystr
    return error


def _chunk_owner(array: _Array, cell: Shape) -> str:
    """Name a chunk and the process that writes it."""
    stored = cast(EncodedLeaf, array.entry.stored)
    at = [number * length for number, length in zip(cell, array.chunks.info.chunks, strict=True)]
    devices = stored.sharding.devices_indices_map(stored.shape) if stored.spans_processes else {}
    holders = (
        device.process_index
        for device, index in devices.items()
        if all(
            side.start <= start < side.stop
            for side, start in zip(normalize_index(index, stored.shape), at, strict=True)
        )
    )
    return f"the chunk {list(cell)} of process {next(holders, array.entry.writer)}"
