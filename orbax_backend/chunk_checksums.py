"""Check raw chunks against their checksums while they are read: those recorded, in pieces of any size and order, and
those at their ends."""

from __future__ import annotations

import threading
from typing import NamedTuple

from flax_ckpt_compat._core import array_boxes, checksums
from flax_ckpt_compat._core.array_boxes import Shape
from flax_ckpt_compat._core.byte_reads import Filled, Run
from flax_ckpt_compat._core.checksums import BLOCK_BYTES, SUM_BYTES

from .checksum_file import Checksums
from .files import ByteRange
from .open_index import StoredValue
from .read_plan import ArrayRead, DamagedChunkError, Piece, is_intact
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


class Verifier:
    """Checks the chunks of one batch of reads."""

    def __init__(self, path: str, recorded: Checksums | None) -> None:
        self._path, self._recorded = path, recorded
        self._expected: dict[ByteRange, _Expected] = {}
        # By chunk and number of the block.
        self._segments: dict[tuple[ByteRange, int], list[_Segment]] = {}
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
        """Check or note bytes of chunks; see `flax_ckpt_compat._core.byte_reads.Sums`."""
        for read in run.reads:
            piece: Piece = read.content
            expected, chunk = self._expected.get(piece.within), piece.within
            if piece.chunk is None and expected is None:
                continue
            for at, data in filled.cut(read.offset, read.offset + read.nbytes):
                if piece.chunk is not None:
                    piece.crc32c = checksums.crc32c(data, piece.crc32c)
                    if at + len(data) == read.offset + read.nbytes and not is_intact(piece.crc32c):
                        raise DamagedChunkError(piece.read, piece.chunk)
                elif expected is not None:
                    self._add(expected, chunk, at - chunk.offset, data)

    def _add(self, expected: _Expected, chunk: ByteRange, start: int, data: memoryview) -> None:
        """Check the blocks in bytes of a chunk, from ``start`` in it, and note the parts of others."""
        while data:
            number, offset = divmod(start, BLOCK_BYTES)
            part = data[: BLOCK_BYTES - offset]
            found = checksums.crc32(part)
            if len(part) == min(BLOCK_BYTES, chunk.length - number * BLOCK_BYTES):
                self._check(expected, number, found)
            else:
                with self._lock:
                    segments = self._segments.setdefault((chunk, number), [])
                    segments.append(_Segment(offset, offset + len(part), found))
            start, data = start + len(part), data[len(part) :]

    def finish(self) -> None:
        """Check the blocks that were read in several parts, unless bytes were not read, or more than once."""
        for (chunk, number), segments in self._segments.items():
            length, end, found = min(BLOCK_BYTES, chunk.length - number * BLOCK_BYTES), 0, 0
            for start, stop, part in sorted(segments):
                if start == end:
                    found, end = checksums.combine(found, part, stop - start), stop
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


def _data_end(info: ArrayInfo, start: Shape) -> int:
    """Return how many bytes of a chunk are before its last padding; at the edge of an array zarr adds zeros."""
    last = [min(chunk, length - at) - 1 for chunk, length, at in zip(info.chunks, info.shape, start, strict=True)]
    return (array_boxes.offset(info.chunks, tuple(slice(at, at + 1) for at in last)) + 1) * info.dtype.itemsize
