"""Read arrays, or rows of them, that are plain bytes in C order somewhere in a file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.layouts.layout import bytes_of, damaged


def read(file: Location, offset: int, one: LeafHandle | ArraySlice) -> np.ndarray[Any, Any]:
    """Read an array that begins at an offset of a file, or a slice of it."""
    handle = one if isinstance(one, LeafHandle) else one.handle
    if isinstance(one, LeafHandle) or not one.index:
        return _rows(file, offset, handle, slice(0, handle.shape[0] if handle.shape else 1))
    found = _rows(file, offset, handle, one.index[0])
    part = found[(slice(None), *one.index[1:])]
    result = memory.empty(part.shape, part.dtype)
    result[...] = part
    return result


def _rows(file: Location, offset: int, handle: LeafHandle, rows: slice) -> np.ndarray[Any, Any]:
    assert handle.dtype is not None
    shape = (rows.stop - rows.start, *handle.shape[1:]) if handle.shape else ()
    row = math.prod(handle.shape[1:]) * handle.dtype.itemsize
    found = memory.empty(shape, handle.dtype)
    data = bytes_of(file, offset + rows.start * row, offset + rows.start * row + found.nbytes)
    if len(data) != found.nbytes:
        raise damaged(file, f"{handle.name} ends after {len(data)} of {found.nbytes} bytes", handle.name)
    memory.as_bytes(found)[:] = data
    handle.reader.meter.add(len(data), handle.path)
    return found
