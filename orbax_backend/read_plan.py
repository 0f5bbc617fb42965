"""Plan how arrays are read: the chunks that they need, the byte ranges of raw chunks, and the copies out of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from flax_ckpt_compat._core import array_boxes, errors, memory
from flax_ckpt_compat._core.array_boxes import Box, Shape
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.byte_reads import PIECE_BYTES, Read, Source

from .chunk_codecs import ChunkChecksumError, UndecodableChunkError, UnsupportedCodecError
from .files import ByteRange, corrupt_leaf
from .open_index import StoredValue
from .stored_names import key_prefix
from .zarr import ArrayInfo

_Array = np.ndarray[Any, Any]
# Of more chunks, as a hostile grid of 2**60 has them, each is found when it is needed.
_MAX_KNOWN = 512
# A separate read costs about as much as reading over a page.
_SHORT_RUN_BYTES = 4096
_IN_PLACE_BYTES = 64 << 10  # a smaller chunk is decoded faster to memory of its own, and copied


class ChunkPart(NamedTuple):
    """The part of a box that one chunk holds."""

    start: Shape  # start of the chunk in the array
    key: str  # key of the chunk, below the array's prefix
    source: Box  # box in the chunk
    target: Box  # box in the result


class BoxLayout:
    """The chunks that a box of an array, or all of it, intersects."""

    def __init__(self, info: ArrayInfo, box: Box | None = None) -> None:
        self.info, self._region = info, array_boxes.full_box(info.shape) if box is None else box
        self.shape = array_boxes.shape_of(self._region)  # like the next, of the result
        self.nbytes = math.prod(self.shape) * info.dtype.itemsize
        known = tuple(itertools.islice(self._find(), _MAX_KNOWN + 1))
        self.known = known if len(known) <= _MAX_KNOWN else None  # None if they are too many

    @property
    def parts(self) -> Iterable[ChunkPart]:
        """Return the part of each chunk."""
        return self._find() if self.known is None else self.known

    def _find(self) -> Iterator[ChunkPart]:
        for cell, chunk in array_boxes.cells(self._region, self.info.chunks):
            inside = array_boxes.overlap(chunk, self._region)
            yield ChunkPart(
                tuple(side.start for side in chunk),
                self.info.chunk_key(cell),
                array_boxes.relative_to(inside, chunk),
                array_boxes.relative_to(inside, self._region),
            )


class ArrayRead:
    """An array, or a box of it, to read."""

    def __init__(self, handle: LeafHandle, layout: BoxLayout) -> None:
        self.folder, self.name, self.path, self.layout = handle.reader.path, handle.name, handle.path, layout
        self.info, self.shape, self.nbytes = layout.info, layout.shape, layout.nbytes
        # Stored value of each chunk that it intersects, once located, and whether all of them are stored.
        self.chunks, self.complete = list[tuple[StoredValue, ChunkPart]](), True
        self.array: Any = None  # the result, with the stored dtype; None until its memory is there

    def __str__(self) -> str:
        return f"{self.info.dtype.name}{list(self.shape)}"

    def corrupt(
        self, what: str, error: type[errors.CheckpointError] = errors.CorruptCheckpointError
    ) -> errors.CheckpointError:
        """Return the error for an array that cannot be read."""
        remedy = "restore the files from a backup, or restore the other leaves only"
        return corrupt_leaf(self.folder, self.path, what, error, remedy)


class Copy(NamedTuple):
    """A copy from a box of a chunk to a box of an array."""

    source: Box  # box in the chunk
    array: _Array  # array in C order
    target: Box  # box in the array


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
        if self.read.info.raw:
            _scatter(data, self.read.info, self.shape, self.copies)
        else:
            _decode(self.read, self.chunk, data, self.copies)


def _decode(read: ArrayRead, key: str, data: bytes | memoryview, copies: Sequence[Copy]) -> None:
    """Decode a chunk, directly into the array where that is possible."""
    info, target, size = read.info, None, read.info.chunk_nbytes
    if size >= _IN_PLACE_BYTES and not info.raw and len(copies) == 1:
        part = copies[0].array[copies[0].target]
        if part.nbytes == size and part.flags.c_contiguous:
            target = memory.as_bytes(part)
    try:
        values = info.decode(data, target)
    except UndecodableChunkError as error:
        kinds = {ChunkChecksumError: errors.ChecksumError, UnsupportedCodecError: errors.UnrecognizedFormatError}
        kind = kinds.get(type(error), errors.CorruptCheckpointError)
        raise read.corrupt(f"its chunk {key_prefix(read.name) + key!r} {error}", kind) from error
    if values is not target:
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
            _decode(read, part.key, value, copies)
        elif not read.info.raw:
            pieces.append(Piece(read, value, value, None, copies=copies, chunk=part.key))
        else:
            pieces += _plan_raw(read, value, copies)
    return pieces


def runs(source: Shape, source_box: Box, target: Shape, target_box: Box) -> tuple[int, Iterator[tuple[int, int]]]:
    """Find the contiguous runs of a copy between boxes of two C-order arrays: their elements, and offsets in both."""
    extent = array_boxes.shape_of(source_box)
    axis = max(0, len(extent) - 1)
    while axis and extent[axis] == source[axis] == target[axis]:
        axis -= 1
    source_at, target_at = array_boxes.offset(source, source_box), array_boxes.offset(target, target_box)
    source_steps, target_steps = array_boxes.strides(source), array_boxes.strides(target)
    places = (
        (source_at + sum(map(mul, index, source_steps)), target_at + sum(map(mul, index, target_steps)))
        for index in itertools.product(*map(range, extent[:axis]))
    )
    return math.prod(extent[axis:]), places


def _plan_raw(read: ArrayRead, value: ByteRange, copies: Sequence[Copy]) -> list[Piece]:
    """Return the ranges of a raw chunk: long ones directly into the arrays, the others by whole rows."""
    chunk, size = read.info.chunks, read.info.dtype.itemsize
    pieces, scattered = list[Piece](), list[Copy]()
    is_dense = 2 * sum(math.prod(array_boxes.shape_of(copy.source)) for copy in copies) > math.prod(chunk)
    for copy in copies:
        count, offsets = runs(chunk, copy.source, copy.array.shape, copy.target)
        length = count * size
        is_contiguous = count == math.prod(array_boxes.shape_of(copy.source))
        if not is_contiguous and (is_dense or length < _SHORT_RUN_BYTES):
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
    sides = zip(*[copy.source for copy in copies], strict=True)
    rows = tuple(slice(min(one.start for one in some), max(one.stop for one in some)) for some in sides)
    for band in array_boxes.bands(rows, chunk, max(1, PIECE_BYTES // size)):
        shape = array_boxes.shape_of(band)
        found = ByteRange(extent.file, extent.offset + array_boxes.offset(chunk, band) * size, math.prod(shape) * size)
        inside = [_inside(copy, band) for copy in copies if array_boxes.overlaps(copy.source, band)]
        if inside:
            pieces.append(Piece(read, found, extent, None, shape, inside))
    return pieces


def _inside(copy: Copy, band: Box) -> Copy:
    """Return the part of a copy inside a band, relative to the band."""
    part = array_boxes.overlap(copy.source, band)
    moved = zip(array_boxes.relative_to(part, copy.source), copy.target, strict=True)
    target = tuple(slice(to.start + side.start, to.start + side.stop) for side, to in moved)
    return Copy(array_boxes.relative_to(part, band), copy.array, target)
