"""Host memory of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from flax_ckpt_compat._core.tree import HostCopy


def to_host(leaf: Any) -> np.ndarray[Any, Any]:
    """The leaf as a plain ndarray: a view on the CPU, one transfer for an array on a device."""
    return np.asarray(leaf.data if isinstance(leaf, HostCopy) else leaf)
