"""Read the ``_gda`` folder of a multi-process save: one zarr v2 array per distributed leaf.

Flax writes them with zstd, once with gzip, and the fill value null, so TensorStore stores all chunks (measured);
a missing chunk means lost data. Ours have checksums that are in every copy of the files: a chunk is a Zstandard
frame with a content checksum (RFC 8878, 3.1.1), which whoever decodes it verifies, real Flax included, and the metadata
has a member of its own, which TensorStore ignores.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import zstandard

from flax_ckpt_compat._core import array_boxes, dtypes, memory
from flax_ckpt_compat._core.array_boxes import Box
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import CheckpointError, ChecksumError, CorruptCheckpointError, MissingPathError
from flax_ckpt_compat._core.local.presence import ContainedFiles, stays_inside
from flax_ckpt_compat._core.local.temporaries import is_generation
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.numbered_names import ARRAYS_POSTFIX
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_CHUNK, ZARR2_METADATA
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Path, show_path

ZSTD_LEVEL = 1  # as in jax's spec
_AT_ONCE = 4096  # chunks that are looked up
# The member of ``.zarray`` with its checksum.
_MEMBER, _CRC32 = "flax_ckpt_compat", "crc32"
_GZIP = 31  # how zlib calls its format
_DIFFERS = "doesn't match checksum"  # in what zstd says of a chunk with another content
_ALTERED = "is not what was saved: its checksum is another than the recorded one"
_MAX_RATIO = 2**16  # zstd expands 4 bytes to at most 128 KiB


@dataclasses.dataclass(frozen=True, slots=True)
class FolderArray:
    """A zarr array of the folder."""

    checkpoint: Location  # msgpack file that refers to it
    subpath: str  # path in the folder of arrays
    shape: tuple[int, ...]
    stored: np.dtype[Any]  # in the byte order of its chunks
    chunks: tuple[int, ...]  # shape of a chunk
    compressor: object  # its name, or what is in its place
    is_sound: bool | None  # whether its metadata is what was saved; None if it has no checksum

    @property
    def folder(self) -> Location:
        """Return the folder of its files."""
        return self.checkpoint.sibling(ARRAYS_POSTFIX) / self.subpath

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype in native byte order."""
        return self.stored.newbyteorder("=")

    @property
    def nbytes(self) -> int:
        """Return the size in memory, in bytes."""
        return math.prod(self.shape) * self.stored.itemsize


class _Wanted(NamedTuple):
    """An array of the folder, or a box of it, to read."""

    array: FolderArray
    path: Path  # key path of its leaf
    box: Box
    result: np.ndarray[Any, Any]  # the memory for the box


def locate(checkpoint: Location, subpath: str, path: Path) -> FolderArray:
    """Find the array of a placeholder by the text after its prefix, and read its ``.zarray``.

    Raise CorruptCheckpointError if the subpath leaves the folder, or the array is absent or does not decode."""
    if not stays_inside(subpath):
        raise _damaged(checkpoint, path, f"the reference {subpath!r} leads out of the folder of arrays")
    root = checkpoint.sibling(ARRAYS_POSTFIX)
    file = root / subpath / ZARR2_METADATA
    if not root.is_remote:
        ContainedFiles(root.path).check(os.path.join(subpath, ZARR2_METADATA))
    try:
        return _parse_metadata(checkpoint, subpath, json.loads(file.read(0, 2**20)))
    except MissingPathError as error:
        found = f"no array {root / subpath}; it was not copied along with the checkpoint"
        raise _damaged(checkpoint, path, found) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(checkpoint, path, f"{file} does not decode ({error})") from error


