"""Stored values → what the caller gets: casting, devices, PRNG keys, and containers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat import state
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import ShapeMismatchError
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, Node, show_path


def place(value: Any, handle: LeafHandle, target: Any, *, cast: bool, on_device: bool) -> Any:
    """One restored leaf in its final form.

    Args:
        value: what the backend read.
        handle: its handle.
        target: the target's leaf, or None.
        cast: cast arrays to the target's dtype; `jax.ShapeDtypeStruct` targets always do.
        on_device: give arrays the target's sharding, if it has one; else they stay numpy arrays.

    Raises:
        ShapeMismatchError: the target's sharding cannot hold an array of the stored shape.
    """
    if isinstance(value, KeyData):
        return state.put_key_together(value, _sharding(target) if state.is_prng_key(target) else None)
    if handle.kind is not LeafKind.ARRAY:
        return value
    dtype = getattr(target, "dtype", None)
    if dtype is not None and not state.is_prng_key(target) and (cast or isinstance(target, jax.ShapeDtypeStruct)):
        value = np.asarray(value).astype(dtype, copy=False)
    sharding = _sharding(target) if on_device else None
    if sharding is None or not _can_be_held(value.dtype, jax.dtypes.canonicalize_dtype(np.float64)):
        return value
    try:
        return _on_devices(value, sharding)
    except ValueError as error:
        leaf = show_path(handle.path)
        raise ShapeMismatchError(
            f"{leaf}: the stored array of shape {value.shape} cannot be placed as the target says, {sharding}; "
            "give the target's leaf a sharding that fits, or a numpy array, and place it afterwards.",
            path=handle.reader.path,
            leaf=leaf,
        ) from error


def _sharding(target: Any) -> Any:
    return getattr(target, "sharding", None) if isinstance(target, (jax.Array, jax.ShapeDtypeStruct)) else None


def _on_devices(value: np.ndarray[Any, Any], sharding: Any) -> Any:
    if len(sharding.device_set) == 1 and sharding.is_fully_addressable:
        # The array is ours alone, so the CPU backend may take over its memory.
        return jax.device_put(value, sharding, may_alias=True)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


@functools.cache
def _can_be_held(dtype: np.dtype[Any], widest: Any) -> bool:  # noqa: ARG001  (x64 can be switched on and off)
    """False where jax has no such dtype, or would narrow it in silence (64 bits without x64): it stays as saved."""
    try:
        kept = jax.eval_shape(lambda x: x, np.zeros((), dtype)).dtype
    except TypeError:
        return False
    return bool(kept == dtype)


def as_state(node: Node, *, lists: bool = False) -> Any:
    """Nested dicts with text keys, as Flax restores without a target: lists are maps of '0', '1', …

    Args:
        lists: lists stay lists. Flax writes no msgpack array, and gives one that others wrote as a list.
    """
    if not isinstance(node, Branch):
        return node
    children = {name: as_state(child, lists=lists) for name, child in node.children.items()}
    return list(children.values()) if lists and node.container is Container.LIST else children


def as_stored(node: Node) -> Any:
    """Lists, tuples and int keys where the format recorded them (setting ``structure="stored"``)."""
    if not isinstance(node, Branch):
        return node
    children = {name: as_stored(child) for name, child in node.children.items()}
    if node.container is Container.LIST:
        return list(children.values())
    if node.container is Container.TUPLE:
        return tuple(children.values())
    return {int(name) if name in node.int_keys else name: child for name, child in children.items()}
