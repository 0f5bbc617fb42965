"""Place values: which sharding a target's leaf asks for, which slices it needs here, casts, devices, keys, numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.array_boxes import normalize_index
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import ShapeMismatchError
from flax_ckpt_compat._core.tree import KeyData
from flax_ckpt_compat._restore import casting, leaf_kinds
from flax_ckpt_compat._restore.casting import Cast
from flax_ckpt_compat._restore.plan import LeafPlan
from flax_ckpt_compat._trees import prng_keys

# A restore is an explicit transfer, whatever the caller's guard. Between devices too it is slower to enter.
transfers_allowed: Any = functools.partial(jax.transfer_guard_host_to_device, "allow")
all_transfers_allowed: Any = functools.partial(jax.transfer_guard, "allow")
_get_mesh: Any = getattr(jax.sharding, "get_mesh", lambda: None)  # releases of jax before explicit meshes have none


def sharding_of(target: Any) -> Any:
    """Return the sharding of a target's leaf, or None.

    ``jax.eval_shape`` under an explicit mesh (``jax.set_mesh``) gives shardings of an abstract mesh, without devices.
    They are resolved through the mesh in context, and ignored if that mesh is missing or has other axes."""
    if not isinstance(target, jax.Array | jax.ShapeDtypeStruct):
        return None
    sharding: Any = getattr(target, "sharding", None)
    abstract = getattr(sharding, "mesh", None)
    if not isinstance(abstract, jax.sharding.AbstractMesh):
        return sharding
    try:
        mesh = _get_mesh()
    except ValueError:  # jax gives none while it traces a function
        return None
    if not isinstance(mesh, jax.sharding.Mesh) or tuple(mesh.shape.items()) != tuple(abstract.shape.items()):
        return None
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def wanted_sharding(target: Any, on_device: bool) -> Any:
    """Return the sharding that a leaf's value is placed with, or None for host memory.

    Unless ``on_device``, only an explicit one counts: of an abstract leaf, over several devices, of another process."""
    sharding = sharding_of(target)
    if sharding is None or on_device or isinstance(target, jax.ShapeDtypeStruct):
        return sharding
    is_local = len(sharding.device_set) == 1 and sharding.is_fully_addressable
    return None if is_local else sharding


def has_devices(sharding: Any) -> bool:
    """Return whether it is a sharding, and not one of an abstract mesh."""
    return sharding is not None and not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def traits_of(sharding: Any) -> tuple[Any, bool, bool, int]:
    """Return a sharding, whether it is one local device, whether all are local, and the least rank that it needs."""
    is_local = sharding.is_fully_addressable
    return sharding, is_local and len(sharding.device_set) == 1, is_local, len(getattr(sharding, "spec", ()))


def fits(sharding: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an array of this shape can have this sharding."""
    try:
        if len(getattr(sharding, "spec", ())) > len(shape):
            return False
        sharding.shard_shape(shape)
    except Exception:  # noqa: BLE001  (jax raises errors of several types, which change with its releases)
        return False
    return True


def misfit(leaf: str, shape: tuple[int, ...], sharding: Any, path: str) -> ShapeMismatchError:
    """Return the error for an array that the target's sharding cannot hold."""
    return ShapeMismatchError(
        f"{path}: {leaf} has the stored shape {shape}, which does not fit the target's {sharding}; give the target's "
        "leaf a sharding that fits, or a numpy array, and place the result afterwards; for a state from "
        "flax.jax_utils.replicate, restore into flax.jax_utils.unreplicate(target), and replicate afterwards.",
        path=path,
        leaf=leaf,
    )


def slices(handle: LeafHandle, sharding: Any) -> list[LeafHandle] | None:
    """Return the distinct slices of an array on this process's devices; None to read it whole.

    The list is empty if all shards are on other processes."""
    if not sharding.addressable_devices:
        return []
    if sharding.is_fully_replicated or 0 in handle.shape:
        return None
    return [handle.part(index) for index in _local_indices(sharding, handle.shape).values()]


@functools.lru_cache(maxsize=256)
def _local_indices(sharding: Any, shape: tuple[int, ...]) -> dict[tuple[int, ...], tuple[slice, ...]]:
    """Return start → the distinct indices of an array on this process's devices; cached: leaves share few pairs."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return {starts(index): normalize_index(index, shape) for index in indices}


def starts(index: tuple[slice, ...]) -> tuple[int, ...]:
    """Return where a shard begins, which identifies it among those of an array."""
    return tuple([side.start or 0 for side in index])


def is_held(dtype: Any) -> bool:
    """Return whether jax holds arrays of this dtype without narrowing them (64 bits need x64)."""
    return _can_be_held(np.dtype(dtype), jax.dtypes.canonicalize_dtype(np.float64))


@functools.cache
def _can_be_held(dtype: np.dtype[Any], widest: Any) -> bool:  # noqa: ARG001  (x64 can be switched on and off)
    """Return whether jax has the dtype and keeps it; cached per x64 mode."""
    try:
        kept = jax.eval_shape(lambda x: x, np.zeros((), dtype)).dtype
    except TypeError:
        return False
    return bool(kept == dtype)


def finish(leaf: LeafPlan, handle: LeafHandle, value: Any, cast: Cast | None) -> Any:
    """Return the final value of a stored leaf that was read whole."""
    kind = leaf_kinds.resolved_kind(handle, leaf.target)
    value = leaf_kinds.converted(value, handle, leaf.target)
    if isinstance(value, KeyData):
        try:
            with all_transfers_allowed():
                return prng_keys.join_key(value, leaf.sharding)
        except ValueError:
            if prng_keys.has_implementation(value.impl):
                raise
            return leaf_kinds.data_of_unknown_key(value, handle, leaf.target)
    if kind is LeafKind.ARRAY or (cast is not None and leaf_kinds.wants_array(leaf.target)):
        return put(np.asarray(value), leaf.sharding, cast)
    if cast is None:
        return value
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
    parts = dict(zip(_local_indices(leaf.sharding, source.shape), values, strict=True))
    return jax.make_array_from_callback(source.shape, leaf.sharding, lambda index: parts[starts(index or ())])


def on_devices(value: np.ndarray[Any, Any], sharding: Any) -> Any:
    """Put an array on a sharding's devices; the CPU backend may take over its memory."""
    # Also for one device: takes half the time of jax.device_put.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index or ...])
