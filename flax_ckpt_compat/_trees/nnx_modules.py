"""Fill nnx modules in place with a restored state, without importing nnx in programs that do not use it."""

from __future__ import annotations

import sys
from typing import Any


def is_module(value: Any) -> bool:
    """Return whether a value is a module or optimizer of nnx, abstract or not."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, (nnx.Module, nnx.Optimizer))


def state_of(module: Any) -> Any:
    """Return the ``nnx.State`` of a module."""
    return sys.modules["flax.nnx"].state(module)


def filled(module: Any, state: Any) -> Any:
    """Set the variables of a module to those of a state, and return the module."""
    sys.modules["flax.nnx"].update(module, state)
    return module
