"""Resolve leaves stored ambiguously: Python number, numpy scalar or array; PRNG key or its raw data."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CorruptCheckpointError, UnsupportedLeafError
from flax_ckpt_compat._core.tree import KeyData, show_path
from flax_ckpt_compat._trees import state_dict

_log = logging.getLogger("flax_ckpt_compat")
_PYTHON = {bool: LeafKind.BOOL, int: LeafKind.INT, float: LeafKind.FLOAT, complex: LeafKind.COMPLEX}

_DTYPES = {kind: np.dtype(python) for python, kind in _PYTHON.items()}


def resolve_scalar_kind(value: Any, handle: LeafHandle, target: Any) -> tuple[Any, LeafHandle]:
    """Convert a stored scalar to the kind of the target's leaf, if it may have been saved as that kind.

    Args:
        value: as the backend read it.
        handle: its handle.
        target: the target's leaf, or None.

    Returns:
        The same number, and its handle with the resolved kind.

    Raises:
        CorruptCheckpointError: it may be the data of a typed PRNG key, and the target's leaf is no plain array.
    """
    kind = _kind_of(target) if handle.possible_kinds else None
    if is_ambiguous(handle, target):
        raise ambiguous_key(handle)
    if kind not in handle.possible_kinds:
        return value, handle
    array = np.asarray(value)
    resolved = array if kind is LeafKind.ARRAY else array[()] if kind is LeafKind.NUMPY_SCALAR else array.item()
    return resolved, dataclasses.replace(handle, kind=kind)


def data_of_unknown_key(key: KeyData, handle: LeafHandle, target: Any) -> np.ndarray[Any, Any]:
    """Return the raw data of a typed PRNG key whose implementation this jax lacks, with a warning.

    Raises:
        UnsupportedLeafError: the target asks for a typed key.
    """
    leaf, path = show_path(handle.path), handle.reader.path
    reason = f"{path}: the leaf {leaf!r} is a PRNG key of the implementation {key.impl!r}, which this jax does not have"
    remedy = "install or register what defines it, and wrap the data with jax.random.wrap_key_data"
    if state_dict.is_prng_key(target):
        raise UnsupportedLeafError(
            f"{reason}; give a uint32 array as the target's leaf, or no target, to get its raw data; or {remedy}",
            path=path,
            leaf=leaf,
        )
    _log.warning("%s; its raw data is restored. To use it as a key, %s", reason, remedy)
    return np.array(key.data)


def is_ambiguous(handle: LeafHandle, target: Any) -> bool:
    """Return whether a leaf may be a typed key or its data, and the target's leaf does not decide it."""
    may_be_key = LeafKind.PRNG_KEY in handle.possible_kinds
    return may_be_key and (_kind_of(target) is not LeafKind.ARRAY or state_dict.is_prng_key(target))


def is_converted(handle: LeafHandle, target: Any, cast: bool) -> bool:
    """Return whether a stored number is converted: to an array for abstract targets, to the target's type by a cast.

    Args:
        handle: of the stored leaf, with its resolved kind.
        target: the target's leaf.
        cast: the setting ``dtype="target"``.
    """
    if handle.kind not in _PYTHON.values() and handle.kind is not LeafKind.NUMPY_SCALAR:
        return False
    if wants_array(target):
        return cast or isinstance(target, jax.ShapeDtypeStruct)
    return cast and (type(target) in _PYTHON or isinstance(target, np.generic))


def wants_array(target: Any) -> bool:
    """Return whether a target's leaf is an array, abstract or not, and no typed key."""
    return isinstance(target, np.ndarray | jax.Array | jax.ShapeDtypeStruct) and not state_dict.is_prng_key(target)


def number_dtype(number: Any) -> np.dtype[Any]:
    """Return the dtype of a numpy scalar, or the one that holds a Python number's type."""
    return number.dtype if isinstance(number, np.generic) else np.dtype(type(number))


def stored_dtype(handle: LeafHandle) -> np.dtype[Any] | None:
    """Return the dtype of a stored array or number, or None for text and bytes."""
    return handle.dtype if handle.dtype is not None else _DTYPES.get(handle.kind)


def _kind_of(target: Any) -> LeafKind | None:
    if isinstance(target, np.generic):
        return LeafKind.NUMPY_SCALAR
    if isinstance(target, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return LeafKind.ARRAY
    return _PYTHON.get(type(target))


def ambiguous_key(handle: LeafHandle) -> CorruptCheckpointError:
    """Return the error for a leaf that may be a typed key or its data."""
    leaf = show_path(handle.path)
    return CorruptCheckpointError(
        f"{handle.reader.path}: the leaf {leaf!r} may be a typed PRNG key or its raw data, which the lost files "
        f"array_metadatas/process_* record; restore them from a copy, or give a uint32 array as the target's leaf, "
        f"which gets the raw data, and wrap it with jax.random.wrap_key_data if it was a key",
        path=handle.reader.path,
        leaf=leaf,
    )