def _parse_metadata(checkpoint: Location, subpath: str, fields: Any) -> FolderArray:
    shape, chunks = fields["shape"], fields["chunks"]
    for lengths in (shape, chunks):
        if type(lengths) is not list or not all(type(size) is int and size >= 0 for size in lengths):
            raise ValueError(f"{lengths!r} is not a shape")
    if len(shape) != len(chunks) or 0 in chunks:
        raise ValueError(f"shape {shape} with chunks {chunks} is not a grid")
    known = (fields.get("dimension_separator", "."), fields.get("order", "C"), fields.get("filters") or None)
    if known != (".", "C", None):
        raise ValueError(f"a separator, order or filters {known} that no release of Flax writes")
    stored, compressor = dtypes.dtype_from_name(fields["dtype"]), fields.get("compressor")
    if stored.kind not in "biufcV":
        raise ValueError(f"{fields['dtype']!r} is no dtype of numbers")
    name = compressor.get("id") if isinstance(compressor, dict) else compressor
    return FolderArray(checkpoint, subpath, tuple(shape), stored, tuple(chunks), name, _is_sound(fields))


def unreferenced(checkpoint: Location, locators: Collection[Any]) -> list[str]:
    """Return what is in the folder of arrays and belongs to none of these locators, relative to the file's folder."""
    root = checkpoint.sibling(ARRAYS_POSTFIX)
    arrays = {os.path.normpath(one.subpath) for one in locators if isinstance(one, FolderArray)}
    files = [os.path.split(file) for file in root.files_below() if file != COMMIT_FILE]
    # A generation may belong to a save that is running.
    rest = [(folder or os.curdir, name) for folder, name in files if not is_generation(folder.partition("/")[0])]
    lost = {folder for folder, name in rest if name == ZARR2_METADATA} - arrays
    notes = [f"{folder} (an array of no leaf)" for folder in sorted(lost)]
    for folder, name in sorted(rest):
        if folder not in lost and not (folder in arrays and (name == ZARR2_METADATA or ZARR2_CHUNK.fullmatch(name))):
            notes.append(os.path.join(folder, name))
    return [os.path.normpath(os.path.join(root.name, note)) for note in notes]


def read(wanted: Collection[LeafHandle], meter: Meter, *, verify: bool) -> list[Any]:
    """Read arrays and slices, whose chunks are read and decoded in parallel.

    Content checksums are always verified, with ``verify`` also those of metadata. Raise CorruptCheckpointError if a
    chunk is missing or does not decode."""
    checked, pending = set[str](), list[_Wanted]()
    for handle in wanted:
        array, path = handle.locator, handle.path
        if verify and array.is_sound is False:
            found = f"{array.folder / ZARR2_METADATA} {_ALTERED}"
            more = ". To read it as it is, use config.override(checksums='off')"
            raise _damaged(array.checkpoint, path, found, ChecksumError, more)
        box = array_boxes.full_box(array.shape) if handle.index is None else handle.index
        with _translated(array, path):
            if array.subpath not in checked:
                _check_unchanged(array, path)
            checked.add(array.subpath)
            pending.append(_Wanted(array, path, box, memory.empty(array_boxes.shape_of(box), array.dtype)))

    def read_chunk(users: list[tuple[_Wanted, tuple[int, ...], Box]]) -> None:
        """Read one chunk for all that it holds a part of."""
        first, cell, _ = users[0]
        with _translated(first.array, first.path):
            data = _decode(first.array, (first.array.folder / (".".join(map(str, cell)) or "0")).read())
        for one, _, chunk in users:
            inside = array_boxes.overlap(chunk, one.box)
            part = data[array_boxes.relative_to(inside, chunk)]
            one.result[array_boxes.relative_to(inside, one.box)] = part
            meter.add(part.nbytes, one.path)

    cells = ((one, *cell) for one in pending for cell in array_boxes.cells(one.box, one.array.chunks))
    while some := list(itertools.islice(cells, _AT_ONCE)):  # a hostile grid has 2**60
        by_chunk: dict[Any, list[Any]] = {}
        for one, cell, chunk in some:
            by_chunk.setdefault((one.array.subpath, cell), []).append((one, cell, chunk))
        in_parallel(read_chunk, by_chunk.values())
    return [one.result for one in pending]


