"""The chunks that sharded arrays are cut into: a shard, or with a codec equal parts of one."""

from __future__ import annotations

import math

import pytest
from flax_ckpt_compat.orbax_backend.zarr import chunk_shape
from hypothesis import given
from hypothesis import strategies as st

MIB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "part", "compressed", "expected"),
    [
        ((64 * MIB, 2), (16 * MIB, 2), False, [16 * MIB, 2]),
        ((64 * MIB, 2), (16 * MIB, 2), True, [4 * MIB, 2]),
        ((64, 40 * MIB), (64, 10 * MIB), True, [1, 5 * MIB]),
        ((4 * 33_554_467,), (33_554_467,), True, [33_554_467]),
        ((8, 0), (8, 0), True, [8, 1]),
        ((), (), True, []),
    ],
    ids=["plain", "cut", "second axis", "a prime stays whole", "empty", "0-d"],
)
def test_chunks_by_hand(shape: tuple[int, ...], part: tuple[int, ...], compressed: bool, expected: list[int]) -> None:
    """Parts of at most 32 MiB of four-byte elements, worked out by hand."""
    assert chunk_shape(shape, part, 4, compressed) == expected


@given(
    part=st.lists(st.integers(1, 5000), min_size=1, max_size=4).map(tuple),
    split=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=4, max_size=4),
    compressed=st.booleans(),
)
def test_no_chunk_reaches_over_two_shards(part: tuple[int, ...], split: list[int], compressed: bool) -> None:
    """On every axis along which an array is split, chunks divide the shard."""
    shape = tuple(length * times for length, times in zip(part, split, strict=False))
    chunks = chunk_shape(shape, part, 8, compressed)
    assert all(0 < chunk <= length for chunk, length in zip(chunks, part, strict=True))
    for chunk, length, times in zip(chunks, part, split, strict=False):
        assert times == 1 or length % chunk == 0
    if not compressed:
        assert math.prod(chunks) == math.prod(part)
