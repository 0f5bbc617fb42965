"""Remedies for leaves of types that no format can hold, in the words of all formats."""

from __future__ import annotations

from typing import Any


def remedy(leaf: Any) -> str:
    """Return what to do about a leaf of an unsupported type."""
    if callable(leaf):
        return (
            "leave functions and classes out of the tree: declare the field with "
            "flax.struct.field(pytree_node=False), as TrainState does for apply_fn, or remove the key"
        )
    if isinstance(leaf, (set, frozenset)):
        return "convert it to a sorted list, or leave it out of the tree"
    return "convert it to an array, number, str or bytes, or leave it out of the tree"
