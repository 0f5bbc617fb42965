"""Compute checksums of what is stored, one for every block of 1 MiB: CRC-32C; those of older releases are CRC-32."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from crc32c import crc32c as crc32c

from flax_ckpt_compat._core.errors import ChecksumError

# Returns the checksum of bytes, or, with that of those before them, of all.
Crc = Callable[..., int]
# Name in what is written → the function.
CRCS: dict[str, Crc] = {"crc32c": crc32c, "crc32": zlib.crc32}
ALGORITHM = "crc32c"  # of what is written now
BLOCK_BYTES = 1 << 20
SUM_BYTES = 4


class BlockSums:
    """The checksums of a stream of bytes, block by block."""

    def __init__(self) -> None:
        self._sums, self._size = list[int](), 0

    def update(self, data: Any) -> None:
        """Add bytes: a buffer of single bytes."""
        at, view = 0, memoryview(data)
        while at < len(view):
            filled = self._size % BLOCK_BYTES
            part = view[at : at + BLOCK_BYTES - filled]
            self._sums.append(crc32c(part, self._sums.pop() if filled else 0))
            self._size += len(part)
            at += len(part)

    def encoded(self) -> bytes:
        """Return the checksums of all blocks; no bytes have no block."""
        return b"".join(map(encode, self._sums))


def encode(checksum: int) -> bytes:
    """Return a checksum as it is recorded: 4 bytes, little-endian."""
    return checksum.to_bytes(SUM_BYTES, "little")


def of_blocks(data: Any, crc: Crc = crc32c) -> bytes:
    """Return the checksums of the blocks of a buffer of single bytes."""
    view = memoryview(data)
    return b"".join(encode(crc(view[at : at + BLOCK_BYTES])) for at in range(0, len(view), BLOCK_BYTES))


def check(path: str, what: str, expected: bytes, found: bytes, leaf: str | None = None) -> None:
    """Raise ChecksumError unless the checksums of blocks are equal; ``what`` was summed, such as "the file"."""
    if expected == found:
        return
    starts = range(0, max(len(expected), len(found)), SUM_BYTES)
    block = next(at for at in starts if expected[at : at + SUM_BYTES] != found[at : at + SUM_BYTES])
    old, new = (sums[block : block + SUM_BYTES][::-1].hex() or "none" for sums in (expected, found))
    raise ChecksumError(
        f"{path}: {what} is not what was saved: the checksum of block {block // SUM_BYTES} (of {BLOCK_BYTES} bytes) "
        f"was expected to be {old}, found {new}; restore the files from a backup, or restore an older step. To read it "
        f"as it is, set checksums='off'",
        path=path,
        leaf=leaf,
    )
