"""Read ranges of a local file, open as a descriptor: a rename replaces its name, not its bytes. Record its checksums.

Formats without room for checksums have them in an extended attribute, which moves with the file; ``cp -a`` copies it.
It is ignored if another program changed the file: size or modification time differ from those that it records.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.byte_reads import Source
from flax_ckpt_compat._core.errors import translated
from flax_ckpt_compat._core.local.presence import open_regular

MAPPED_FROM = 32 * 2**10  # bytes, below which a copy costs no more than the page faults
_ATTRIBUTE = "user.flax_ckpt_compat.checksums"
_VERSION = 1
# Version, algorithm, bytes of a unit, units of a block; size in bytes and modification time in ns of the file.
_HEADER = struct.Struct("<B7sIIQq")
# ext4 has 4 KiB for all attributes of a file.
_MAX_BLOCKS = 256


class LocalFile(Source):
    """A regular file, open at ``descriptor``."""

    # Between arrays are mostly keys and headers.
    gap, longest, is_local = 512, 256 * 2**10, True
    # Two more than CPUs: some wait for the disk while others copy.
    threads = min(8, (os.cpu_count() or 1) + 2)

    def __init__(self, path: str):
        self.path, self.descriptor = path, open_regular(path)
        self._closer = weakref.finalize(self, os.close, self.descriptor)
        self.size = os.fstat(self.descriptor).st_size

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        return b"" if stop <= start else os.pread(self.descriptor, stop - start, start)

    def fill(self, target: memoryview, offset: int) -> int:
        done = 0
        with translated(self.path, "read"):
            while done < len(target) and (count := os.preadv(self.descriptor, [target[done:]], offset + done)):
                done += count
        return done

    def map(self, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        """Map ranges (offset and length) as writable uint8 arrays over one mapping, which outlives this object.

        None is for ranges to read instead: empty or overlapping ones, those beyond the end, and all if the system
        cannot map the file. Writing to an array does not change the file; truncating that kills who reads the array."""
        views: list[np.ndarray[Any, Any] | None] = [None] * len(ranges)
        inside = [number for number, (offset, length) in enumerate(ranges) if length and offset + length <= self.size]
        first = end = min((ranges[number][0] for number in inside), default=0)
        size = max((sum(ranges[number]) for number in inside), default=0) - first
        with suppress(OSError, ValueError), os.fdopen(self.descriptor, "rb", closefd=False) as file:
            # Not the whole file: Linux refuses to map more than there is memory.
            mapping = np.asarray(np.memmap(file, np.uint8, "c", first, (size,)))
            for number in sorted(inside, key=ranges.__getitem__):
                offset, length = ranges[number]
                if end <= offset:
                    views[number] = mapping[offset - first :][:length]
                    end = offset + length
        return views

    def close(self) -> None:
        self._closer()
        self.descriptor, self.is_closed = -1, True


@dataclasses.dataclass(frozen=True, slots=True)
class FileChecksums:
    """Recorded checksums of a file."""

    size: int  # of the file, in bytes
    units_per_block: int  # a block is so many units, of `checksums.BLOCK_BYTES`
    blocks: tuple[int, ...]  # of each block, the checksum of the checksums of its units
    crc: checksums.Crc


def record_checksums(descriptor: int, units: bytes) -> None:
    """Record the checksums of the units of a file that is only synced after this, where there are attributes."""
    per_block = max(1, -(-len(units) // checksums.SUM_BYTES // _MAX_BLOCKS))
    step = per_block * checksums.SUM_BYTES
    blocks = [checksums.CRCS[checksums.ALGORITHM](units[at : at + step]) for at in range(0, len(units), step)]
    with suppress(OSError, AttributeError):  # an attribute is optional: no support, no space for it, not allowed
        status = os.fstat(descriptor)
        algorithm = checksums.ALGORITHM.encode()
        header = _HEADER.pack(_VERSION, algorithm, checksums.BLOCK_BYTES, per_block, status.st_size, status.st_mtime_ns)
        content = header + struct.pack(f"<{len(blocks)}I", *blocks)
        os.setxattr(descriptor, _ATTRIBUTE, content + checksums.encode(zlib.crc32(content)))


def recorded_checksums(descriptor: int) -> FileChecksums | None:
    """Return the recorded checksums of an open file; None if there are none, or the file was changed since."""
    try:
        content, status = os.getxattr(descriptor, _ATTRIBUTE), os.fstat(descriptor)
        content, own_sum = content[: -checksums.SUM_BYTES], content[-checksums.SUM_BYTES :]
        version, algorithm, unit, per_block, size, mtime_ns = _HEADER.unpack_from(content)
        blocks = struct.unpack(f"<{(len(content) - _HEADER.size) // 4}I", content[_HEADER.size :])
        crc = checksums.CRCS[algorithm.rstrip(b"\0").decode()]
    except (AttributeError, OSError, struct.error, KeyError, ValueError):
        return None
    is_known = (version, unit) == (_VERSION, checksums.BLOCK_BYTES) and own_sum == checksums.encode(zlib.crc32(content))
    is_same = (status.st_size, status.st_mtime_ns) == (size, mtime_ns)
    is_whole = per_block and len(blocks) == -(-size // (per_block * checksums.BLOCK_BYTES))
    return FileChecksums(size, per_block, blocks, crc) if is_known and is_same and is_whole else None
