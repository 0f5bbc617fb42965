"""Arrays out of C order and arrays in shards are written in blocks, and byte for byte what Flax writes."""

from __future__ import annotations

import itertools

import flax.serialization
import jax
import numpy as np
import pytest
from flax_ckpt_compat.legacy import encode, format
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat._core.tree import HostCopy, Shard
from tests.support.trees import ML_DTYPES, NUMPY_DTYPES, fill

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@pytest.fixture
def tiny(monkeypatch):
    """Limits so small that arrays of a few bytes take every way that large ones take."""
    monkeypatch.setattr(encode, "_BLOCK", 24)
    monkeypatch.setattr(encode, "_MIN_SHARDED", 1)
    monkeypatch.setattr(encode, "_COPY_BELOW", 1)


@given(SHAPES, st.sampled_from(NUMPY_DTYPES + ML_DTYPES), st.permutations(range(4)), st.integers(1, 3))
def test_blocks_are_the_array_in_c_order(shape, dtype, order, step):
    """Joined, they are what numpy makes of the array, whatever its strides; each is small, or one element."""
    array = fill(shape, dtype, 1).transpose([axis for axis in order if axis < len(shape)])[::step]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_BLOCK", 24)
        pieces = list(encode.pieces(array))
    assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes()
    assert array.flags.c_contiguous or all(piece.nbytes <= 24 or piece.size == 1 for piece in pieces)


@pytest.mark.parametrize("limit", [2**30, 50])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape", [(5, 6, 7), (1, 1, 90), (90,), (1, 40, 2)])
def test_bytes_equal_flax(save, monkeypatch, tiny, shape, dtype, limit):
    """Transposed and strided arrays, in one piece or over Flax's limit."""
    monkeypatch.setattr(format, "MAX_CHUNK_SIZE", limit)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", limit)
    array = np.arange(np.prod(shape)).reshape(shape).astype(jax.numpy.dtype(dtype))
    tree = {"t": array.T, "s": array[..., ::2], "r": array[::-1], "c": array}
    assert save(tree).read_bytes() == flax.serialization.to_bytes(tree)


@pytest.mark.parametrize("limit", [2**30, 50])
@pytest.mark.parametrize("cuts", [(2, 3), (1, 6), (4, 1), (4, 6)])
def test_shards_of_a_background_save(save, monkeypatch, tiny, cuts, limit):
    """A copy that lies in shards is stored as the array that it was made of."""
    monkeypatch.setattr(format, "MAX_CHUNK_SIZE", limit)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", limit)
    array = np.arange(8 * 12, dtype=np.int16).reshape(8, 12)
    rows, columns = 8 // cuts[0], 12 // cuts[1]
    boxes = [
        (slice(row, row + rows), slice(column, column + columns))
        for row, column in itertools.product(range(0, 8, rows), range(0, 12, columns))
    ]
    shards = tuple(Shard(box, array[box].copy()) for box in boxes)
    copy = HostCopy(array.shape, array.dtype, shards, None)
    assert save({"a": copy}).read_bytes() == flax.serialization.to_bytes({"a": array})
