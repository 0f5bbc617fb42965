"""Decide shardings: what a target's leaf asks for, whether it fits, and which slices of an array it needs here."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.errors import ShapeMismatchError
from flax_ckpt_compat._core.jax_shards import normalize_index

_SMALL_BYTES = 4096


def of(target: Any) -> Any:
    """Return the sharding of a target's leaf, or None.

    ``jax.eval_shape`` under an explicit mesh (``jax.set_mesh``) gives shardings of an abstract mesh, without devices.
    They are resolved through the mesh in context, and ignored if that mesh is missing or has other axes."""
    if not isinstance(target, jax.Array | jax.ShapeDtypeStruct):
        return None
    sharding = getattr(target, "sharding", None)
    abstract = getattr(sharding, "mesh", None)
    if not isinstance(abstract, jax.sharding.AbstractMesh):
        return sharding
    mesh = _mesh_in_context()
    if sharding is None or mesh is None or tuple(mesh.shape.items()) != tuple(abstract.shape.items()):
        return None
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _mesh_in_context() -> Any:
    # Releases of jax before explicit meshes have none.
    get_mesh = getattr(jax.sharding, "get_mesh", None)
    try:
        mesh = None if get_mesh is None else get_mesh()
    except ValueError:  # jax gives none while it traces a function
        return None
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


def wanted(target: Any, on_device: bool) -> Any:
    """Return the sharding that a leaf's value is placed with, or None for host memory.

    Unless ``on_device``, only an explicit one counts: of an abstract leaf, over several devices, of another process."""
    sharding = of(target)
    if sharding is None or on_device or isinstance(target, jax.ShapeDtypeStruct):
        return sharding
    is_local = len(sharding.device_set) == 1 and sharding.is_fully_addressable
    return None if is_local else sharding


def has_devices(sharding: Any) -> bool:
    """Return whether it is a sharding, and not one of an abstract mesh."""
    return sharding is not None and not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def kind_of(sharding: Any) -> tuple[Any, bool, bool, int]:
    """Return a sharding, whether it is one local device, whether all are local, and the least rank that it needs."""
    is_local = sharding.is_fully_addressable
    return sharding, is_local and len(sharding.device_set) == 1, is_local, len(getattr(sharding, "spec", ()))


def is_one_small_chunk(handle: LeafHandle) -> bool:
    """Return whether an array is read whole in less time than its slices."""
    return handle.nbytes < _SMALL_BYTES and handle.reader.chunks_of(handle) == handle.shape


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
        "leaf a sharding that fits, or a numpy array, and place the result afterwards.",
        path=path,
        leaf=leaf,
    )


def slices(handle: LeafHandle, sharding: Any) -> list[ArraySlice] | None:
    """Return the distinct slices of an array on this process's devices; None to read it whole.

    The list is empty if all shards are on other processes.
    """
    if not sharding.addressable_devices:
        return []
    if sharding.is_fully_replicated or 0 in handle.shape:
        return None
    return [ArraySlice(handle, index) for index in _local_indices(sharding, handle.shape).values()]


def local_starts(sharding: Any, shape: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Return where each of the `slices` of an array begins, in their order."""
    return _local_indices(sharding, shape).keys()


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
