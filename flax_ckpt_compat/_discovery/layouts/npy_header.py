"""Read the header of a ``.npy`` file, and its array, from a stream."""

from __future__ import annotations

import math
import tokenize
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle

_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Header(NamedTuple):
    """Shape, order and dtype of an array."""

    shape: tuple[int, ...]
    is_c_order: bool
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


def read(stream: IO[bytes]) -> Header:
    """Read a header; numpy evaluates no more than its literals, up to 10 kB. Raise ValueError if it is none."""
    version = npy.read_magic(stream)
    if version not in _READERS:
        raise ValueError(f"the version {version} of the .npy format")
    try:
        shape, is_fortran, dtype = _READERS[version](stream)
    except (SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise ValueError("a header that does not decode") from error
    if any(side < 0 for side in shape):
        raise ValueError(f"the shape {shape}")
    return Header(tuple(map(int, shape)), not is_fortran, dtype)


def read_array(stream: IO[bytes], handle: LeafHandle) -> np.ndarray[Any, Any]:
    """Read the array of a handle, in C order, from a stream at the beginning of its file."""
    assert handle.dtype is not None
    header = read(stream)
    found = memory.empty(handle.shape if header.is_c_order else handle.shape[::-1], handle.dtype)
    rest = memory.as_bytes(found)
    while rest:
        if not (data := stream.read(len(rest))):
            raise EOFError("the end of the array")
        rest[: len(data)] = data
        rest = rest[len(data) :]
    if header.is_c_order:
        return found
    result = memory.empty(handle.shape, handle.dtype)
    result[...] = found.T
    return result
