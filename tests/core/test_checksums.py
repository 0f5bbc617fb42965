"""Checksums of blocks: equal to zlib's, however the bytes arrive, and an error that says what differs."""

import zlib

import numpy as np
import pytest

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat.errors import ChecksumError, CorruptCheckpointError

MIB = 1 << 20
DATA = np.random.default_rng(0).integers(0, 256, 2 * MIB + 3, np.uint8).tobytes()
# One CRC-32 for each MiB, little-endian, as a written format needs it.
EXPECTED = b"".join(zlib.crc32(DATA[at : at + MIB]).to_bytes(4, "little") for at in (0, MIB, 2 * MIB))


def test_check_value() -> None:
    """The checksum is CRC-32/ISO-HDLC, and the other CRC-32C, by the check values of their catalogue."""
    assert checksums.crc32(b"123456789") == 0xCBF43926
    assert checksums.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("step", [1 << 16, MIB, 3 * MIB // 2, 3 * MIB])
def test_blocks_do_not_depend_on_the_pieces(step: int) -> None:
    """Pieces of any length give the checksums of the whole, also as arrays and views."""
    sums = checksums.BlockSums()
    for at in range(0, len(DATA), step):
        sums.update(np.frombuffer(DATA[at : at + step], np.uint8) if at else memoryview(DATA)[:step])
    assert sums.encoded() == checksums.of_blocks(DATA) == EXPECTED


def test_no_bytes_have_no_block() -> None:
    """Of nothing there is no checksum, and a shorter file differs from a longer one."""
    assert checksums.of_blocks(b"") == checksums.BlockSums().encoded() == b""
    assert checksums.total(EXPECTED) != checksums.total(EXPECTED[:8])


@pytest.mark.parametrize("block", [0, 1, 2])
def test_error_names_the_block(block: int) -> None:
    """One flipped bit raises, with the block, both checksums, the leaf and what to do."""
    damaged = bytearray(DATA)
    damaged[block * MIB + 2] ^= 0x10
    found = checksums.of_blocks(damaged)
    assert checksums.total(found) != checksums.total(EXPECTED)
    with pytest.raises(ChecksumError, match=rf"/p: the chunk 'a/0' .* block {block} .*off") as caught:
        checksums.check("/p", "the chunk 'a/0'", EXPECTED, found, "a")
    assert isinstance(caught.value, CorruptCheckpointError)
    assert caught.value.leaf == "a"
    assert f"{int.from_bytes(EXPECTED[4 * block :][:4], 'little'):08x}" in str(caught.value)


def test_another_number_of_blocks_raises() -> None:
    """Missing and extra blocks differ, too."""
    for found in (EXPECTED[:8], EXPECTED + bytes(4)):
        with pytest.raises(ChecksumError, match="block"):
            checksums.check("/p", "the file", EXPECTED, found)
    checksums.check("/p", "the file", EXPECTED, EXPECTED)
