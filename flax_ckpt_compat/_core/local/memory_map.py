"""Map local files privately: arrays over a file's bytes, copied on write.

Python's ``mmap`` keeps a descriptor open for every mapping, and a checkpoint may have thousands of files.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

# Bytes below which a copy costs no more than the page faults.
MIN_BYTES = 32 * 2**10
_FAILED = ctypes.c_void_p(-1).value
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
# Linux refuses private mappings larger than its memory unless they reserve no swap.
_KIND = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

Region = tuple[int, int]


class _Mapping:
    """Mapped memory, unmapped with the last array over it."""

    def __init__(self, address: int, length: int):
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (length,), "data": (address, False)}
        # Not at exit, when other threads may still read.
        weakref.finalize(self, _libc().munmap, address, length).atexit = False


def map_regions(fd: int, regions: Sequence[Region]) -> list[np.ndarray[Any, Any] | None]:
    """Map regions (offset and length) of a file as writable uint8 arrays over one mapping.

    Return None for regions to read instead: those beyond the end of the file or overlapping another region, and all
    if the system cannot map the file. Writing to an array changes neither the file nor another region. Truncating the
    file while an array is alive kills the process that touches it. The descriptor may be closed afterwards."""
    size = os.fstat(fd).st_size
    views: list[np.ndarray[Any, Any] | None] = [None] * len(regions)
    chosen, last = [], 0
    for number in sorted(range(len(regions)), key=regions.__getitem__):
        offset, length = regions[number]
        if last <= offset and offset + length <= size and length:
            chosen.append(number)
            last = offset + length
    if not chosen:
        return views
    first = regions[chosen[0]][0] // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    whole = _map(fd, first, last - first)
    if whole is not None:
        for number in chosen:
            offset, length = regions[number]
            views[number] = whole[offset - first : offset - first + length]
    return views


def _map(fd: int, offset: int, length: int) -> np.ndarray[Any, Any] | None:
    address = _libc().mmap(None, length, _ACCESS, _KIND, fd, offset)
    return None if address == _FAILED else np.asarray(_Mapping(address, length))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
