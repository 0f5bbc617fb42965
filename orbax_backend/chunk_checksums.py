"""Check raw chunks against their recorded checksums while they are read; blocks that are read in parts are not."""

from __future__ import annotations

from typing import NamedTuple

from flax_ckpt_compat._core import array_boxes, checksums
from flax_ckpt_compat._core.array_boxes import Shape
from flax_ckpt_compat._core.byte_reads import Filled, Run
from flax_ckpt_compat._core.checksums import BLOCK_BYTES, SUM_BYTES, Crc

from .files import ByteRange
from .open_index import StoredValue
from .read_plan import ArrayRead
from .recorded_checksums import Checksums


class _Expected(NamedTuple):
    """The recorded checksums of one chunk."""

    read: ArrayRead  # a read that needs it, for errors
    key: str
    sums: bytes  # checksums of its blocks
    crc: Crc
    start: Shape  # of the chunk in the array

    def data_end(self) -> int:
        """Return how many bytes are before the last zeros with which zarr fills a chunk at the edge of an array."""
        info = self.read.info
        sides = zip(info.chunks, info.shape, self.start, strict=True)
        last = [min(chunk, length - at) - 1 for chunk, length, at in sides]
        return (array_boxes.offset(info.chunks, tuple(slice(at, at + 1) for at in last)) + 1) * info.dtype.itemsize


class Verifier:
    """Checks the chunks of one batch of reads."""

    def __init__(self, path: str, recorded: Checksums | None) -> None:
        self._path, self._recorded = path, recorded
        self._expected: dict[ByteRange, _Expected] = {}

    def expect(self, read: ArrayRead, key: str, value: StoredValue, start: Shape) -> None:
        """Note that a read needs a chunk, which has this start in the array, before it is read."""
        found = None if self._recorded is None else self._recorded.of_chunk(key, value)
        if found is not None and isinstance(value, ByteRange):
            self._expected[value] = _Expected(read, key, *found, start)

    def has(self, chunk: ByteRange) -> bool:
        """Return whether there are checksums of an expected chunk."""
        return chunk in self._expected

    def check(self, run: Run, filled: Filled) -> None:
        """Check the blocks of chunks that are in a run."""
        chunks = {read.content.within for read in run.reads} if self._expected else ()
        for chunk in chunks:
            if (expected := self._expected.get(chunk)) is not None:
                self._check(expected, chunk, run, filled)

    def _check(self, expected: _Expected, chunk: ByteRange, run: Run, filled: Filled) -> None:
        start, stop = max(run.start - chunk.offset, 0), min(run.stop - chunk.offset, chunk.length)
        for number in range(-(-start // BLOCK_BYTES), -(-stop // BLOCK_BYTES)):
            first, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, chunk.length)
            if end > stop != expected.data_end():
                break
            found = 0
            for _, part in filled.cut(chunk.offset + first, chunk.offset + min(end, stop)):
                found = expected.crc(part, found)
            found = expected.crc(bytes(max(end - stop, 0)), found)
            at = SUM_BYTES * number
            sums = expected.sums[:at] + checksums.encode(found) + expected.sums[at + SUM_BYTES :]
            leaf = expected.read.keystr
            checksums.check(self._path, f"the chunk {expected.key!r} of the leaf {leaf!r}", expected.sums, sums, leaf)
