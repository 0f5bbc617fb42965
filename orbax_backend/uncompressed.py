"""Chunks without a codec: which ranges of which files go to which memory, and reading them in threads."""

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
from .key_index import ByteRange

_Array = np.ndarray[Any, Any]
_THREADS = min(8, 2 * (os.cpu_count() or 1))
_PIECE_BYTES = 16 << 20
# A read of a page costs about what reading over it does.
_SHORT_RUN_BYTES = 4096
_LONG_RUN_BYTES = 256 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A box of a chunk that belongs into a box of an array.

    Attributes:
        source: in the chunk.
        array: C order.
        target: in the array.
    """

    source: Box
    array: _Array
    target: Box


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file, and what its bytes are for.

    Attributes:
        owner: whom errors are about.
        extent: the range.
        target: memory that takes the bytes as they are, or None.
        shape, copies: without a target: of the array that the bytes are, and which boxes of it go where.
    """

    owner: Any
    extent: ByteRange
    target: memoryview | None
    shape: Shape = ()
    copies: tuple[Copy, ...] = ()

    def read(self, fill: Callable[[Piece, memoryview], None]) -> None:
        """Has ``fill`` read the bytes and puts them where they belong."""
        if self.target is not None:
            fill(self, self.target)
            return
        buffer = memory.empty(self.shape, self.copies[0].array.dtype)
        fill(self, memory.as_bytes(buffer))
        scatter(buffer, self.copies)


def scatter(chunk: _Array, copies: Sequence[Copy]) -> None:
    """Copies boxes of a chunk in memory to where they belong."""
    for copy in copies:
        copy.array[copy.target] = chunk[copy.source]


def place(owner: Any, value: bytes | ByteRange, chunk: Shape, copies: Sequence[Copy]) -> list[Piece]:
    """What to read of one chunk; if its bytes are known already, they are copied at once.

    Args:
        owner: whom errors are about.
        value: the chunk, or where it lies.
        chunk: its shape.
        copies: what is wanted of it.
    """
    if not isinstance(value, ByteRange):
        scatter(np.frombuffer(value, np.uint8).view(copies[0].array.dtype).reshape(chunk), copies)
        return []
    pieces: list[Piece] = []
    dense = 2 * sum(math.prod(grid.shape_of(copy.source)) for copy in copies) > math.prod(chunk)
    scattered = []
    for copy in copies:
        count, places = grid.runs(chunk, copy.source, copy.array.shape, copy.target)
        length = count * copy.array.itemsize
        in_one = count == math.prod(grid.shape_of(copy.source))
        if in_one or length >= _LONG_RUN_BYTES or (length >= _SHORT_RUN_BYTES and not dense):
            pieces += _direct(owner, value, copy, length, places)
        else:
            scattered.append(copy)
    return pieces + (_bands(owner, value, chunk, scattered) if scattered else [])


def place_whole(owner: Any, value: Any, array: _Array) -> list[Piece]:
    """The same for a chunk that is an array: its bytes, or where they lie, go straight into place."""
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
    owner: Any, extent: ByteRange, copy: Copy, length: int, places: Iterator[tuple[int, int]]
) -> Iterator[Piece]:
    """Runs that are read straight into their places, long ones in parts for several threads."""
    size = copy.array.itemsize
    target = memory.as_bytes(copy.array)
    for source_at, target_at in places:
        for start in range(0, length, _PIECE_BYTES):
            count = min(_PIECE_BYTES, length - start)
            at = target_at * size + start
            found = ByteRange(extent.file, extent.offset + source_at * size + start, count)
            yield Piece(owner, found, target[at : at + count])


def _bands(owner: Any, extent: ByteRange, chunk: Shape, copies: Sequence[Copy]) -> list[Piece]:
    """Whole rows that are read aside, and of which columns are copied."""
    size = copies[0].array.itemsize
    pieces = []
    for band in grid.bands(grid.hull([copy.source for copy in copies]), chunk, max(1, _PIECE_BYTES // size)):
        shape = grid.shape_of(band)
        found = ByteRange(extent.file, extent.offset + grid.offset(chunk, band) * size, math.prod(shape) * size)
        inside = tuple(_inside(copy, band) for copy in copies if _meet(copy.source, band))
        if inside:
            pieces.append(Piece(owner, found, None, shape, inside))
    return pieces


def _meet(one: Box, other: Box) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True))


def _inside(copy: Copy, band: Box) -> Copy:
    """The part of a copy that lies in a band, as seen from the band."""
    part = grid.overlap(copy.source, band)
    target = tuple(
        slice(side.start - was.start + to.start, side.stop - was.start + to.start)
        for side, was, to in zip(part, copy.source, copy.target, strict=True)
    )
    return Copy(grid.within(part, band), copy.array, target)


def in_threads(function: Callable[[Piece], None], pieces: list[Piece]) -> None:
    """Calls the function with every piece, on several threads where that pays."""
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
