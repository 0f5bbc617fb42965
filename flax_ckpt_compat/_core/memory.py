"""Allocate aligned host memory for arrays; pause the garbage collector."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from flax_ckpt_compat._core.array_boxes import Box, Shape
from flax_ckpt_compat._core.errors import OutOfMemoryError
from flax_ckpt_compat._core.text_formatting import format_size

# Bytes. jax on the CPU takes over host memory without a copy only if it is aligned like this.
ALIGNMENT = 64
# Memory goes to a disk past the page cache (`local.new_file`) page by page, where it is worth a place of its own.
PAGE, PAGED_FROM = 4096, 2**20
# Small arrays share blocks of so many bytes and arrays at most, which are freed with the last array in them.
_BLOCK, _ARRAYS_PER_BLOCK = 256 * 2**10, 64
_REMEDY = "free memory, or raise the limit of this process (ulimit -v)"
# Of arrays that are put into one: numpy 1 has at most 32 axes, of which blocks of arrays and of their chunks take two.
MAX_PACKED_RANK = 30
_pause = {"on": False}


@contextmanager
def pause_gc(*, enabled: bool = True) -> Iterator[None]:
    """Pause Python's cyclic garbage collector while many long-lived objects are created: it would walk all of jax's."""
    is_paused = enabled and gc.isenabled()
    try:
        if is_paused:
            _pause["on"] = True
            gc.disable()
        yield
    finally:
        if is_paused:
            gc.enable()
            _pause["on"] = False


# The thread that paused it is in the parent only, and would never resume it in a child.
os.register_at_fork(after_in_child=lambda: gc.enable() if _pause["on"] else None)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int = ALIGNMENT) -> np.ndarray[Any, Any]:
    """Return an uninitialised, writable, C-order array that begins at a multiple of ``alignment`` bytes."""
    size = math.prod(shape) * dtype.itemsize
    try:
        raw = np.empty(size + alignment, np.uint8)
    except MemoryError as error:
        message = f"there is no memory for {dtype.name}{list(shape)} ({format_size(size)}); {_REMEDY}"
        raise OutOfMemoryError(message) from error
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def pack_chunks(
    arrays: Sequence[bytes | memoryview],
    shape: Shape,
    dtype: np.dtype[Any],
    chunk: Shape,
    copies: Sequence[tuple[Box, Box]],
) -> list[np.ndarray[Any, Any]]:
    """Assemble small arrays of one shape, of at most `MAX_PACKED_RANK` axes, each from the bytes of all its chunks.

    ``copies`` are the boxes in each chunk, and in the array."""
    size = math.prod(shape) * dtype.itemsize
    stride = max(size + -size % ALIGNMENT, ALIGNMENT)
    most = max(1, min(_ARRAYS_PER_BLOCK, _BLOCK // stride))
    packed: list[np.ndarray[Any, Any]] = []
    for start in range(0, len(arrays), most):
        some = arrays[start : start + most]
        block = empty((len(some), stride), np.dtype(np.uint8))[:, :size]
        rows = block.view(dtype).reshape(len(some), *shape) if size else np.empty((len(some), *shape), dtype)
        chunks: Any = view_as(np.frombuffer(b"".join(some), np.uint8), dtype, (len(some), len(copies), *chunk))
        for number, (source, target) in enumerate(copies):
            rows[(slice(None), *target)] = chunks[(slice(None), number, *source)]
        packed.extend(rows if shape else [rows[number, ...] for number in range(len(some))])  # no numpy scalars
    return packed


def may_change(array: Any) -> bool:
    """Return whether an array's memory may be written to by others, as numpy arrays may by other threads."""
    return isinstance(array, np.ndarray) and (array.flags.writeable or may_change(array.base))


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a C-contiguous array of any dtype (ml_dtypes have no buffer format of their own)."""
    return array.reshape(-1).view(np.uint8).data


def view_as(array: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: Shape) -> np.ndarray[Any, Any]:
    """Return the bytes of an array as one of another dtype and shape; numpy cannot view those without bytes."""
    return array.reshape(-1).view(dtype).reshape(shape) if array.nbytes else np.empty(shape, dtype)
