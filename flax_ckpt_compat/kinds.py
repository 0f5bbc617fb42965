"""Scalars of which the checkpoint does not say whether they were Python numbers, numpy scalars or 0-d arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind

_PYTHON = {bool: LeafKind.BOOL, int: LeafKind.INT, float: LeafKind.FLOAT, complex: LeafKind.COMPLEX}


def settle(value: Any, handle: LeafHandle, target: Any) -> tuple[Any, LeafHandle]:
    """A stored scalar as the kind that the target's leaf is, if it may have been saved as one.

    Args:
        value: as the backend read it.
        handle: its handle.
        target: the target's leaf, or None.

    Returns:
        The same number, and its handle with the kind that was settled on.
    """
    kind = _kind_of(target) if handle.may_be else None
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
