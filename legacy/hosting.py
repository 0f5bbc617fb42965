"""Recognising jax arrays without importing jax, and getting their host memory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from flax_ckpt_compat._core.tree import HostCopy


def is_jax_array(leaf: Any) -> bool:
    """True for a ``jax.Array``; such a leaf implies that jax is loaded, so jax is never imported for it."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def to_host(leaf: Any) -> np.ndarray[Any, Any]:
    """The leaf as a plain ndarray: a view on the CPU, one transfer for an array on a device."""
    return np.asarray(leaf.data if isinstance(leaf, HostCopy) else leaf)