def _decode(array: FolderArray, stored: bytes) -> np.ndarray[Any, Any]:
    """Return the numbers of a chunk; raise ValueError or ZstdError if it does not hold as many."""
    nbytes = math.prod(array.chunks) * array.stored.itemsize
    if nbytes > len(stored) * _MAX_RATIO:
        raise ValueError(f"a chunk of {len(stored)} bytes cannot hold {nbytes}")
    if array.compressor is None:
        data = stored
    elif array.compressor == "gzip":
        data = zlib.decompressobj(_GZIP).decompress(stored, nbytes + 1)
    elif array.compressor != "zstd":
        raise ValueError(f"its compressor is {array.compressor!r:.100}, which no release of Flax writes")
    elif zstandard.frame_content_size(stored) in (-1, nbytes):  # -1: not recorded
        data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=nbytes, allow_extra_data=False)
    else:
        data = b""
    if len(data) != nbytes:
        raise ValueError(f"a chunk does not hold {nbytes} bytes")
    return np.frombuffer(data, array.stored).reshape(array.chunks)


def _check_unchanged(array: FolderArray, path: Path) -> None:
    """Raise ValueError if an array is another one since it was located, or its files cannot hold it."""
    now = locate(array.checkpoint, array.subpath, path)
    if now != array:
        raise ValueError(f"it is now {now.dtype}{now.shape}, it was {array.dtype}{array.shape}")
    if array.checkpoint.is_remote:
        return
    sizes = ContainedFiles(array.checkpoint.sibling(ARRAYS_POSTFIX).path).check_folder(array.subpath)
    chunks = [size for name, size in sizes.items() if name != ZARR2_METADATA]
    needed = math.prod(-(-length // side) for length, side in zip(array.shape, array.chunks, strict=True))
    if len(chunks) < needed or array.nbytes > sum(chunks) * _MAX_RATIO:
        found = f"{len(chunks)} files of {sum(chunks)} bytes"
        raise ValueError(f"{needed} files of chunks, for {array.nbytes} bytes, are needed, {found} are there")


@contextmanager
def _translated(array: FolderArray, path: Path) -> Iterator[None]:
    """Translate what decoding raises, and a missing file, into CorruptCheckpointError."""
    try:
        yield
    except (CheckpointError, ValueError, zlib.error, zstandard.ZstdError) as error:
        if isinstance(error, CheckpointError) and not isinstance(error, MissingPathError):
            raise
        found, kind = f"an array in {array.folder} cannot be read ({error})", CorruptCheckpointError
        if _DIFFERS in str(error):
            found, kind = f"a chunk in {array.folder} {_ALTERED}", ChecksumError
        raise _damaged(array.checkpoint, path, found, kind) from error


def _damaged(
    checkpoint: Location, path: Path, found: str, kind: type[CheckpointError] = CorruptCheckpointError, more: str = ""
) -> CheckpointError:
    leaf, folder = show_path(path), checkpoint.sibling(ARRAYS_POSTFIX)
    remedy = f"copy the folder {folder} again from where it was saved, or restore an older step"
    return kind(f"{checkpoint}: {leaf}: {found}; {remedy}{more}", path=checkpoint.path, leaf=leaf)


def with_sum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum of all other members to those of a ``.zarray``."""
    return {**fields, _MEMBER: {_CRC32: _sum(fields)}}


def _is_sound(fields: Mapping[str, Any]) -> bool | None:
    """Return whether the members of a ``.zarray`` are those that were saved; None if it has no checksum."""
    if _MEMBER in fields:
        return bool(fields[_MEMBER] == {_CRC32: _sum(fields)})
    # The name of the member may itself be damaged.
    return False if any(isinstance(value, dict) and _CRC32 in value for value in fields.values()) else None


def _sum(fields: Mapping[str, Any]) -> int:
    others = {name: value for name, value in fields.items() if name != _MEMBER}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())
