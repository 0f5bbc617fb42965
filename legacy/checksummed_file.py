"""Verify a file while its arrays are read: a local one by recorded checksums, an object by the store's CRC-32C."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.byte_reads import (
    PIECE_BYTES,
    Deliver,
    Filled,
    Read,
    Run,
    cut,
    neighbours,
    offset_of,
    read_runs,
)
from flax_ckpt_compat._core.errors import ChecksumError, CorruptCheckpointError
from flax_ckpt_compat._core.local.local_file import FileChecksums, recorded_checksums
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.tree import show_path

from .read_bytes import File, MsgpackSource, StoredObject


def open_checksums(source: MsgpackSource) -> ChecksummedFile | None:
    """Return the recorded checksums of a file; None if there are none."""
    if not isinstance(source, File):
        return None
    sums = recorded_checksums(source.fileno())
    return None if sums is None else ChecksummedFile(source, sums)


def truncated(path: str, read: Read) -> CorruptCheckpointError:
    """Return the error for a file that ends inside a read."""
    leaf = show_path(read.owner)
    message = f"{path}: {leaf}: expected {read.nbytes} bytes of data from byte {read.offset}, found the "
    message += "end of the file; it was truncated while it was open; restore another checkpoint"
    return CorruptCheckpointError(message, path=path, leaf=leaf)


class ChecksummedFile:
    """An open file, and the recorded checksums of its blocks; a block that is read whole is verified."""

    def __init__(self, source: File, sums: FileChecksums) -> None:
        self._source, self._sums = source, sums
        self._block_bytes = sums.units_per_block * checksums.BLOCK_BYTES
        self._verified = [False] * len(sums.blocks)

    @property
    def is_verified(self) -> bool:
        """Return whether the whole file was verified."""
        return all(self._verified)

    def verify_data(self, data: bytes) -> None:
        """Verify the whole file, given its bytes."""
        view = memoryview(data)
        for block in range(len(self._verified)):
            run = self._run(block, [])
            self._check(run, Filled([run.start], [view[run.start : run.stop]]))

    def verify_range(self, start: int, stop: int) -> None:
        """Read and verify the blocks that a range of the file intersects, but for those that were verified."""
        blocks = range(start // self._block_bytes, min(-(-stop // self._block_bytes), len(self._verified)))
        runs = [self._run(block, []) for block in blocks if not self._verified[block]]
        read_runs(runs, bool, self._ended, OFF, self._check)

    def read(self, reads: Iterable[Read], deliver: Deliver, meter: Meter, *, whole: bool) -> None:
        """Read parts of the file; read and verify the blocks that they fill almost, or with ``whole`` all blocks."""
        parts, cut_reads = _by_block(reads, self._block_bytes)
        if whole:
            parts = {block: [] for block, verified in enumerate(self._verified) if not verified} | parts
        # The rest of a block are headers of the same arrays.
        almost = self._block_bytes // 16 * 15
        filled = [block for block in sorted(parts) if whole or sum(part.nbytes for part in parts[block]) >= almost]
        runs = [self._run(block, parts.pop(block)) for block in filled]
        read_runs(runs, deliver, self._ended, meter, self._check)
        read_runs(neighbours(itertools.chain.from_iterable(parts.values())), deliver, self._ended, meter)
        deliver(cut_reads)

    def _run(self, block: int, reads: Sequence[Read]) -> Run:
        start = block * self._block_bytes
        return Run(self._source, start, min(start + self._block_bytes, self._sums.size), reads)

    def _check(self, run: Run, filled: Filled) -> None:
        """Compare the checksum of a block with the recorded one."""
        block, units = run.start // self._block_bytes, checksums.BlockSums(self._sums.crc)
        for piece in filled.pieces:
            units.update(piece)
        if self._sums.crc(units.encoded()) != self._sums.blocks[block]:
            raise self._damaged(run)
        self._verified[block] = True

    def _ended(self, read: Read | None) -> CorruptCheckpointError:
        return self._changed() if read is None else truncated(self._source.path, read)

    def _damaged(self, run: Run) -> ChecksumError:
        path = self._source.path
        if recorded_checksums(self._source.fileno()) != self._sums:
            return self._changed()
        leaves = dict.fromkeys(show_path(part.owner) for part in run.reads)
        shown = ", ".join(map(repr, list(leaves)[:4])) + (", …" if len(leaves) > 4 else "")
        return ChecksumError(
            f"{path}: bytes {run.start} to {run.stop} are not what was saved: their checksum differs from the "
            f"recorded one{f', and they hold data of {shown}' if leaves else ''}. Restore the file from a backup, or "
            f"restore an older step. To read it as it is, set checksums='off'",
            path=path,
            leaf=next(iter(leaves)) if len(leaves) == 1 else None,
        )

    def _changed(self) -> ChecksumError:
        path = self._source.path
        return ChecksumError(
            f"{path}: another program has written into the file while it was read; restore it again", path=path
        )


class ChecksummedObject:
    """A whole object of a store that reports the CRC-32C of its objects, and the checksum of what was read."""

    def __init__(self, source: StoredObject) -> None:
        self._source = source
        # The checksum of all bytes up to an offset, and pieces that arrived before those in front of them.
        self._sum = self._at = 0
        self._early: dict[int, Filled] = {}
        self._lock = threading.Lock()

    def read(self, reads: Sequence[Read], deliver: Deliver = bool, meter: Meter = OFF) -> bool:
        """Read parts, and the bytes between them; return False, without reading, if the store reports no CRC-32C.

        Raise ChecksumError if the bytes are not those of the store, also when they are read again."""
        source = self._source
        expected = source.location.stored_crc32c()
        if expected is None:
            return False
        (parts, cut_reads), starts = _by_block(reads, PIECE_BYTES), range(0, source.size, PIECE_BYTES)
        for version in (source, source.opened):
            self._sum = self._at = 0
            runs = [
                Run(version, at, min(at + PIECE_BYTES, source.size), parts.get(at // PIECE_BYTES, [])) for at in starts
            ]
            read_runs(runs, deliver, self._ended, meter, self._add)
            if self._sum == expected:
                deliver(cut_reads)
                return True
        raise ChecksumError(
            f"{source.path}: the bytes that arrive have the CRC-32C {self._sum:08x}, the store reports "
            f"{expected:08x}; they are changed in transit, or the store is damaged. Check the proxy before the store, "
            "or restore an older step. To read it as it is, set checksums='off'",
            path=source.path,
        )

    def _add(self, run: Run, filled: Filled) -> None:
        """Add a piece to the checksum, in the order of the file; raise if the structure was parsed from other bytes."""
        if any(itertools.starmap(self._source.contradicts, zip(filled.pieces, filled.starts, strict=True))):
            raise self._changed()
        with self._lock:
            self._early[run.start] = filled
            while (next_one := self._early.pop(self._at, None)) is not None:
                for piece in next_one.pieces:
                    self._sum = checksums.crc32c(piece, self._sum)
                    self._at += len(piece)

    def _ended(self, read: Read | None) -> CorruptCheckpointError:
        return self._changed() if read is None else truncated(self._source.path, read)

    def _changed(self) -> ChecksumError:
        path = self._source.path
        return ChecksumError(
            f"{path}: the bytes read when it was opened differ from those read later, so some were changed in "
            "transit; restore it again",
            path=path,
        )


def _by_block(reads: Iterable[Read], size: int) -> tuple[dict[int, list[Read]], list[tuple[Read, memoryview]]]:
    """Cut reads where blocks of this size end; also return those without memory that were cut, or empty, with some."""
    parts: dict[int, list[Read]] = {}
    cut_reads: list[tuple[Read, memoryview]] = []
    for read in sorted(reads, key=offset_of):
        if read.nbytes and read.offset // size == (read.offset + read.nbytes - 1) // size:
            parts.setdefault(read.offset // size, []).append(read)
            continue
        target = np.empty(read.nbytes, np.uint8).data if read.target is None else read.target
        if read.target is None:
            cut_reads.append((read, target))
        for part in cut(read._replace(target=target, origin=0), size):
            parts.setdefault(part.offset // size, []).append(part)
    return parts, cut_reads
