"""Take typed PRNG key arrays apart into data and implementation, and join them again."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.tree import KeyData


def is_prng_key(leaf: Any) -> bool:
    """Return whether a leaf is a typed PRNG key array, abstract or not; False for raw uint32 keys."""
    arrays = (jax.Array, jax.ShapeDtypeStruct)
    # Key dtypes are not numpy's, and issubdtype is slower than the rest of restoring a small leaf.
    is_special = isinstance(leaf, arrays) and not isinstance(leaf.dtype, np.dtype)
    return is_special and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def split_key(leaf: Any) -> Any:
    """Split a typed PRNG key array into data and implementation name; return any other leaf as it is."""
    if not is_prng_key(leaf):
        return leaf
    return KeyData(str(jax.random.key_impl(leaf)), jax.random.key_data(leaf))


def join_key(key: KeyData, sharding: Any = None) -> jax.Array:
    """Build a typed PRNG key array from its data, with a sharding or placed by default."""
    # device_put is explicit, for callers who forbid implicit transfers.
    keys: jax.Array = jax.random.wrap_key_data(jax.device_put(key.data), impl=key.impl)
    if sharding is None or sharding.is_fully_addressable:
        return keys if sharding is None else cast(jax.Array, jax.device_put(keys, sharding))
    if not sharding.addressable_devices:
        return without_shards(keys.shape, keys.dtype, sharding)
    return jax.make_array_from_callback(keys.shape, sharding, lambda index: keys[index])


def without_shards(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    """Return this process's view of an array whose shards are all on other processes; not every jax has such."""
    try:
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    # Before jax had the argument, the dtype was that of the shards, and there are none; then, before 0.7, a setting
    # had to allow it.
    except (TypeError, ValueError) as error:
        raise UnsupportedLeafError(
            f"jax {jax.__version__} cannot make an array of shape {shape} of which this process holds no shard "
            f"({sharding}): {error}; upgrade jax, or use a mesh with devices of every process"
        ) from error


def placeholder(array: jax.Array) -> Any:
    """Return a stand-in, without memory, for the values of an array of which this process sees nothing."""
    if is_prng_key(array):
        return KeyData(str(jax.random.key_impl(array)), placeholder(jax.eval_shape(jax.random.key_data, array)))
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def has_implementation(name: str) -> bool:
    """Return whether this jax has a PRNG implementation."""
    try:
        jax.eval_shape(lambda: jax.random.key(0, impl=name))
    except ValueError:
        return False
    return True
