"""A new file has exactly what was written to it, through the page cache or past it."""

import errno
import mmap
import os
import random
from pathlib import Path

import numpy as np
import pytest

from flax_ckpt_compat._core.local import new_file

MIB = 1 << 20
PAGE = 4096
# Around the sizes at which a piece is copied, or a buffer is full.
LENGTHS = (0, 1, 511, PAGE - 1, PAGE, 60_000, 64 << 10, (64 << 10) + PAGE - 1, 100_000, MIB - 1, MIB, 3 * MIB + 17)


@pytest.fixture(scope="module")
def random_bytes() -> memoryview:
    """Memory that begins with a page."""
    pages = mmap.mmap(-1, 8 * MIB)
    pages[:] = np.random.default_rng(0).bytes(8 * MIB)
    return memoryview(pages)


@pytest.mark.slow
@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_pieces_come_one_after_the_other(
    disk_path: Path, random_bytes: memoryview, seed: int, past_cache: bool
) -> None:
    """Whatever their lengths, and where in a page their memory begins and their place in the file."""
    chosen, written, path = random.Random(seed), bytearray(), disk_path / "file"
    file = new_file.create(str(path), past_cache=past_cache)
    for _ in range(chosen.randint(1, 6)):
        pieces = []
        for _ in range(chosen.choice((1, 5, 30))):
            start = chosen.choice((0, 1, 512, len(written) % PAGE, chosen.randrange(2 * PAGE)))
            pieces.append(random_bytes[start : start + chosen.choice(LENGTHS)])
            written += pieces[-1]
        file.write([piece for piece in pieces if piece])
    file.close()
    assert path.read_bytes() == bytes(written)
    assert file.descriptor == -1


def test_a_disk_that_refuses_after_all_gets_it_through_the_cache(
    disk_path: Path, random_bytes: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself refuses pages of 256 bytes, of which no disk has sectors."""
    refused: list[int] = []
    real = os.writev

    def noted(descriptor: int, pieces: list[memoryview]) -> int:
        try:
            return real(descriptor, pieces)
        except OSError as error:
            assert error.errno is not None
            refused.append(error.errno)
            raise

    file = new_file.create(str(disk_path / "file"), past_cache=True)
    monkeypatch.setattr(os, "writev", noted)
    monkeypatch.setattr(new_file.memory, "PAGE", 256)
    pieces = [random_bytes[:100], random_bytes[356 : 2 * MIB], random_bytes[:333], random_bytes[: MIB + 7]]
    file.write(list(pieces))
    file.close()
    assert refused == [errno.EINVAL]
    assert (disk_path / "file").read_bytes() == b"".join(pieces)
