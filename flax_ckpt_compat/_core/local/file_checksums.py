"""Record the checksums of a file in an extended attribute of it, for formats that have no room for them.

The attribute moves with the file, and ``cp -a`` copies it. It is ignored once size or modification time of the file
differ from those that it records: another program may have written into the file.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import zlib
from contextlib import suppress

from flax_ckpt_compat._core import checksums

_ATTRIBUTE = "user.flax_ckpt_compat.checksums"
_VERSION = 1
# Version, algorithm, bytes of a unit, units of a block; size in bytes and modification time in ns of the file.
_HEADER = struct.Struct("<B7sIIQq")
_OWN_SUM = struct.Struct("<I")
# ext4 has 4 KiB for all attributes of a file.
_MAX_BLOCKS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class FileChecksums:
    """Recorded checksums of a file."""

    size: int  # of the file, in bytes
    units_per_block: int  # a block is so many units, of `checksums.BLOCK_BYTES`
    blocks: tuple[int, ...]  # of each block, the checksum of the checksums of its units
    crc: checksums.Crc

    @property
    def n_units(self) -> int:
        """Return the number of units of the file."""
        return -(-self.size // checksums.BLOCK_BYTES)


def record(descriptor: int, units: bytes) -> None:
    """Record the checksums of a written file's units; do nothing where there are no attributes.

    Sync the file after this, and write no more to it."""
    if not hasattr(os, "setxattr"):
        return
    per_block = max(1, -(-len(units) // checksums.SUM_BYTES // _MAX_BLOCKS))
    step = per_block * checksums.SUM_BYTES
    blocks = [checksums.CRCS[checksums.ALGORITHM](units[at : at + step]) for at in range(0, len(units), step)]
    with suppress(OSError):  # an attribute is optional: no support, no space for it, not allowed
        status = os.fstat(descriptor)
        algorithm = checksums.ALGORITHM.encode()
        header = _HEADER.pack(_VERSION, algorithm, checksums.BLOCK_BYTES, per_block, status.st_size, status.st_mtime_ns)
        content = header + struct.pack(f"<{len(blocks)}I", *blocks)
        os.setxattr(descriptor, _ATTRIBUTE, content + _OWN_SUM.pack(zlib.crc32(content)))


def recorded(descriptor: int) -> FileChecksums | None:
    """Return the recorded checksums of an open file; None if there are none, or the file was changed since."""
    if not hasattr(os, "getxattr"):
        return None
    try:
        content = os.getxattr(descriptor, _ATTRIBUTE)
        status = os.fstat(descriptor)
        end = len(content) - _OWN_SUM.size
        if end < _HEADER.size or _OWN_SUM.unpack(content[end:]) != (zlib.crc32(content[:end]),):
            return None
        version, algorithm, unit, per_block, size, mtime_ns = _HEADER.unpack_from(content)
        blocks = struct.unpack(f"<{(end - _HEADER.size) // 4}I", content[_HEADER.size : end])
    except (OSError, struct.error):
        return None
    crc = checksums.CRCS.get(algorithm.rstrip(b"\0").decode("ascii", "replace"))
    if crc is None or (version, unit) != (_VERSION, checksums.BLOCK_BYTES):
        return None
    sums = FileChecksums(size, per_block, blocks, crc)
    if (status.st_size, status.st_mtime_ns) != (size, mtime_ns) or not per_block:
        return None
    return sums if len(blocks) == -(-sums.n_units // per_block) else None
