"""How a stored leaf is read; and small arrays, whose bytes lie in the index itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Part

from . import grid
from .decode import Decoder
from .grid import Box
from .jobs import Job
from .names import key_prefix
from .places import Index
from .zarr import ArrayInfo

# Small arrays share memory, which goes when the last of them does.
_SMALL = 4096
_TOGETHER = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """How to read a leaf that is stored as an array; leaves of one type share it.

    Attributes:
        info: the metadata of the array.
        decoder: makes the leaf of the array.
        is_plain: the array is the leaf.
        handle: kind, shape, dtype and size of a leaf, and what else it may have been: see `LeafHandle`.
        inline_key: of `inline_key`.
    """

    info: ArrayInfo
    decoder: Decoder
    is_plain: bool
    handle: tuple[LeafKind, tuple[int, ...], np.dtype[Any] | None, int, frozenset[LeafKind]]
    inline_key: str | None

    def job(self, handle: LeafHandle, index: Box | None) -> Job:
        """What to read for a leaf, or a box of it."""
        if index is not None:
            # A dtype that the format lacks is stored with an axis more.
            index = (*index, *grid.whole(self.info.shape[len(index) :]))
        return Job(handle.name, self.info, handle.path, index)


def inline_key(info: ArrayInfo) -> str | None:
    """The key, below the array's own prefix, of the chunk that is a whole small array; None for all others."""
    is_candidate = info.is_one_raw_chunk and info.nbytes <= _SMALL
    return info.chunk_key((0,) * len(info.shape)) if is_candidate else None


def take_inline(
    index: Index | None, wanted: Sequence[LeafHandle | Part], values: list[Any]
) -> tuple[list[int], list[tuple[LeafHandle, int]]]:
    """Copies small whole arrays whose bytes the index has.

    Args:
        index: of the checkpoint; None where it has no arrays.
        wanted: what shall be read.
        values: where the arrays go, each at its number in what is wanted.

    Returns:
        The numbers of all else that is wanted; and the leaves that are still to be decoded, with their numbers.
    """
    if index is None:
        return list(range(len(wanted))), []
    rest: list[int] = []
    found: list[tuple[int, LeafHandle, bytes]] = []
    for number, one in enumerate(wanted):
        if isinstance(one, LeafHandle) and isinstance(one.where, Where) and one.where.inline_key is not None:
            value = index.find(key_prefix(one.name) + one.where.inline_key)
            if type(value) is bytes and len(value) == one.where.info.nbytes:
                found.append((number, one, value))
                continue
        rest.append(number)
    for start in range(0, len(found), _TOGETHER):
        block = found[start : start + _TOGETHER]
        packed = memory.packed([(one.where.info.shape, one.where.info.dtype, value) for _, one, value in block])
        for (number, _, _), array in zip(block, packed, strict=True):
            values[number] = array
    return rest, [(one, number) for number, one, _ in found if not one.where.is_plain]
