"""Verify a file while its arrays are read: a local one by recorded checksums, an object by the store's CRC-32C."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import numpy as np

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.byte_reads import PIECE_BYTES, Deliver, Read, Run, Source, cut, neighbours, read_runs
from flax_ckpt_compat._core.errors import ChecksumError
from flax_ckpt_compat._core.local.local_file import FileChecksums, LocalFile, recorded_checksums
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.tree import show_path

# Requests to a store are so many that some are under way at once, and joint ones not too small or large for that.
_STORE_RUNS, _MIN_STORE_RUN, _MAX_STORE_RUN = 12, 2 * 2**20, 8 * 2**20
_REMEDY = "restore an older step. To read it as it is, use config.override(checksums='off')"


def open_checksums(source: Source) -> ChecksummedFile | ChecksummedObject | None:
    """Return the recorded checksums of a file, or the store's of an object; None if there are none."""
    if isinstance(source, LocalFile):
        recorded = recorded_checksums(source.descriptor)
        return None if recorded is None else ChecksummedFile(source, recorded)
    expected = source.crc32c
    return None if expected is None else ChecksummedObject(source, expected)


def read_unverified(source: Source, reads: Sequence[Read], deliver: Deliver, meter: Meter) -> None:
    """Read parts of a file or object, those of an object by requests of about one size."""
    longest = min(max(sum([read.nbytes for read in reads]) // _STORE_RUNS, _MIN_STORE_RUN), _MAX_STORE_RUN)
    runs = neighbours(reads, PIECE_BYTES, None if source.is_local else longest)
    read_runs(runs, deliver, meter)


class ChecksummedFile:
    """An open file, and the recorded checksums of its blocks; a block that is read whole is verified."""

    def __init__(self, source: LocalFile, sums: FileChecksums) -> None:
        self._source, self._sums = source, sums
        self._block_bytes = sums.units_per_block * checksums.BLOCK_BYTES
        self._verified = [False] * len(sums.blocks)

    @property
    def is_verified(self) -> bool:
        """Return whether the whole file was verified."""
        return all(self._verified)

    def verify_data(self, data: bytes) -> None:
        """Verify the whole file, given its bytes."""
        for block in range(len(self._verified)):
            run = self._run(block, [])
            self._check(run, memoryview(data)[run.start : run.stop])

    def verify(self, start: int, stop: int) -> bool:
        """Read and verify the blocks that a range of the file intersects, but for those that were verified."""
        blocks = range(start // self._block_bytes, min(-(-stop // self._block_bytes), len(self._verified)))
        runs = [self._run(block, []) for block in blocks if not self._verified[block]]
        read_runs(runs, lambda _: None, OFF, self._check)
        return True

    def read(self, reads: Sequence[Read], deliver: Deliver, meter: Meter, *, whole: bool) -> None:
        """Read parts of the file; read and verify the blocks that they fill almost, or with ``whole`` all blocks."""
        parts, cut_reads = _by_block(reads, self._block_bytes)
        if whole:
            parts = {block: [] for block, verified in enumerate(self._verified) if not verified} | parts
        # The rest of a block are headers of the same arrays.
        almost = self._block_bytes // 16 * 15
        filled = [block for block in sorted(parts) if whole or sum(part.nbytes for part in parts[block]) >= almost]
        runs = [self._run(block, parts.pop(block)) for block in filled]
        read_runs(runs, deliver, meter, self._check)
        read_runs(neighbours(itertools.chain.from_iterable(parts.values())), deliver, meter)
        deliver(cut_reads)

    def _run(self, block: int, reads: Sequence[Read]) -> Run:
        start = block * self._block_bytes
        return Run(self._source, start, min(start + self._block_bytes, self._sums.size), reads)

    def _check(self, run: Run, data: memoryview) -> None:
        """Compare the checksum of a block with the recorded one."""
        block, crc = run.start // self._block_bytes, self._sums.crc
        if crc(checksums.of_blocks(data, crc)) != self._sums.blocks[block]:
            raise self._damaged(run)
        self._verified[block] = True

    def _damaged(self, run: Run) -> ChecksumError:
        path = self._source.path
        if recorded_checksums(self._source.descriptor) != self._sums:
            return ChecksumError(f"{path}: it is not what it was when it was opened; restore it again", path=path)
        leaves = list(dict.fromkeys(show_path(part.owner) for part in run.reads))
        shown = ", ".join(map(repr, leaves[:4])) + (", …" if len(leaves) > 4 else "")
        return ChecksumError(
            f"{path}: bytes {run.start} to {run.stop} are not what was saved: their checksum differs from the recorded "
            f"one{f', and they hold data of {shown}' if leaves else ''}. Restore the file from a backup, or {_REMEDY}",
            path=path,
            leaf=leaves[0] if len(leaves) == 1 else None,
        )


class ChecksummedObject:
    """An object of a store that reports the CRC-32C of its objects, which is verified where it is read whole."""

    def __init__(self, source: Source, expected: int) -> None:
        self._source, self._expected, self.is_verified = source, expected, False

    def verify_data(self, data: bytes) -> None:
        """Verify the whole object, given its bytes."""
        self._check(checksums.crc32c(data))

    def verify(self, _start: int, _stop: int) -> bool:
        """Read and verify the whole object once."""
        if not self.is_verified:
            self.read([], lambda _: None, OFF, whole=True)
        return True

    def read(self, reads: Sequence[Read], deliver: Deliver, meter: Meter, *, whole: bool) -> None:
        """Read parts, of the ``whole`` object with the bytes between them."""
        source, found, filled = self._source, 0, dict[int, memoryview]()
        if not whole:
            return read_unverified(source, reads, deliver, meter)
        parts, cut_reads = _by_block(reads, PIECE_BYTES)
        starts = range(0, source.size, PIECE_BYTES)
        for first in range(0, len(starts), source.threads):
            runs = [
                Run(source, start, min(start + PIECE_BYTES, source.size), parts.get(start // PIECE_BYTES, []))
                for start in starts[first : first + source.threads]
            ]
            read_runs(runs, deliver, meter, lambda run, data: filled.update({run.start: data}))
            for run in runs:
                found = checksums.crc32c(filled.pop(run.start), found)
        self._check(found)
        deliver(cut_reads)
        return None

    def _check(self, found: int) -> None:
        path = self._source.path
        if found != self._expected:
            raise ChecksumError(
                f"{path}: the bytes that arrive have the CRC-32C {found:08x}, the store reports {self._expected:08x}; "
                f"they are changed in transit, or the store is damaged. Check the proxy before the store, or {_REMEDY}",
                path=path,
            )
        self.is_verified = True


def _by_block(reads: Iterable[Read], size: int) -> tuple[dict[int, list[Read]], list[tuple[Read, memoryview]]]:
    """Cut reads where blocks of this size end; also return those without memory that were cut, or empty, with some."""
    parts: dict[int, list[Read]] = {}
    cut_reads: list[tuple[Read, memoryview]] = []
    for read in sorted(reads, key=operator.attrgetter("offset")):
        if read.nbytes and read.offset // size == (read.offset + read.nbytes - 1) // size:
            parts.setdefault(read.offset // size, []).append(read)
            continue
        target = np.empty(read.nbytes, np.uint8).data if read.target is None else read.target
        if read.target is None:
            cut_reads.append((read, target))
        for part in cut(read._replace(target=target, origin=0), size):
            parts.setdefault(part.offset // size, []).append(part)
    return parts, cut_reads
