"""Allocate aligned host memory for arrays; pause the garbage collector."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

# Bytes. jax on the CPU takes over host memory without a copy only if it is aligned like this.
ALIGNMENT = 64
_BLOCK = 256 * 2**10  # bytes of small arrays that share memory


@contextmanager
def pause_gc(*, enabled: bool = True) -> Iterator[None]:
    """Pause Python's cyclic garbage collector while many long-lived objects are created.

    They would trigger full collections, each of which walks everything that jax holds: a third of the time of
    saving 5,000 leaves. Use only around short computations that read at most metadata from a local disk.

    Args:
        enabled: pass false when waiting for a store; nothing is paused then.
    """
    was_on = enabled and gc.isenabled()
    if was_on:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an uninitialised, writable, C-order array on a 64-byte boundary."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def pack(
    arrays: Sequence[tuple[tuple[int, ...], np.dtype[Any], bytes | memoryview]],
) -> list[np.ndarray[Any, Any]]:
    """Copy small arrays (shape, dtype and bytes) into blocks of memory, each array on a 64-byte boundary."""
    left = sum([len(data) for _, _, data in arrays]) + ALIGNMENT * len(arrays)
    packed = []
    offset = end = 0
    for shape, dtype, data in arrays:
        size = len(data)
        if offset + size >= end:
            end = max(min(left, _BLOCK), size)
            block = empty((end,), np.dtype(np.uint8))
            view, offset = block.data, 0
        view[offset : offset + size] = data
        packed.append(np.ndarray(shape, dtype, block, offset))
        offset += size + -size % ALIGNMENT
        left -= size + ALIGNMENT
    return packed


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a C-contiguous array of any dtype (ml_dtypes have no buffer format of their own)."""
    return array.reshape(-1).view(np.uint8).data
