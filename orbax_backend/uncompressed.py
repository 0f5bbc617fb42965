"""Plan ranged reads of raw chunks (without a codec) into memory, and run them in threads."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.thread_pools import Pool

from . import grid
from .grid import Box, Shape
from .stored_values import ByteRange

_Array = np.ndarray[Any, Any]
_THREADS = min(8, 2 * (os.cpu_count() or 1))
_PIECE_BYTES = 16 << 20
# A separate read costs about as much as reading over a page.
_SHORT_RUN_BYTES = 4096
_LONG_RUN_BYTES = 256 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A copy from a box of a chunk to a box of an array.

    Attributes:
        source: box in the chunk.
        array: array in C order.
        target: box in the array.
    """

    source: Box
    array: _Array
    target: Box


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file to read.

    Attributes:
        owner: the job, for errors.
        extent: the range.
        target: memory for the bytes, or None.
        shape, copies: without a target: shape of the array in the range, and the copies out of it.
    """

    owner: Any
    extent: ByteRange
    target: memoryview | None
    shape: Shape = ()
    copies: tuple[Copy, ...] = ()

    def read(self, fill: Callable[[Piece, memoryview], None]) -> None:
        """Read the bytes with ``fill`` into their targets."""
        if self.target is not None:
            fill(self, self.target)
            return
        buffer = memory.empty(self.shape, self.copies[0].array.dtype)
        fill(self, memory.as_bytes(buffer))
        scatter(buffer, self.copies)


def scatter(chunk: _Array, copies: Sequence[Copy]) -> None:
    """Copy boxes of a chunk to their arrays."""
    for copy in copies:
        copy.array[copy.target] = chunk[copy.source]


def plan_chunk(owner: Any, value: bytes | ByteRange, chunk: Shape, copies: Sequence[Copy]) -> list[Piece]:
    """Return the ranges to read of one chunk; copy a chunk that is inline at once.

    Args:
        owner: the job, for errors.
        value: bytes or byte range of the chunk.
        chunk: shape of the chunk.
        copies: copies out of the chunk.
    """
    if not isinstance(value, ByteRange):
        scatter(np.frombuffer(value, np.uint8).view(copies[0].array.dtype).reshape(chunk), copies)
        return []
    pieces: list[Piece] = []
    dense = 2 * sum(math.prod(grid.shape_of(copy.source)) for copy in copies) > math.prod(chunk)
    scattered = []
    for copy in copies:
        count, offsets = grid.runs(chunk, copy.source, copy.array.shape, copy.target)
        length = count * copy.array.itemsize
        in_one = count == math.prod(grid.shape_of(copy.source))
        if in_one or length >= _LONG_RUN_BYTES or (length >= _SHORT_RUN_BYTES and not dense):
            pieces += _direct(owner, value, copy, length, offsets)
        else:
            scattered.append(copy)
    return pieces + (_bands(owner, value, chunk, scattered) if scattered else [])


def plan_whole_chunk(owner: Any, value: Any, array: _Array) -> list[Piece]:
    """Return the ranges to read of a chunk that is a whole array; copy one that is inline at once."""
    target = memory.as_bytes(array)
    if not isinstance(value, ByteRange):
        target[:] = value
        return []
    starts = range(0, value.length, _PIECE_BYTES)
    parts = [target[start : start + _PIECE_BYTES] for start in starts]
    return [
        Piece(owner, ByteRange(value.file, value.offset + start, len(part)), part)
        for start, part in zip(starts, parts, strict=True)
    ]


def _direct(
    owner: Any, extent: ByteRange, copy: Copy, length: int, offsets: Iterator[tuple[int, int]]
) -> Iterator[Piece]:
    """Yield runs to read directly into the array; split long ones for several threads."""
    size = copy.array.itemsize
    target = memory.as_bytes(copy.array)
    for source_at, target_at in offsets:
        for start in range(0, length, _PIECE_BYTES):
            count = min(_PIECE_BYTES, length - start)
            at = target_at * size + start
            found = ByteRange(extent.file, extent.offset + source_at * size + start, count)
            yield Piece(owner, found, target[at : at + count])


def _bands(owner: Any, extent: ByteRange, chunk: Shape, copies: Sequence[Copy]) -> list[Piece]:
    """Return ranges of whole rows to read into a buffer, from which columns are copied."""
    size = copies[0].array.itemsize
    pieces = []
    for band in grid.bands(grid.bounding_box([copy.source for copy in copies]), chunk, max(1, _PIECE_BYTES // size)):
        shape = grid.shape_of(band)
        found = ByteRange(extent.file, extent.offset + grid.offset(chunk, band) * size, math.prod(shape) * size)
        inside = tuple(_inside(copy, band) for copy in copies if _overlaps(copy.source, band))
        if inside:
            pieces.append(Piece(owner, found, None, shape, inside))
    return pieces


def _overlaps(one: Box, other: Box) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True))


def _inside(copy: Copy, band: Box) -> Copy:
    """Return the part of a copy inside a band, relative to the band."""
    part = grid.overlap(copy.source, band)
    target = tuple(
        slice(side.start - was.start + to.start, side.stop - was.start + to.start)
        for side, was, to in zip(part, copy.source, copy.target, strict=True)
    )
    return Copy(grid.relative_to(part, band), copy.array, target)


def in_threads(function: Callable[[Piece], None], pieces: list[Piece]) -> None:
    """Call the function with every piece; use threads for many bytes."""
    if sum(piece.extent.length for piece in pieces) < _PIECE_BYTES // 4:
        _each(function, pieces)
        return
    with Pool(_THREADS) as pool:
        # Few tasks of many pieces: a task costs more than a small read.
        step = max(1, len(pieces) // (_THREADS * 8))
        groups = [pieces[start : start + step] for start in range(0, len(pieces), step)]
        for done in [pool.submit(_each, function, group) for group in groups]:
            done.result()


def _each(function: Callable[[Piece], None], pieces: list[Piece]) -> None:
    for piece in pieces:
        function(piece)
