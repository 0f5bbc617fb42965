"""Read shardings from target leaves and validate stored shapes against them."""

from __future__ import annotations

from typing import Any

import jax

from flax_ckpt_compat._core.errors import ShapeMismatchError


def of(target: Any) -> Any:
    """Return the sharding of a target's leaf, or None.

    ``jax.eval_shape`` under an explicit mesh (``jax.set_mesh``) gives shardings of an abstract mesh, without devices.
    They are resolved through the mesh in context, and ignored if that mesh is missing or has other axes.
    """
    if not isinstance(target, jax.Array | jax.ShapeDtypeStruct):
        return None
    sharding = getattr(target, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return _concrete(sharding, mesh) if isinstance(mesh, jax.sharding.AbstractMesh) else sharding


def _concrete(sharding: Any, abstract: Any) -> Any:
    mesh = _mesh_in_context()
    if mesh is None or tuple(mesh.shape.items()) != tuple(abstract.shape.items()):
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

    Args:
        target: the target's leaf.
        on_device: use any sharding; else only an explicit one: of an abstract leaf, over several devices, or on a
            device of another process.
    """
    sharding = of(target)
    if sharding is None or on_device or isinstance(target, jax.ShapeDtypeStruct):
        return sharding
    is_local = len(sharding.device_set) == 1 and sharding.is_fully_addressable
    return None if is_local else sharding


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
        f"{leaf}: the stored array of shape {shape} cannot be placed on the target's {sharding}; give the target's "
        "leaf a sharding that fits, or use a numpy array there and place it afterwards.",
        path=path,
        leaf=leaf,
    )
