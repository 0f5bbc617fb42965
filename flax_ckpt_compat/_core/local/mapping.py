"""Private mappings of local files: arrays that show a file's bytes and keep to themselves what is written to them.

Not Python's ``mmap``: it keeps a descriptor open for every mapping, and a checkpoint may have thousands of files.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Below this a copy costs no more than the page faults.
MIN_BYTES = 32 * 2**10
_FAILED = ctypes.c_void_p(-1).value
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
# Linux refuses private mappings larger than its memory unless told that few pages will ever be written to.
_KIND = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

Region = tuple[int, int]


class _Mapping:
    """Mapped memory, which goes back to the system with the last array over it."""

    def __init__(self, address: int, length: int):
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (length,), "data": (address, False)}
        # Not at exit, when other threads may still read.
        weakref.finalize(self, _libc().munmap, address, length).atexit = False


def map_regions(fd: int, regions: Sequence[Region]) -> list[np.ndarray[Any, Any] | None]:
    """The bytes of regions of a file, as memory over one mapping of it.

    Writing to it changes neither the file nor another region. Truncating the file while the memory is alive kills the
    process that touches it; the descriptor is not needed any more.

    Args:
        fd: of a local file.
        regions: offset and length of each, in bytes.

    Returns:
        Writable arrays of uint8; None for what has to be read instead: what the file does not have, what overlaps
        another region, and everything where the system does not map the file.
    """
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


def merge_by_index(found: Mapping[int, Any], others: Iterable[Any]) -> list[Any]:
    """Values at their places, and others, in their order, at all places between and behind them."""
    rest = iter(others)
    merged: list[Any] = []
    for place in sorted(found):
        merged += [*itertools.islice(rest, place - len(merged)), found[place]]
    return merged + list(rest)


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
