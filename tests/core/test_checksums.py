"""Checksums of blocks: those of the libraries, however the bytes arrive, and an error that says what differs."""

import zlib
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat.errors import ChecksumError

MIB = 1 << 20
DATA = np.random.default_rng(0).integers(0, 256, 2 * MIB + 3, np.uint8).tobytes()


def expected(crc: Any) -> bytes:
    """One checksum for each MiB, little-endian, as a written format needs it."""
    return b"".join(crc(DATA[at : at + MIB]).to_bytes(4, "little") for at in (0, MIB, 2 * MIB))


@pytest.mark.parametrize(("name", "crc", "value"), [("crc32", zlib.crc32, 0xCBF43926), ("crc32c", crc32c, 0xE3069283)])
@pytest.mark.parametrize("step", [1 << 16, MIB, 3 * MIB // 2, 3 * MIB])
def test_blocks_do_not_depend_on_the_pieces(name: str, crc: Any, value: int, step: int) -> None:
    """Pieces of any length give the checksums of the whole; each algorithm has the check value of its catalogue."""
    assert checksums.CRCS[name](b"123456789") == value
    sums = checksums.BlockSums()
    assert sums.encoded() == b""
    for at in range(0, len(DATA), step):
        sums.update(np.frombuffer(DATA[at : at + step], np.uint8) if at else memoryview(DATA)[:step])
    assert sums.encoded() == expected(crc32c) and checksums.of_blocks(DATA, crc) == expected(crc)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_error_names_the_block(block: int) -> None:
    """A flipped bit raises, with block, checksums, leaf and what to do; so do missing and extra blocks."""
    damaged, sums = bytearray(DATA), expected(crc32c)
    damaged[block * MIB + 2] ^= 0x10
    with pytest.raises(ChecksumError, match=rf"/p: the chunk 'a/0' .* block {block} .*off") as caught:
        checksums.check("/p", "the chunk 'a/0'", sums, checksums.of_blocks(damaged), "a")
    assert caught.value.leaf == "a"
    assert f"{int.from_bytes(sums[4 * block :][:4], 'little'):08x}" in str(caught.value)
    for found in (sums[: 4 * block], sums + bytes(4)):
        with pytest.raises(ChecksumError, match="block"):
            checksums.check("/p", "the file", sums, found)
    checksums.check("/p", "the file", sums, sums)
