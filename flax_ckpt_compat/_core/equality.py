"""Compare stored values bit by bit, across formats."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from flax_ckpt_compat._core import bounded_reads
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.tree import Branch, KeyData, Node, Path, iter_leaves


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two values that readers returned have the same type, dtype, shape and bits; NaNs count by bits."""
    if isinstance(one, KeyData) and isinstance(other, KeyData):
        return one.impl == other.impl and same_bits(one.data, other.data)
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        first, second = (np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in (one, other))
        if first.size % 8 == 0:  # numpy compares large integers faster
            first, second = first.view(np.uint64), second.view(np.uint64)
        return np.array_equal(first, second)
    if isinstance(one, float | complex):
        return struct.pack("<dd", one.real, one.imag) == struct.pack("<dd", other.real, other.imag)
    return bool(one == other)


class Readable(Protocol):
    """Checkpoint that is compared: a tree of leaf handles, and a way to read them."""

    tree: Node

    def read(self, handles: Sequence[Any], /) -> list[Any]:
        """Read leaves, in the given order."""
        ...


def differences(first: Readable, second: Readable) -> Iterator[tuple[Path, str]]:
    """Yield each key path at which two checkpoints differ, with what differs; reads small leaves in batches.

    Containers are not compared: msgpack files store lists as dicts.
    """
    ours, theirs = dict(iter_leaves(first.tree)), dict(iter_leaves(second.tree))
    yield from ((path, "only in the second") for path in theirs if path not in ours)
    pairs: list[tuple[LeafHandle, LeafHandle]] = []
    for path, one in ours.items():  # in stored order, so that neighbours are read together
        other = theirs.get(path)
        if path not in theirs:
            yield path, "only in the first"
        elif isinstance(one, LeafHandle) and isinstance(other, LeafHandle):
            pairs.append((one, other))
        elif (one is None, isinstance(one, Branch)) != (other is None, isinstance(other, Branch)):
            yield path, "a leaf in one, none in the other"
    left = iter(pairs)
    for batch in bounded_reads.batches([one for one, _ in pairs]):
        found, expected = zip(*itertools.islice(left, len(batch)), strict=True)
        for handle, one, other in zip(found, first.read(found), second.read(expected), strict=True):
            if not same_bits(one, other):
                yield handle.path, f"{_described(one)} and {_described(other)}"


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.40}"
