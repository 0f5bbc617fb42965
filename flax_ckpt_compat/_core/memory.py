"""Fresh host memory for arrays."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

# jax on the CPU takes over host memory without a copy only where it is aligned like this.
ALIGNMENT = 64


@contextmanager
def collection_paused(*, near: bool = True) -> Iterator[None]:
    """Keeps Python's cyclic garbage collector off while very many objects are made, all of which stay.

    They would set off full collections, each of which walks everything that jax holds: a third of the time of
    saving 5,000 leaves. For short stretches of computing, with no more file access than reading
    metadata from a local disk.

    Args:
        near: false where a store is waited for, which would be no short stretch: nothing is paused.
    """
    was_on = near and gc.isenabled()
    if was_on:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialised, writable, C-order array on a 64-byte boundary."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def packed(
    wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any], bytes | memoryview]],
) -> list[np.ndarray[Any, Any]]:
    """Small arrays in one piece of memory, each on a 64-byte boundary in a part of its own.

    Args:
        wanted: shape, dtype and bytes of each.
    """
    room = sum([len(data) for _, _, data in wanted]) + ALIGNMENT * len(wanted)
    memory = empty((room,), np.dtype(np.uint8))
    view, at = memory.data, 0
    arrays = []
    for shape, dtype, data in wanted:
        size = len(data)
        view[at : at + size] = data
        arrays.append(np.ndarray(shape, dtype, memory, at))
        at += size + -size % ALIGNMENT
    return arrays


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a C-contiguous array, whatever its dtype (ml_dtypes have no buffer format of their own)."""
    return array.reshape(-1).view(np.uint8).data
