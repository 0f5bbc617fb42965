"""Check raw chunks against their recorded checksums while they are read, in pieces of any size and order."""

from __future__ import annotations

import threading
from typing import NamedTuple

from flax_ckpt_compat._core import array_boxes, checksums
from flax_ckpt_compat._core.array_boxes import Shape
from flax_ckpt_compat._core.byte_reads import Filled, Run
from flax_ckpt_compat._core.checksums import BLOCK_BYTES, SUM_BYTES

from .files import ByteRange
from .open_index import StoredValue
from .read_plan import ArrayRead, Piece
from .recorded_checksums import Checksums
from .zarr import ArrayInfo


class _Expected(NamedTuple):
    """The recorded checksums of one chunk."""

    read: ArrayRead  # a read that needs it, for errors
    key: str
    sums: bytes  # checksums of its blocks
    start: Shape  # of the chunk in the array


class _Segment(NamedTuple):
    """A part of a block: its checksum, and its first and last byte in the block."""

    start: int
    stop: int
    sum: int


_Block = tuple[ByteRange, int]  # chunk, and number of the block


class Verifier:
    """Checks the chunks of one batch of reads."""

    def __init__(self, path: str, recorded: Checksums | None) -> None:
        self._path, self._recorded = path, recorded
        self._expected: dict[ByteRange, _Expected] = {}
        # Parts of blocks that were read.
        self._segments: dict[_Block, list[_Segment]] = {}
        self._lock = threading.Lock()

    def expect(self, read: ArrayRead, key: str, value: StoredValue, start: Shape) -> None:
        """Note that a read needs a chunk, which has this start in the array, before it is read."""
        sums = None if self._recorded is None else self._recorded.of_chunk(key, value)
        if sums is not None and isinstance(value, ByteRange):
            self._expected[value] = _Expected(read, key, sums, start)

    def has(self, chunk: ByteRange) -> bool:
        """Return whether there are checksums of an expected chunk."""
        return chunk in self._expected

    def add(self, run: Run, filled: Filled) -> None:
        """Check the blocks of chunks that are in a run, and note its parts of others."""
        for read in run.reads:
            piece: Piece = read.content
            chunk = piece.within
            parts = filled.cut(read.offset, read.offset + read.nbytes)
            if (expected := self._expected.get(chunk)) is not None:
                for at, data in parts:
                    self._add(expected, chunk, at - chunk.offset, data)

    def _add(self, expected: _Expected, chunk: ByteRange, start: int, data: memoryview) -> None:
        while data:
            number, offset = divmod(start, BLOCK_BYTES)
            part = data[: BLOCK_BYTES - offset]
            if len(part) == min(BLOCK_BYTES, chunk.length - number * BLOCK_BYTES):
                self._check(expected, number, checksums.crc32(part))
            else:
                self._note((chunk, number), offset, len(part), checksums.crc32(part))
            start, data = start + len(part), data[len(part) :]

    def _note(self, block: _Block, start: int, length: int, found: int) -> None:
        with self._lock:
            self._segments.setdefault(block, []).append(_Segment(start, start + length, found))

    def finish(self) -> None:
        """Check the blocks that were read in several parts, unless bytes were not read, or more than once."""
        for (chunk, number), segments in self._segments.items():
            length, (found, end) = min(BLOCK_BYTES, chunk.length - number * BLOCK_BYTES), _joined(segments)
            expected, missing = self._expected[chunk], length - end
            if missing and number * BLOCK_BYTES + end == _data_end(expected.read.info, expected.start):
                found, end = checksums.combine(found, checksums.crc32(bytes(missing)), missing), length
            if end == length:
                self._check(expected, number, found)

    def _check(self, expected: _Expected, number: int, found: int) -> None:
        at = SUM_BYTES * number
        if expected.sums[at : at + SUM_BYTES] != checksums.encode(found):
            sums = expected.sums[:at] + checksums.encode(found) + expected.sums[at + SUM_BYTES :]
            leaf = expected.read.keystr
            checksums.check(self._path, f"the chunk {expected.key!r} of the leaf {leaf!r}", expected.sums, sums, leaf)


def _joined(segments: list[_Segment]) -> tuple[int, int]:
    """Return the checksum of the bytes from the first one on that are there, and their number."""
    found = end = 0
    for start, stop, part in sorted(segments):
        if start == end:
            found, end = checksums.combine(found, part, stop - start) if end else part, stop
    return found, end


def _data_end(info: ArrayInfo, start: Shape) -> int:
    """Return how many bytes of a chunk are before its last padding; at the edge of an array zarr adds zeros."""
    last = [min(chunk, length - at) - 1 for chunk, length, at in zip(info.chunks, info.shape, start, strict=True)]
    return (array_boxes.offset(info.chunks, tuple(slice(at, at + 1) for at in last)) + 1) * info.dtype.itemsize
