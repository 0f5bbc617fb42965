"""Collect problems that make a restore impossible under any policy."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import DtypeMismatchError


@dataclasses.dataclass(slots=True)
class Problems:
    """Problems that make a restore impossible, found before any read.

    Attributes:
        misfits: (leaf, shape, sharding) of arrays that the target's sharding cannot hold.
        casts: (leaf, stored dtype, the target's) where there is no such cast.
        ambiguous: leaves that may be typed PRNG keys or their raw data.
    """

    misfits: list[tuple[str, tuple[int, ...], Any]] = dataclasses.field(default_factory=list)
    casts: list[tuple[str, Any, Any]] = dataclasses.field(default_factory=list)
    ambiguous: list[LeafHandle] = dataclasses.field(default_factory=list)


def no_cast(leaf: str, stored: Any, wanted: Any, path: str) -> DtypeMismatchError:
    """Return the error for a cast that does not exist."""
    return DtypeMismatchError(
        f"{path}: {leaf}: the stored {stored} cannot be cast to the target's {wanted}; give the target's leaf a dtype "
        "of numbers, or restore it as stored (dtype='stored') and convert it afterwards.",
        path=path,
        leaf=leaf,
    )
