"""Compute checksums of what is stored, one for every block of 1 MiB: CRC-32C; those of older releases are CRC-32."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

from crc32c import crc32c as crc32c

# Returns the checksum of bytes, or, with that of those before them, of all.
Crc = Callable[..., int]
# Name in what is written → the function.
CRCS: dict[str, Crc] = {"crc32c": crc32c, "crc32": zlib.crc32}
ALGORITHM = "crc32c"  # of what is written now
BLOCK_BYTES = 1 << 20
SUM_BYTES = 4  # of a checksum as it is recorded, little-endian
encode = struct.Struct("<I").pack


def of_blocks(data: Any, crc: Crc = crc32c) -> bytes:
    """Return the checksums of the blocks of a buffer of single bytes."""
    view = memoryview(data)
    return b"".join([encode(crc(view[at : at + BLOCK_BYTES])) for at in range(0, len(view), BLOCK_BYTES)])
