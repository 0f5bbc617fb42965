"""The chunks that sharded arrays are cut into: a shard, or if it is large, or with a codec, equal parts of one."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax_ckpt_compat.orbax_backend import ocdbt_writer, zarr
from flax_ckpt_compat.orbax_backend.zarr import Encoding, chunk_shape
from hypothesis import given
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat._core.tree import Shard

MIB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "part", "compressed", "expected"),
    [
        ((64 * MIB, 2), (16 * MIB, 2), False, [16 * MIB, 2]),
        ((64 * MIB, 2), (16 * MIB, 2), True, [MIB, 2]),
        ((7, 512 * MIB), (7, 512 * MIB), False, [1, 512 * MIB]),
        ((1500 * MIB,), (1500 * MIB,), False, [500 * MIB]),
        ((1501 * MIB + 1,), (1501 * MIB + 1,), False, [393_478_145]),
        ((64, 40 * MIB), (64, 10 * MIB), True, [1, 2 * MIB]),
        ((4 * 33_554_467,), (33_554_467,), True, [33_554_467]),
        ((8, 0), (8, 0), True, [8, 1]),
        ((), (), True, []),
    ],
    ids=[
        "plain",
        "cut",
        "plain rows",
        "plain and large",
        "about equal",
        "second axis",
        "a prime stays whole",
        "empty",
        "0-d",
    ],
)
def test_chunks_by_hand(shape: tuple[int, ...], part: tuple[int, ...], compressed: bool, expected: list[int]) -> None:
    """Parts of at most 8 MiB, or 2 GiB without a codec, of four-byte elements, worked out by hand."""
    assert chunk_shape(shape, part, 4, Encoding(checksums=compressed).chunk_bytes) == expected


@given(
    part=st.lists(st.integers(1, 5000), min_size=1, max_size=4).map(tuple),
    split=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=4, max_size=4),
    compressed=st.booleans(),
)
def test_no_chunk_reaches_over_two_shards(part: tuple[int, ...], split: list[int], compressed: bool) -> None:
    """On every axis along which an array is split, chunks divide the shard."""
    shape = tuple(length * times for length, times in zip(part, split, strict=False))
    chunks = chunk_shape(shape, part, 8, Encoding(checksums=compressed).chunk_bytes)
    assert all(0 < chunk <= length for chunk, length in zip(chunks, part, strict=True))
    for chunk, length, times in zip(chunks, part, split, strict=False):
        assert times == 1 or length % chunk == 0
    limit = 2**23 if compressed else 2**31
    if math.prod(part) * 8 <= limit:
        assert chunks == list(part)
    if split == [1, 1, 1, 1]:
        assert math.prod(chunks) * 8 <= limit


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 4), (3, 5), (2, 7), (1, 3)])
def test_a_shard_that_cuts_a_chunk_is_refused(start: int, stop: int) -> None:
    """What it lacks of the chunk would be stored as something else; shards that begin and end with chunks pass."""
    text = zarr.dump_metadata((8, 3), (2, 3), np.dtype(np.int16), Encoding())
    info = zarr.parse_array_metadata(json.dumps(text).encode(), zarr3=False)
    columns = slice(0, 3)
    with pytest.raises(ValueError, match="was expected to lie in one shard"):
        ocdbt_writer._cells_of(Shard((slice(start, stop), columns), np.zeros((stop - start, 3), np.int16)), info)
    whole = Shard((slice(2, 6), columns), np.zeros((4, 3), np.int16))
    assert ocdbt_writer._cells_of(whole, info) == [
        ("1.0", (slice(0, 2), columns)),
        ("2.0", (slice(2, 4), columns)),
    ]


@pytest.mark.slow
def test_real_orbax_reads_a_large_array_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array above the limit (lowered here) lies in files of about 64 MiB, and real Orbax puts it together."""
    monkeypatch.setattr(zarr, "_PLAIN_CHUNK_BYTES", 20 * MIB)
    monkeypatch.setattr(ocdbt_writer, "_metadata", ocdbt_writer._metadata.__wrapped__)
    array = np.random.default_rng(0).integers(0, 256, (301, 500_000), np.uint8)
    path = flax_ckpt_compat.save(tmp_path / "c", {"a": array}, format="orbax")
    sizes = [file.stat().st_size for file in Path(path, "d").iterdir()]
    assert max(sizes) < 90 * MIB
    assert sum(sizes) < array.nbytes * 1.05
    with warnings.catch_warnings(action="ignore"):
        restored = ocp.PyTreeCheckpointer().restore(path)
    for found in (restored, flax_ckpt_compat.restore(path)):
        np.testing.assert_array_equal(found["a"], array)
