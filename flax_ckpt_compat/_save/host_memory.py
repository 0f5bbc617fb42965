"""Memory for the copies of background saves, used again by the next one.

Where a virtual machine's host takes back what was freed, new pages cost far more than the copy: 0.5 GB took 1.5 to
1.9 s, and 0.05 s in pages that were kept (measured). A block is kept once nothing refers to the arrays in it, so what a
save still reads, or one that failed, is never written to. Kept pages are marked as free: the kernel takes them when
memory is short.
"""

from __future__ import annotations

import collections
import mmap
import resource
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory

# A block that so many saves in a row had no use for is freed.
_UNUSED_SAVES = 2
_BYTE = np.dtype(np.uint8)
# Advice that not every system has. numpy asks for huge pages, too.
_FREE: int | None = getattr(mmap, "MADV_FREE", None)
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class _Block:
    """Pages of this process alone."""

    def __init__(self, nbytes: int):
        self.pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = nbytes
        self.unused = 0  # number of saves since it was kept
        self._advise(_HUGE_PAGES)

    def mark_free(self) -> bool:
        """Let the kernel take the pages until they are written to again; return whether it can."""
        return self._advise(_FREE)

    def _advise(self, advice: int | None) -> bool:
        if advice is None:
            return False
        try:
            self.pages.madvise(advice)
        except OSError:
            return False
        return True


_kept: list[_Block] = []
_returned = collections.deque[_Block]()  # of arrays that are gone
_lock = threading.Lock()  # for `_kept`; nobody waits for it, as a signal handler that saves would for ever


def take(nbytes: int) -> np.ndarray[Any, Any]:
    """Return bytes with undefined values for one save; they are kept once no array refers to them any more."""
    block = _kept_block(nbytes)
    if block is None and not _can_keep():
        return memory.empty((nbytes,), _BYTE)
    try:
        block = block or _Block(nbytes)
    except OSError:
        forget()
        return memory.empty((nbytes,), _BYTE)
    pages: np.ndarray[Any, Any] = np.frombuffer(block.pages, _BYTE)
    # Views of it, and views of these, have it as their base. The collector may end it in any thread, at any time.
    weakref.finalize(pages, _give_back, block).atexit = False
    return pages[:nbytes]


def _give_back(block: _Block) -> None:
    if block.mark_free():
        _returned.append(block)


def _can_keep() -> bool:
    """Return False where the kernel cannot take pages back, or where they count against a limit all the same."""
    return _FREE is not None and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def _kept_block(nbytes: int) -> _Block | None:
    """Return the smallest kept block that is large enough, but not one of more than twice the bytes."""
    if not _lock.acquire(blocking=False):
        return None
    try:
        _collect()
        fitting = [block for block in _kept if nbytes <= block.nbytes <= 2 * nbytes]
        if not fitting:
            return None
        found = min(fitting, key=lambda block: block.nbytes)
        _kept.remove(found)
        found.unused = 0
        return found
    finally:
        _lock.release()


def _collect() -> None:
    with suppress(IndexError):
        while True:
            _kept.append(_returned.popleft())


def end_of_copies() -> None:
    """Free the blocks that the last saves had no use for, after the copies of one."""
    if _lock.acquire(blocking=False):
        try:
            _collect()
            for block in _kept:
                block.unused += 1
            _kept[:] = [block for block in _kept if block.unused <= _UNUSED_SAVES]
        finally:
            _lock.release()


def forget() -> None:
    """Free all kept blocks."""
    if _lock.acquire(blocking=False):
        try:
            _collect()
            _kept.clear()
        finally:
            _lock.release()
