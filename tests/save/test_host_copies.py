"""Copies made on several threads, against numpy's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._save import host_copies
from flax_ckpt_compat._save.host_copies import Copies

DTYPES = st.sampled_from([np.int8, np.float32, np.complex128, ml_dtypes.bfloat16, ml_dtypes.int4, "S3", "M8[s]"])
ARRAYS = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9).flatmap(
    lambda shape: DTYPES.map(lambda dtype: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))
)


@given(st.lists(st.tuples(ARRAYS, st.booleans()), max_size=6), st.integers(1, 40), st.sampled_from([1, 3]))
def test_copies_have_the_values(found: list[tuple[np.ndarray, bool]], piece: int, threads: int) -> None:
    """Arrays of any dtype, shape and order, cut anywhere, are copied into aligned memory of their own in C order."""
    sources = [array.T if turned else array for array, turned in found]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "_PIECE_BYTES", piece)
        patch.setattr(host_copies, "_MIN_PARALLEL_BYTES", 0)
        patch.setattr(host_copies, "_THREADS", threads)
        copies = Copies(None)
        made = [copies.add(source) for source in sources]
        copies.make()
    for source, copy in zip(sources, made, strict=True):
        assert copy.dtype == source.dtype
        assert copy.flags.c_contiguous and copy.flags.aligned
        assert not np.shares_memory(copy, source)
        assert copy.tobytes() == source.tobytes()


def test_views_of_jax_arrays_are_copied() -> None:
    """What numpy shows of an array on the CPU is a view, which donating the array would give to others."""
    array = jnp.arange(3_000_000.0)
    copies = Copies(None)
    copy = copies.add(np.asarray(array))
    copies.make()
    jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(array).block_until_ready()
    np.testing.assert_array_equal(copy, np.arange(3_000_000.0, dtype=np.float32))


def test_copies_are_not_summed_or_copied_again() -> None:
    """Nobody else holds them, so nobody changes them: they are read-only, with the memory that they are in."""
    copies = Copies(None)
    for number in range(2):  # a batch, and one after it
        found = [copies.add(np.full(size, number, np.float32)) for size in (3, 1000, 20 * 2**20)]
        copies.make()
        assert not any(map(memory.may_change, found))
        assert [one[-1] for one in found] == [number] * 3
