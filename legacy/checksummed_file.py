"""Verify a file while its arrays are read: a local one by recorded checksums, an object by the store's CRC-32C.

A local file is read in units of 1 MiB, each by one system call, into the memory of its arrays where it can be, and
summed while it is in the CPU's cache.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.byte_reads import PIECE_BYTES, Deliver, Filled, Read, Run, cut, offset_of, read_runs
from flax_ckpt_compat._core.errors import ChecksumError, CorruptCheckpointError
from flax_ckpt_compat._core.local import file_checksums
from flax_ckpt_compat._core.local.file_checksums import FileChecksums
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.tree import show_path

from .read_bytes import File, MsgpackSource, StoredObject

UNIT = checksums.BLOCK_BYTES
# The rest are headers of the same arrays.
_ALMOST = UNIT // 16 * 15


def open_checksums(source: MsgpackSource) -> ChecksummedFile | None:
    """Return the recorded checksums of a file; None if there are none."""
    if not isinstance(source, File):
        return None
    sums = file_checksums.recorded(source.fileno())
    return None if sums is None else ChecksummedFile(source, sums)


def truncated(path: str, read: Read) -> CorruptCheckpointError:
    """Return the error for a file that ends inside a read."""
    leaf = show_path(read.owner)
    message = f"{path}: {leaf}: expected {read.nbytes} bytes of data from byte {read.offset}, found the "
    message += "end of the file; it was truncated while it was open; restore another checkpoint"
    return CorruptCheckpointError(message, path=path, leaf=leaf)


class ChecksummedFile:
    """An open file, its recorded checksums, and those of the units that were read."""

    def __init__(self, source: File, sums: FileChecksums) -> None:
        self._source, self._sums = source, sums
        self._units: list[int | None] = [None] * sums.n_units
        self._verified = [False] * len(sums.blocks)

    @property
    def is_verified(self) -> bool:
        """Return whether the whole file was verified."""
        return all(self._verified)

    def verify_data(self, data: bytes) -> None:
        """Verify the whole file, given its bytes."""
        view, units = memoryview(data), range(len(self._units))
        for unit in units:
            self._units[unit] = self._sums.crc(view[unit * UNIT : (unit + 1) * UNIT])
        self._verify(units, {})

    def verify_range(self, start: int, stop: int) -> None:
        """Read and verify the blocks that a range of the file intersects, but for those that were verified."""
        size = UNIT * self._sums.units_per_block
        blocks = range(start // size, min(-(-stop // size), len(self._verified)))
        units = [unit for block in blocks if not self._verified[block] for unit in self._sums.units_of(block)]
        self._read_units({unit: [] for unit in units}, set(units), bool, OFF)

    def read(self, reads: Iterable[Read], deliver: Deliver, meter: Meter, *, whole: bool) -> None:
        """Read parts of the file, and verify the blocks that they fill, or with ``whole`` the whole file.

        Units of which almost all is wanted are read as a whole, and others as far as they are wanted.
        """
        parts, cut_reads = _by_unit(reads, UNIT)
        if whole:
            parts |= {unit: [] for unit, found in enumerate(self._units) if found is None and unit not in parts}
            summed = set(parts)
        else:
            summed = {unit for unit, found in parts.items() if sum(part.nbytes for part in found) >= _ALMOST}
        self._read_units(parts, summed, deliver, meter)
        deliver(cut_reads)

    def _read_units(self, parts: dict[int, list[Read]], summed: set[int], deliver: Deliver, meter: Meter) -> None:
        runs = []
        for unit, found in sorted(parts.items()):
            start, stop = unit * UNIT, min((unit + 1) * UNIT, self._sums.size)
            if unit not in summed:
                start, stop = found[0].offset, max(part.offset + part.nbytes for part in found)
            runs.append(Run(self._source, start, stop, found))
        read_runs(runs, deliver, self._ended, meter, self._add)
        self._verify(summed, parts)

    def _add(self, run: Run, filled: Filled) -> None:
        """Note the checksum of a unit."""
        unit, inside = divmod(run.start, UNIT)
        if not inside and run.stop == min((unit + 1) * UNIT, self._sums.size):
            self._units[unit] = _sum(self._sums.crc, filled.pieces)

    def _ended(self, read: Read | None) -> CorruptCheckpointError:
        return self._changed() if read is None else truncated(self._source.path, read)

    def _verify(self, units: Iterable[int], parts: dict[int, list[Read]]) -> None:
        """Compare the checksums of blocks whose units are all known with the recorded ones."""
        for block in sorted({unit // self._sums.units_per_block for unit in units}):
            found = [self._units[unit] for unit in self._sums.units_of(block)]
            known = [checksums.encode(one) for one in found if one is not None]
            if len(known) == len(found):
                if self._sums.crc(b"".join(known)) != self._sums.blocks[block]:
                    raise self._damaged(block, parts)
                self._verified[block] = True

    def _damaged(self, block: int, parts: dict[int, list[Read]]) -> ChecksumError:
        path, units = self._source.path, self._sums.units_of(block)
        if file_checksums.recorded(self._source.fileno()) != self._sums:
            return self._changed()
        leaves = dict.fromkeys(show_path(part.owner) for unit in units for part in parts.get(unit, []))
        shown = ", ".join(map(repr, list(leaves)[:4])) + (", …" if len(leaves) > 4 else "")
        stop = min(units.stop * UNIT, self._sums.size)
        return ChecksumError(
            f"{path}: bytes {units.start * UNIT} to {stop} are not what was saved: their checksum differs from the "
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
    """A whole object of a store that reports the CRC-32C of its objects."""

    def __init__(self, source: StoredObject) -> None:
        self._source, self._lock = source, threading.Lock()
        self._found = self._end = 0  # the checksum of the bytes up to here
        # Pieces that arrived before one that is before them in the object: offset → bytes.
        self._early: dict[int, Sequence[memoryview]] = {}

    def read(self, reads: Sequence[Read], deliver: Deliver = bool, meter: Meter = OFF) -> bool:
        """Read parts, and the bytes between them; return False, without reading, if the store reports no CRC-32C.

        Raise ChecksumError if the bytes are not those of the store, also when they are read again."""
        source = self._source
        expected = source.location.stored_crc32c()
        if expected is None:
            return False
        (parts, cut_reads), starts = _by_unit(reads, PIECE_BYTES), range(0, source.size, PIECE_BYTES)
        for version in (source, source.opened):
            self._found = self._end = 0
            runs = [
                Run(version, at, min(at + PIECE_BYTES, source.size), parts.get(at // PIECE_BYTES, [])) for at in starts
            ]
            read_runs(runs, deliver, self._ended, meter, self._add)
            if self._found == expected:
                deliver(cut_reads)
                return True
        raise ChecksumError(
            f"{source.path}: the bytes that arrive have the CRC-32C {self._found:08x}, the store reports "
            f"{expected:08x}; they are changed in transit, or the store is damaged. Check the proxy before the store, "
            "or restore an older step. To read it as it is, set checksums='off'",
            path=source.path,
        )

    def _add(self, run: Run, filled: Filled) -> None:
        """Add a piece to the checksum, in order; raise if it differs from what the structure was parsed from."""
        if any(itertools.starmap(self._source.contradicts, zip(filled.pieces, filled.starts, strict=True))):
            raise self._changed()
        with self._lock:
            self._early[run.start] = filled.pieces
            while (pieces := self._early.pop(self._end, None)) is not None:
                self._found = _sum(checksums.crc32c, pieces, self._found)
                self._end += sum(map(len, pieces))

    def _ended(self, read: Read | None) -> CorruptCheckpointError:
        return self._changed() if read is None else truncated(self._source.path, read)

    def _changed(self) -> ChecksumError:
        path = self._source.path
        return ChecksumError(
            f"{path}: the bytes read when it was opened differ from those read later, so some were changed in "
            "transit; restore it again",
            path=path,
        )


def _by_unit(reads: Iterable[Read], size: int) -> tuple[dict[int, list[Read]], list[tuple[Read, memoryview]]]:
    """Cut reads where units of this size end; also return those without memory that were cut, or empty, with some."""
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


def _sum(checksum: Any, pieces: Iterable[memoryview], found: int = 0) -> int:
    for piece in pieces:
        found = checksum(piece, found)
    return int(found)
