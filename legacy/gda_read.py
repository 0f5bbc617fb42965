"""Read the ``_gda`` folder of a multi-process save: one zarr v2 array per distributed leaf.

Flax writes them with zstd, once with gzip, and the fill value null, which makes TensorStore store all chunks, also
those of zeros (measured); so a missing chunk means lost data.

Ours have checksums where TensorStore itself verifies them or does not look, so that they are in every copy of the
files, on disks and in stores. A chunk is a Zstandard frame with a content checksum (RFC 8878, 3.1.1), which whoever
decodes it verifies, real Flax included. The metadata has a member of its own, which TensorStore ignores.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import zstandard

from flax_ckpt_compat._core import array_boxes, dtypes, memory
from flax_ckpt_compat._core.array_boxes import Box, Shape
from flax_ckpt_compat._core.backend import BATCH_BYTES
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    ChecksumError,
    CorruptCheckpointError,
    MissingPathError,
    StorageError,
)
from flax_ckpt_compat._core.local.presence import ContainedFiles, stays_inside
from flax_ckpt_compat._core.local.temporaries import is_generation
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_CHUNK, ZARR2_METADATA
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Path, show_path

_AT_ONCE = 4096  # chunks that are looked up
# The member of ``.zarray`` with its checksum.
_MEMBER, _CRC32 = "flax_ckpt_compat", "crc32"
LEVEL = 1  # of zstd, as in jax's spec
_GZIP = 31  # how zlib calls its format
# What zstd says of a chunk with another content.
_DIFFERS = "doesn't match checksum"
# zstd expands 4 bytes to at most 128 KiB.
_MAX_RATIO = 2**16


@dataclasses.dataclass(frozen=True, slots=True)
class FolderArray:
    """A zarr array of the folder."""

    checkpoint: Location  # msgpack file that refers to it
    folder: Location
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # dtype of the array, in native byte order
    stored: np.dtype[Any]  # the same in the byte order of its chunks
    chunks: tuple[int, ...]  # shape of a chunk
    compressor: object  # its name, or what is in its place
    is_sound: bool | None  # whether its metadata is what was saved; None if it has no checksum
    index: tuple[slice, ...] | None = None  # slice of it to read, or None for all

    @property
    def nbytes(self) -> int:
        """Return the size in memory, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def locate(checkpoint: Location, subpath: str, path: Path) -> FolderArray:
    """Find the array of a placeholder by the text after its prefix, and read its ``.zarray``.

    Raise CorruptCheckpointError if the subpath leaves the folder, or the array is absent or does not decode."""
    if not stays_inside(subpath):
        raise _corrupt(checkpoint, path, f"a reference {subpath!r} that leads out of the folder of arrays")
    root = checkpoint.sibling(ARRAYS_POSTFIX)
    folder = root / subpath
    if not folder.is_remote:
        ContainedFiles(root.path).check(os.path.join(subpath, ZARR2_METADATA))
    try:
        text = (folder / ZARR2_METADATA).read(0, 2**20)
    except MissingPathError as error:
        found = f"no array {folder}; it was not copied along with the checkpoint"
        raise _corrupt(checkpoint, path, found) from error
    try:
        return _parse_metadata(checkpoint, folder, json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _corrupt(checkpoint, path, f"{folder}/{ZARR2_METADATA} that does not decode ({error})") from error


def _parse_metadata(checkpoint: Location, folder: Location, fields: Any) -> FolderArray:
    shape, chunks = fields["shape"], fields["chunks"]
    for lengths in (shape, chunks):
        if type(lengths) is not list or not all(type(size) is int and size >= 0 for size in lengths):
            raise ValueError(f"{lengths!r} is not a shape")
    if len(shape) != len(chunks) or 0 in chunks:
        raise ValueError(f"shape {shape} with chunks {chunks} is not a grid")
    if fields.get("dimension_separator", ".") != ".":
        raise ValueError("chunks in subfolders, which no release of Flax writes")
    if fields.get("order", "C") != "C" or fields.get("filters"):
        raise ValueError("an order or filters that no release of Flax writes")
    stored, compressor = dtypes.dtype_from_name(fields["dtype"]), fields.get("compressor")
    if stored.kind not in "biufcV":
        raise ValueError(f"{fields['dtype']!r} is no dtype of numbers")
    name = compressor.get("id") if isinstance(compressor, dict) else compressor
    dtype = stored.newbyteorder("=")
    return FolderArray(checkpoint, folder, tuple(shape), dtype, stored, tuple(chunks), name, _holds(fields))


def unreferenced(checkpoint: Location, locators: Collection[Any]) -> list[str]:
    """Return what is in the folder of arrays and belongs to none of these locators, relative to the file's folder."""
    folder_of_arrays = checkpoint.sibling(ARRAYS_POSTFIX)
    root = folder_of_arrays.path
    arrays = {os.path.relpath(one.folder.path, root) for one in locators if isinstance(one, FolderArray)}
    files = [os.path.split(file) for file in folder_of_arrays.files_below() if file != COMMIT_FILE]
    # A generation may belong to a save that is running.
    rest = [(folder or os.curdir, name) for folder, name in files if not is_generation(folder.partition("/")[0])]
    lost = {folder for folder, name in rest if name == ZARR2_METADATA} - arrays
    notes = [os.path.join(root, folder) + " (an array of no leaf)" for folder in sorted(lost)]
    for folder, name in sorted(rest):
        if folder not in lost and not (folder in arrays and (name == ZARR2_METADATA or ZARR2_CHUNK.fullmatch(name))):
            notes.append(os.path.join(root, folder, name))
    return [os.path.relpath(note, checkpoint.parent.path) for note in notes]


def verify(array: FolderArray, path: Path) -> bool:
    """Verify the metadata and the chunks of a whole array; return whether they have checksums.

    Chunks are decoded, in bounded memory, which verifies their content."""
    check_metadata(array, path)
    if array.is_sound is None:
        return False
    limit = max(1, BATCH_BYTES // array.dtype.itemsize)
    boxes = array_boxes.readable_boxes(array.shape, array.chunks, limit, splits_chunks=False)
    reads = BatchedReads(verify=True)
    for box in boxes:
        reads.begin(dataclasses.replace(array, index=box), path)
        reads.finish()
    return True


def check_metadata(array: FolderArray, path: Path) -> None:
    """Raise ChecksumError if the metadata of an array is not what was saved."""
    if array.is_sound is False:
        raise _is_altered(array, path, f"{array.folder}/{ZARR2_METADATA}", "; to read it as it is, set checksums='off'")


def _is_altered(array: FolderArray, path: Path, what: str, rest: str = "") -> ChecksumError:
    leaf = show_path(path)
    message = (
        f"{array.checkpoint}: {leaf}: {what} is not what was saved: its checksum is another than the recorded one; "
        f"restore the files from a backup, or restore an older step{rest}"
    )
    return ChecksumError(message, path=array.checkpoint.path, leaf=leaf)


class BatchedReads:
    """Reads of arrays and slices, whose chunks are read and decoded in parallel.

    Content checksums are always verified, with ``verify`` also those of metadata."""

    def __init__(self, meter: Meter = OFF, *, verify: bool) -> None:
        self._verify, self._meter = verify, meter
        self._checked: set[Location] = set()  # folders of arrays
        self._pending: list[tuple[FolderArray, Path, Box, np.ndarray[Any, Any]]] = []  # with the box to read

    def begin(self, array: FolderArray, path: Path) -> np.ndarray[Any, Any]:
        """Return the result of a read, which is filled when `finish` returns."""
        if self._verify:
            check_metadata(array, path)
        box = array_boxes.full_box(array.shape) if array.index is None else array.index
        with _translated(array, path):
            if array.folder not in self._checked:
                _check_unchanged(array, path)
                self._checked.add(array.folder)
            result = memory.empty(array_boxes.shape_of(box), array.dtype)
        self._pending.append((array, path, box, result))
        return result

    def finish(self) -> None:
        """Read all chunks; raise CorruptCheckpointError if one is missing or does not decode."""
        pending, self._pending = self._pending, []
        parts = ((one, chunk) for one in pending for chunk in array_boxes.cells(one[2], one[0].chunks))
        while some := list(itertools.islice(parts, _AT_ONCE)):  # a hostile grid has 2**60
            chunks: dict[Any, list[Any]] = {}  # each is read once for all boxes
            for one, (cell, chunk) in some:
                chunks.setdefault((one[0].folder, cell), []).append((*one, cell, chunk))
            in_parallel(self._read_chunk, chunks.values())

    def _read_chunk(self, parts: list[tuple[FolderArray, Path, Box, np.ndarray[Any, Any], Shape, Box]]) -> None:
        array, path, *_, cell, _ = parts[0]
        with _translated(array, path):
            data = _decode(array, (array.folder / (".".join(map(str, cell)) or "0")).read())
        for _, path, box, result, _, chunk in parts:
            inside = array_boxes.overlap(chunk, box)
            part = data[array_boxes.relative_to(inside, chunk)]
            result[array_boxes.relative_to(inside, box)] = part
            self._meter.add(part.nbytes, path)


def _decode(array: FolderArray, stored: bytes) -> np.ndarray[Any, Any]:
    """Return the numbers of a chunk; raise ValueError or ZstdError if it does not hold as many."""
    nbytes = math.prod(array.chunks) * array.dtype.itemsize
    if nbytes > len(stored) * _MAX_RATIO:
        raise ValueError(f"a chunk of {len(stored)} bytes cannot hold {nbytes}")
    if array.compressor is None:
        data = stored
    elif array.compressor == "gzip":
        data = zlib.decompressobj(_GZIP).decompress(stored, nbytes + 1)
    elif zstandard.frame_content_size(stored) in (-1, nbytes):  # -1: not recorded
        data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=nbytes, allow_extra_data=False)
    else:
        data = b""
    if len(data) != nbytes:
        raise ValueError(f"a chunk does not hold {nbytes} bytes")
    return np.frombuffer(data, array.stored).reshape(array.chunks)


def _check_unchanged(array: FolderArray, path: Path) -> None:
    """Raise ValueError if an array cannot be read, or is another one since it was located."""
    if not array.folder.is_remote:
        _check_files(array)
    root = array.checkpoint.sibling(ARRAYS_POSTFIX).path
    now = locate(array.checkpoint, array.folder.path[len(root) + 1 :], path)
    if now != dataclasses.replace(array, index=None):
        raise ValueError(f"it is now {now.dtype}{now.shape}, it was {array.dtype}{array.shape}")
    if array.compressor not in (None, "zstd", "gzip"):
        raise ValueError(f"its compressor is {array.compressor!r:.100}, which no release of Flax writes")


def _check_files(array: FolderArray) -> None:
    """Check what TensorStore will open, and that it can hold the array."""
    root = array.checkpoint.sibling(ARRAYS_POSTFIX).path
    sizes = ContainedFiles(root).check_folder(os.path.relpath(array.folder.path, root))
    chunks = [size for name, size in sizes.items() if name != ZARR2_METADATA]
    needed = math.prod(-(-length // side) for length, side in zip(array.shape, array.chunks, strict=True))
    if len(chunks) < needed:
        raise ValueError(f"{needed} files of chunks are needed, {len(chunks)} are there")
    if array.nbytes > sum(chunks) * _MAX_RATIO:
        raise ValueError(f"files of {sum(chunks)} bytes cannot hold {array.nbytes}")


@contextmanager
def _translated(array: FolderArray, path: Path) -> Iterator[None]:
    """Translate what decoding raises, and a missing file, into CorruptCheckpointError."""
    try:
        yield
    except (CheckpointError, ValueError, zlib.error, zstandard.ZstdError) as error:
        is_gone = isinstance(error, StorageError) and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
        if isinstance(error, CheckpointError) and not is_gone:
            raise
        if _DIFFERS in str(error):
            raise _is_altered(array, path, f"a chunk in {array.folder}") from error
        found = f"an array in {array.folder} that cannot be read ({error})"
        raise _corrupt(array.checkpoint, path, found) from error


def _corrupt(checkpoint: Location, path: Path, found: str) -> CorruptCheckpointError:
    leaf, folder = show_path(path), checkpoint.sibling(ARRAYS_POSTFIX)
    message = f"{checkpoint}: {leaf}: expected an array of several processes in {folder}, found {found}"
    return CorruptCheckpointError(
        f"{message}; copy that folder again from where it was saved", path=checkpoint.path, leaf=leaf
    )


def with_sum(metadata: bytes) -> bytes:
    """Add a checksum of all other members to a ``.zarray``."""
    fields = json.loads(metadata)
    return json.dumps({**fields, _MEMBER: {_CRC32: _sum(fields)}}).encode()


def _holds(fields: Mapping[str, Any]) -> bool | None:
    """Return whether the members of a ``.zarray`` are those that were saved; None if it has no checksum."""
    if _MEMBER in fields:
        return bool(fields[_MEMBER] == {_CRC32: _sum(fields)})
    # The name of the member may itself be damaged.
    return False if any(isinstance(value, dict) and _CRC32 in value for value in fields.values()) else None


def _sum(fields: Mapping[str, Any]) -> int:
    others = {name: value for name, value in fields.items() if name != _MEMBER}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())
