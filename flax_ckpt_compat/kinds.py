"""Leaves of which the checkpoint does not say what they were: Python number, numpy scalar or array; key or its data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat import state
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.tree import show_path

_PYTHON = {bool: LeafKind.BOOL, int: LeafKind.INT, float: LeafKind.FLOAT, complex: LeafKind.COMPLEX}


def settle(value: Any, handle: LeafHandle, target: Any) -> tuple[Any, LeafHandle]:
    """A stored scalar as the kind that the target's leaf is, if it may have been saved as one.

    Args:
        value: as the backend read it.
        handle: its handle.
        target: the target's leaf, or None.

    Returns:
        The same number, and its handle with the kind that was settled on.

    Raises:
        CorruptCheckpointError: it may be the data of a typed PRNG key, and the target's leaf is no plain array.
    """
    kind = _kind_of(target) if handle.may_be else None
    if LeafKind.PRNG_KEY in handle.may_be and (kind is not LeafKind.ARRAY or state.is_prng_key(target)):
        raise _doubtful_key(handle)
    if kind not in handle.may_be:
        return value, handle
    array = np.asarray(value)
    settled = array if kind is LeafKind.ARRAY else array[()] if kind is LeafKind.NUMPY_SCALAR else array.item()
    return settled, dataclasses.replace(handle, kind=kind)


def _kind_of(target: Any) -> LeafKind | None:
    if isinstance(target, np.generic):
        return LeafKind.NUMPY_SCALAR
    if isinstance(target, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return LeafKind.ARRAY
    return _PYTHON.get(type(target))


def _doubtful_key(handle: LeafHandle) -> CorruptCheckpointError:
    leaf = show_path(handle.path)
    return CorruptCheckpointError(
        f"{handle.reader.path}: the leaf {leaf!r} may be a typed PRNG key or its raw data, which the lost files "
        f"array_metadatas/process_* would tell; restore them from a copy, or give a uint32 array as the target's leaf, "
        f"which gets the raw data, and wrap it with jax.random.wrap_key_data if it was a key",
        path=handle.reader.path,
        leaf=leaf,
    )
