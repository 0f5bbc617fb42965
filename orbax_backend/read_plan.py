"""Plan how arrays are read: the chunks that they need, the byte ranges of raw chunks, and the copies out of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core.array_boxes import Box, Shape
from flax_ckpt_compat._core.byte_reads import PIECE_BYTES, Read
from flax_ckpt_compat._core.storage import Source
from flax_ckpt_compat._core.tree import Path, show_path

from .chunk_boxes import BoxLayout, ChunkPart
from .chunk_codecs import UndecodableChunkError
from .files import ByteRange
from .open_index import StoredValue
from .zarr import ArrayInfo

_Array = np.ndarray[Any, Any]
# A separate read costs about as much as reading over a page.
_SHORT_RUN_BYTES = 4096
_LONG_RUN_BYTES = 256 << 10
_IN_PLACE_BYTES = 64 << 10  # a smaller chunk is decoded faster to memory of its own, and copied


class DamagedChunkError(Exception):
    """A chunk of ``read`` with the key ``chunk`` does not decode: ``why``."""

    def __init__(self, read: ArrayRead, chunk: str, why: UndecodableChunkError) -> None:
        super().__init__(chunk)
        self.read, self.chunk, self.why = read, chunk, why


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A copy from a box of a chunk to a box of an array."""

    source: Box  # box in the chunk
    array: _Array  # array in C order
    target: Box  # box in the array

    @property
    def nbytes(self) -> int:
        """Return the bytes that are copied."""
        return math.prod(array_boxes.shape_of(self.source)) * self.array.itemsize


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

    def bytes_in(self, chunk: ByteRange) -> ByteRange | None:
        """Return the range of bytes that is the result, if the array is one raw chunk; None for several ranges."""
        info, layout = self.info, self.layout
        if not info.raw:
            return None
        if layout.is_chunk:
            return chunk
        if layout.box is None or info.chunks != info.shape:
            return None
        count, _ = array_boxes.runs(info.shape, layout.box, self.shape, array_boxes.full_box(self.shape))
        start = array_boxes.offset(info.shape, layout.box) * info.dtype.itemsize
        return ByteRange(chunk.file, chunk.offset + start, self.nbytes) if count == math.prod(self.shape) else None

    @property
    def is_raw(self) -> bool:
        """Return whether all chunks are stored as they are."""
        return self.info.raw and self.complete

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

    @property
    def keystr(self) -> str:
        """Return the key path as text."""
        return show_path(self.path)


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

    def scatter(self, data: memoryview) -> None:
        """Copy what was read without a target to the arrays, decoded."""
        info = self.read.info
        if info.codec is not None:
            decode(self.read, self.chunk, data, self.copies)
            return
        values = np.frombuffer(data, np.uint8, math.prod(self.shape) * info.dtype.itemsize)
        scatter(values.view(info.dtype).reshape(self.shape), self.copies)


def decode(read: ArrayRead, key: str, data: bytes | memoryview, copies: Sequence[Copy]) -> None:
    """Decode a chunk, directly into the array where that is possible; raise `DamagedChunkError`."""
    info, target = read.info, None
    size, (copy, *others) = info.chunk_nbytes, copies
    if not others and size >= _IN_PLACE_BYTES and array_boxes.shape_of(copy.source) == info.chunks:
        count, offsets = array_boxes.runs(info.chunks, copy.source, copy.array.shape, copy.target)
        if count * info.dtype.itemsize == size:
            start = next(offsets)[1] * info.dtype.itemsize
            target = copy.array.reshape(-1).view(np.uint8).data[start : start + size]
    try:
        assert info.codec is not None
        values = info.codec.decode(data, size, target)
    except UndecodableChunkError as error:
        raise DamagedChunkError(read, key, error) from error
    if target is None:
        scatter(np.frombuffer(values, np.uint8).view(info.dtype).reshape(info.chunks), copies)


def scatter(chunk: _Array, copies: Sequence[Copy]) -> None:
    """Copy boxes of a chunk to their arrays."""
    for copy in copies:
        copy.array[copy.target] = chunk[copy.source]


def by_chunk(group: Sequence[ArrayRead]) -> Collection[tuple[ChunkPart, Any, list[Copy]]]:
    """Return each chunk: a part of it, its stored value, and the copies out of it of all reads of one array."""
    wanted: dict[Shape, tuple[ChunkPart, Any, list[Copy]]] = {}
    for read in group:
        for value, part in read.chunks:
            wanted.setdefault(part.start, (part, value, []))[2].append(Copy(part.source, read.array, part.target))
    return wanted.values()


def plan_pieces(group: Sequence[ArrayRead]) -> list[Piece]:
    """Return the ranges to read for boxes of one array; decode and copy chunks that are inline at once."""
    if group[0].info.codec is None and all(read.layout.is_chunk for read in group):
        return [piece for read in group for piece in _plan_whole(read)]
    read, wanted = group[0], by_chunk(group)
    if read.info.codec is not None:
        for part, value, copies in wanted:
            if not isinstance(value, ByteRange):
                decode(read, part.key, value, copies)
        return [
            Piece(read, value, value, None, copies=copies, chunk=part.key)
            for part, value, copies in wanted
            if isinstance(value, ByteRange)
        ]
    return [piece for _, value, copies in wanted for piece in _plan_chunk(read, value, copies)]


def _plan_whole(read: ArrayRead) -> Iterable[Piece]:
    """Yield the piece of a read that is exactly one chunk; copy it at once if it is inline."""
    target = read.array.reshape(-1).view(np.uint8)
    for value, _ in read.chunks:
        if isinstance(value, ByteRange):
            yield Piece(read, value, value, target)
        else:
            target.data[:] = value


def _plan_chunk(read: ArrayRead, value: bytes | ByteRange, copies: Sequence[Copy]) -> list[Piece]:
    chunk, size = read.info.chunks, read.info.dtype.itemsize
    if not isinstance(value, ByteRange):
        scatter(np.frombuffer(value, np.uint8).view(read.info.dtype).reshape(chunk), copies)
        return []
    pieces: list[Piece] = []
    dense = 2 * sum(math.prod(array_boxes.shape_of(copy.source)) for copy in copies) > math.prod(chunk)
    scattered = []
    for copy in copies:
        count, offsets = array_boxes.runs(chunk, copy.source, copy.array.shape, copy.target)
        length = count * size
        in_one = count == math.prod(array_boxes.shape_of(copy.source))
        if not (in_one or length >= _LONG_RUN_BYTES or (length >= _SHORT_RUN_BYTES and not dense)):
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
