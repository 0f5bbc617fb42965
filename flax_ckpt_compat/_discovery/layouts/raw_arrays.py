"""Read arrays that are plain bytes in C order somewhere in files: neighbours together, on threads; and `.npy` files."""

from __future__ import annotations

import math
import sys
import tokenize
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, handle_of
from flax_ckpt_compat._core.byte_reads import Read, neighbours, read_runs
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.location import of_text
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.storage import Source
from flax_ckpt_compat._discovery.layouts.layout import damaged

_NPY_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def nbytes_of(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the bytes of an array; raise ValueError if numpy has none of this shape."""
    np.empty((1,) * len(shape), np.uint8)
    if min(shape, default=0) < 0 or math.prod(side or 1 for side in shape) * dtype.itemsize > sys.maxsize:
        raise ValueError(f"the shape {tuple(shape)!r:.100}")
    return math.prod(shape) * dtype.itemsize


def read_all(wanted: Sequence[tuple[Source, int, LeafHandle | ArraySlice]], meter: Meter) -> list[np.ndarray[Any, Any]]:
    """Read arrays, or slices of them, each of which begins at an offset of a file."""
    rows = [_rows(one) for _, _, one in wanted]
    reads = [_read(*place, array) for place, array in zip(wanted, rows, strict=True) if array.nbytes]
    for source in {read.source for read in reads}:
        if source.is_closed:
            raise StorageError(f"{source.path}: the checkpoint was closed; open it again", path=source.path)
    read_runs(neighbours(reads), lambda _: None, _ended, meter)
    return [_cut(one, array) for (_, _, one), array in zip(wanted, rows, strict=True)]


def _rows(one: LeafHandle | ArraySlice) -> np.ndarray[Any, Any]:
    """Return memory for an array, or for the rows that a slice lies in."""
    handle = handle_of(one)
    assert handle.dtype is not None
    if isinstance(one, LeafHandle) or not one.index:
        return memory.empty(handle.shape, handle.dtype)
    return memory.empty((one.index[0].stop - one.index[0].start, *handle.shape[1:]), handle.dtype)


def _read(source: Source, offset: int, one: LeafHandle | ArraySlice, array: np.ndarray[Any, Any]) -> Read:
    handle, first = (one, 0) if isinstance(one, LeafHandle) else (one.handle, one.index[0].start if one.index else 0)
    start = offset + first * math.prod(handle.shape[1:]) * array.dtype.itemsize
    return Read(source, start, array.nbytes, handle.path, memory.as_bytes(array), handle)


def _cut(one: LeafHandle | ArraySlice, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if isinstance(one, LeafHandle) or not one.index:
        return rows
    part = rows[(slice(None), *one.index[1:])]
    if part.shape == rows.shape:
        return rows
    result = memory.empty(part.shape, part.dtype)
    result[...] = part
    return result


def _ended(read: Read | None) -> Exception:
    assert read is not None  # no run goes on behind its reads
    handle = read.content
    return damaged(of_text(read.source.path), f"it ends within the {handle.nbytes} bytes of {handle.name}", handle.name)


def npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, whether the order is Fortran's, and dtype of an `.npy` file; raise ValueError if it has none.

    numpy evaluates no more than the header's literals, up to 10 kB."""
    version = npy.read_magic(stream)
    if version not in _NPY_READERS:
        raise ValueError(f"the version {version} of the .npy format")
    try:
        shape, is_fortran, dtype = _NPY_READERS[version](stream)
    except (SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise ValueError("a header that does not decode") from error
    return tuple(map(int, shape)), is_fortran, dtype


def read_npy(stream: IO[bytes], handle: LeafHandle) -> np.ndarray[Any, Any]:
    """Read the array of a handle, in C order, from a stream at the beginning of its `.npy` file."""
    assert handle.dtype is not None
    found = npy.read_array(stream, allow_pickle=False)
    return np.require(found, requirements=["C", "W"]).view(handle.dtype)
