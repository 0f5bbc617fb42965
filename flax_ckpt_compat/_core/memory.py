"""Allocate aligned host memory for arrays; pause the garbage collector."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from flax_ckpt_compat._core.errors import OutOfMemoryError
from flax_ckpt_compat._core.escaping import format_size

# Bytes. jax on the CPU takes over host memory without a copy only if it is aligned like this.
ALIGNMENT = 64
_BLOCK = 256 * 2**10  # bytes of small arrays that share memory
# Address space of TensorStore's library and of each of its threads: it aborts at 60 MiB on two cores (measured).
_TENSORSTORE_BYTES, _THREAD_BYTES = 80 << 20, 16 << 20
_REMEDY = "free memory, or raise the limit of this process (ulimit -v)"


@contextmanager
def pause_gc(*, enabled: bool = True) -> Iterator[None]:
    """Pause Python's cyclic garbage collector while many long-lived objects are created.

    They would trigger full collections, each of which walks everything that jax holds: a third of the time of
    saving 5,000 leaves. Use only around short computations that read at most metadata from a local disk: with
    ``enabled`` false, when waiting for a store, nothing is paused."""
    was_on = enabled and gc.isenabled()
    if was_on:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an uninitialised, writable, C-order array on a 64-byte boundary.

    Raises:
        OutOfMemoryError: there is not so much memory.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        raw = np.empty(size + ALIGNMENT, np.uint8)
    except MemoryError as error:
        message = f"there is no memory for {dtype.name}{list(shape)} ({format_size(size)}); {_REMEDY}"
        raise OutOfMemoryError(message) from error
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def check_address_space() -> None:
    """Check, where it is limited, that enough is left to load TensorStore, which else aborts the process.

    Raises:
        OutOfMemoryError: it is not.
    """
    with suppress(ImportError, OSError, ValueError):  # other systems than Linux
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY or "tensorstore" in sys.modules:
            return
        with open("/proc/self/statm", "rb") as file:
            left = limit - int(file.read().split()[0]) * resource.getpagesize()
        needed = _TENSORSTORE_BYTES + (os.cpu_count() or 1) * _THREAD_BYTES
        if left < needed:
            raise OutOfMemoryError(
                f"{format_size(max(0, left))} of address space are left to this process, but TensorStore, which reads "
                f"and writes Orbax's format, needs {format_size(needed)}; {_REMEDY}"
            )


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
