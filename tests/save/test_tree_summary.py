"""What processes compare of their trees, and what stands for arrays that a process cannot see."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from flax_ckpt_compat._core.tree import KeyData
from flax_ckpt_compat._save import tree_agreement


@pytest.mark.parametrize("shape", [(), (3,)])
def test_stand_ins_of_other_processes_arrays(shape: tuple[int, ...]) -> None:
    """They have shape and dtype, and those of typed keys the implementation, as jax has them, and no memory."""
    array, keys = jnp.ones(shape, jnp.bfloat16), jax.random.split(jax.random.key(3, impl="rbg"), shape)
    found = tree_agreement.placeholder(array)
    assert (found.shape, found.dtype) == (array.shape, array.dtype) and tree_agreement.is_placeholder(found)
    key = tree_agreement.placeholder(keys)
    data = jax.random.key_data(keys)
    assert isinstance(key, KeyData) and key.impl == "rbg"
    assert (key.data.shape, key.data.dtype) == (data.shape, data.dtype) and tree_agreement.is_placeholder(key.data)
