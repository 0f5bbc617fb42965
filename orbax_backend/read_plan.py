"""Plan how arrays are read: the chunks that they need, the byte ranges of raw chunks, and the copies out of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core.array_boxes import Box, Shape
from flax_ckpt_compat._core.byte_reads import PIECE_BYTES, Read
from flax_ckpt_compat._core.storage import Source
from flax_ckpt_compat._core.tree import Path

from .chunk_boxes import BoxLayout, ChunkPart
from .chunk_codecs import UndecodableChunkError
from .files import ByteRange
from .open_index import StoredValue
from .zarr import ArrayInfo

_Array = np.ndarray[Any, Any]
# A separate read costs about as much as reading over a page.
_SHORT_RUN_BYTES = 4096
_IN_PLACE_BYTES = 64 << 10  # a smaller chunk is decoded faster to memory of its own, and copied


class DamagedChunkError(Exception):
    """A chunk of ``read`` with the key ``chunk`` does not decode: ``why``."""

    def __init__(self, read: ArrayRead, chunk: str, why: UndecodableChunkError) -> None:
        super().__init__(chunk)
        self.read, self.chunk, self.why = read, chunk, why


class Copy(NamedTuple):
    """A copy from a box of a chunk to a box of an array."""

    source: Box  # box in the chunk
    array: _Array  # array in C order
    target: Box  # box in the array


@dataclasses.dataclass(slots=True, eq=False)
class ArrayRead:
    """An array, or a box of it, to read."""

    name: str
    path: Path  # key path, for messages
    layout: BoxLayout
    # Stored value of each chunk that it intersects, once located.
    chunks: list[tuple[StoredValue, ChunkPart]] = dataclasses.field(default_factory=list)
    complete: bool = True  # whether all of them are stored
    array: Any = None  # the result, with the stored dtype; None until its memory is there

    @property
    def info(self) -> ArrayInfo:
        """Return the metadata of the whole array."""
        return self.layout.info

    @property
    def shape(self) -> Shape:
        """Return the shape of the box to read."""
        return self.layout.shape

    @property
    def nbytes(self) -> int:
        """Return the size of the result in bytes."""
        return self.layout.nbytes

    def __str__(self) -> str:
        return f"{self.info.dtype.name}{list(self.shape)}"


@dataclasses.dataclass(slots=True, eq=False)
class Piece:
    """A byte range to read."""

    read: ArrayRead  # a read that needs it, for errors
    extent: ByteRange
    within: ByteRange  # the range of the whole chunk
    target: _Array | None  # memory for the bytes, or None
    shape: Shape = ()  # without a target: of the array in the range, with the copies out of it
    copies: Sequence[Copy] = ()
    chunk: str = ""  # key of the chunk, if the range is all of it and is decoded

    def range_of(self, source: Source) -> Read:
        """Return the read of the range from its file."""
        target = None if self.target is None else self.target.data
        # It is cut where the blocks of the chunk end, which are summed in the CPU's cache.
        return Read(source, *self.extent[1:], self.read.path, target, self, self.within.offset)

    def deliver(self, data: memoryview) -> None:
        """Copy what was read without a target to the arrays, decoded."""
        if self.read.info.codec is not None:
            decode(self.read, self.chunk, data, self.copies)
        else:
            _scatter(data, self.read.info, self.shape, self.copies)


def decode(read: ArrayRead, key: str, data: bytes | memoryview, copies: Sequence[Copy]) -> None:
    """Decode a chunk, directly into the array where that is possible; raise `DamagedChunkError`."""
    info, target = read.info, None
    size, (copy, *others) = info.chunk_nbytes, copies
    fits = size >= _IN_PLACE_BYTES and array_boxes.shape_of(copy.source) == info.chunks
    if fits and info.codec is not None and not others:
        count, offsets = array_boxes.runs(info.chunks, copy.source, copy.array.shape, copy.target)
        if count * info.dtype.itemsize == size:
            start = next(offsets)[1] * info.dtype.itemsize
            target = copy.array.reshape(-1).view(np.uint8).data[start : start + size]
    try:
        values = data if info.codec is None else info.codec.decode(data, size, target)
    except UndecodableChunkError as error:
        raise DamagedChunkError(read, key, error) from error
    if target is None:
        _scatter(values, info, info.chunks, copies)


def _scatter(data: bytes | memoryview, info: ArrayInfo, shape: Shape, copies: Sequence[Copy]) -> None:
    """Copy boxes of a chunk, or of a part of it, to their arrays."""
    values = np.frombuffer(data, np.uint8, math.prod(shape) * info.dtype.itemsize).view(info.dtype).reshape(shape)
    for copy in copies:
        copy.array[copy.target] = values[copy.source]


def plan_pieces(group: Sequence[ArrayRead]) -> list[Piece]:
    """Return the ranges to read for boxes of one array; decode and copy chunks that are inline at once."""
    read, pieces = group[0], list[Piece]()
    # Each chunk is read once for all boxes: start → a part of it, its stored value, and the copies out of it.
    wanted: dict[Shape, tuple[ChunkPart, StoredValue, list[Copy]]] = {}
    for one in group:
        for value, part in one.chunks:
            wanted.setdefault(part.start, (part, value, []))[2].append(Copy(part.source, one.array, part.target))
    for part, value, copies in wanted.values():
        if not isinstance(value, ByteRange):
            decode(read, part.key, value, copies)
        elif read.info.codec is not None:
            pieces.append(Piece(read, value, value, None, copies=copies, chunk=part.key))
        else:
            pieces += _plan_raw(read, value, copies)
    return pieces


def _plan_raw(read: ArrayRead, value: ByteRange, copies: Sequence[Copy]) -> list[Piece]:
    """Return the ranges of a raw chunk: long ones directly into the arrays, the others by whole rows."""
    chunk, size = read.info.chunks, read.info.dtype.itemsize
    pieces, scattered = list[Piece](), list[Copy]()
    is_dense = 2 * sum(math.prod(array_boxes.shape_of(copy.source)) for copy in copies) > math.prod(chunk)
    for copy in copies:
        count, offsets = array_boxes.runs(chunk, copy.source, copy.array.shape, copy.target)
        length = count * size
        is_one = count == math.prod(array_boxes.shape_of(copy.source))
        if not is_one and (is_dense or length < _SHORT_RUN_BYTES):
            scattered.append(copy)
            continue
        target = copy.array.reshape(-1).view(np.uint8)
        for source_at, target_at in offsets:
            extent = ByteRange(value.file, value.offset + source_at * size, length)
            pieces.append(Piece(read, extent, value, target[target_at * size : target_at * size + length]))
    return pieces + (_plan_bands(read, value, scattered) if scattered else [])


def _plan_bands(read: ArrayRead, extent: ByteRange, copies: Sequence[Copy]) -> list[Piece]:
    """Return ranges of whole rows to read into a buffer, from which columns are copied."""
    chunk, size = read.info.chunks, read.info.dtype.itemsize
    pieces = []
    for band in array_boxes.bands(
        array_boxes.bounding_box([copy.source for copy in copies]), chunk, max(1, PIECE_BYTES // size)
    ):
        shape = array_boxes.shape_of(band)
        found = ByteRange(extent.file, extent.offset + array_boxes.offset(chunk, band) * size, math.prod(shape) * size)
        inside = [_inside(copy, band) for copy in copies if array_boxes.overlaps(copy.source, band)]
        if inside:
            pieces.append(Piece(read, found, extent, None, shape, inside))
    return pieces


def _inside(copy: Copy, band: Box) -> Copy:
    """Return the part of a copy inside a band, relative to the band."""
    part = array_boxes.overlap(copy.source, band)
    target = tuple(
        slice(side.start - was.start + to.start, side.stop - was.start + to.start)
        for side, was, to in zip(part, copy.source, copy.target, strict=True)
    )
    return Copy(array_boxes.relative_to(part, band), copy.array, target)
