"""Give values that were read their final form: casts, devices, typed PRNG keys, numbers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import KeyData
from flax_ckpt_compat._restore import casting, leaf_kinds
from flax_ckpt_compat._restore.casting import Cast
from flax_ckpt_compat._restore.plan import LeafPlan
from flax_ckpt_compat._restore.shardings import is_held, local_starts, starts
from flax_ckpt_compat._trees import prng_keys


def finish(leaf: LeafPlan, handle: LeafHandle, value: Any, cast: Cast | None) -> Any:
    """Return the final value of a stored leaf that was read whole."""
    kind = leaf_kinds.resolved_kind(handle, leaf.target)
    if handle.possible_kinds:
        value = leaf_kinds.converted(value, handle, leaf.target)
    if isinstance(value, KeyData):
        try:
            with all_transfers_allowed():
                return prng_keys.join_key(value, leaf.sharding)
        except ValueError:
            if prng_keys.has_implementation(value.impl):
                raise
            return leaf_kinds.data_of_unknown_key(value, handle, leaf.target)
    if kind is LeafKind.ARRAY:
        return put(np.asarray(value), leaf.sharding, cast)
    if cast is None:
        return value
    if leaf_kinds.wants_array(leaf.target):
        return put(np.asarray(value), leaf.sharding, cast)
    number = cast(np.asarray(value))
    return number[()] if isinstance(leaf.target, np.generic) else number.item()


def put(value: np.ndarray[Any, Any], sharding: Any, cast: Cast | None) -> Any:
    """Cast an array and place it; without a sharding, or if jax does not hold the dtype, it stays in host memory."""
    if cast is not None:
        value = cast(value)
    if sharding is None or not is_held(value.dtype):
        return value
    if not sharding.addressable_devices:
        return prng_keys.without_shards(value.shape, value.dtype, sharding)
    with transfers_allowed():
        return on_devices(value, sharding)


def put_jax_array(value: jax.Array, sharding: Any, cast: Cast | None) -> Any:
    """Cast and place a ``jax.Array``; without a sharding it stays where it is."""
    if cast is not None and value.dtype != cast.dtype:
        if value.is_fully_addressable and not is_held(cast.dtype):  # jax would narrow it
            return put(np.asarray(value), sharding, cast)
        is_checked = cast.is_checked and value.is_fully_addressable
        cast.is_lossy = is_checked and casting.is_lossy(np.asarray(value), cast.dtype)
        value = value.astype(cast.dtype)
    if sharding is None or value.sharding.is_equivalent_to(sharding, value.ndim):
        return value
    with all_transfers_allowed():
        return jax.device_put(value, sharding)


def assembled(leaf: LeafPlan, values: list[Any]) -> Any:
    """Assemble a sharded array; the value of each slice goes to all devices that hold its shard."""
    source: Any = leaf.source
    parts = dict(zip(local_starts(leaf.sharding, source.shape), values, strict=True))
    return jax.make_array_from_callback(source.shape, leaf.sharding, lambda index: parts[starts(index or ())])


def transfers_allowed() -> Any:
    """Allow host-to-device transfers in a context: a restore is an explicit transfer, whatever the caller's guard."""
    return jax.transfer_guard_host_to_device("allow")


def all_transfers_allowed() -> Any:
    """Allow all transfers in a context, device to device too; slower to enter."""
    return jax.transfer_guard("allow")


def on_each_device(value: np.ndarray[Any, Any], sharding: Any) -> Any:
    """Put a whole array on each device of a sharding; quicker than `on_devices`, which see."""
    return jax.make_array_from_callback(value.shape, sharding, lambda _: value)


def on_devices(value: np.ndarray[Any, Any], sharding: Any) -> Any:
    """Put an array on a sharding's devices; the CPU backend may take over its memory."""
    # Also for one device: takes half the time of jax.device_put.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
