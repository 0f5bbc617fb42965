"""Copy arrays to host memory for an async save. The caller blocks until this returns.

Most of the time goes into page faults of new memory. Large blocks get huge pages, several threads touch them, and the
next save uses them again, unless the setting ``reuse_host_memory`` forbids it: where a virtual machine's host takes
back what was freed, new pages cost far more than the copy: 0.5 GB took 1.5 to 1.9 s, and 0.05 s in pages that were kept
(measured). A block is kept once nothing refers to the arrays in it, so what a save still reads, or one that failed, is
never written to. Kept pages are marked as free: the kernel takes them when memory is short.

Large arrays begin at a page, so that the disk can take them from here past the page cache (`_core.local.new_file`).
"""

from __future__ import annotations

import collections
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.thread_pools import in_parallel

_THREADS = min(8, os.cpu_count() or 1)
# Below so many bytes, starting threads takes longer than copying.
_MIN_PARALLEL_BYTES = 4 * 2**20
_PIECE_BYTES = 8 * 2**20
_FIRST_BLOCK, _LARGEST_BLOCK = 2**20, 64 * 2**20

_Array = np.ndarray[Any, Any]
# A block that so many saves in a row had no use for is freed.
_UNUSED_SAVES = 2
_BYTE = np.dtype(np.uint8)
# Advice that not every system has. numpy asks for huge pages, too.
_FREE: int | None = getattr(mmap, "MADV_FREE", None)
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class Copies:
    """A batch of array copies in shared memory blocks: `add` the arrays, then `make` all copies at once."""

    def __init__(self, *, reuse: bool = True) -> None:
        self._reuse = reuse
        self._pairs: list[tuple[_Array, _Array]] = []  # target and source
        self._block = np.empty(0, np.uint8)
        self._offset = 0
        self._next_block = _FIRST_BLOCK

    def add(self, source: _Array) -> _Array:
        """Return the copy of an array, in C order; its values are undefined until `make` has returned."""
        if source.nbytes >= _LARGEST_BLOCK:
            target = np.ndarray(source.shape, source.dtype, self._memory(source.nbytes))
        elif source.nbytes >= memory.PAGED_FROM:
            offset = self._allocate(source.nbytes, memory.PAGE)  # may replace the block
            target = np.ndarray(source.shape, source.dtype, self._block, offset)
        else:
            offset = self._allocate(source.nbytes, memory.ALIGNMENT)
            target = np.ndarray(source.shape, source.dtype, self._block, offset)
        self._pairs.append((target, source))
        return target

    def _allocate(self, nbytes: int, alignment: int) -> int:
        """Return an aligned offset in the current block; start a new block when it is full."""
        self._offset += -self._offset % alignment
        if self._offset + nbytes > self._block.nbytes:
            self._block = self._memory(max(self._next_block, nbytes))
            self._offset, self._next_block = 0, min(2 * self._next_block, _LARGEST_BLOCK)
        offset = self._offset
        self._offset += nbytes + -nbytes % memory.ALIGNMENT
        return offset

    def _memory(self, nbytes: int) -> _Array:
        return _take(nbytes) if self._reuse else memory.empty((nbytes,), np.dtype(np.uint8))

    def make(self) -> None:
        """Make all copies, in pieces of the largest arrays. They are read-only: nobody else changes them any more."""
        pairs, self._pairs = self._pairs, []
        if _THREADS == 1 or sum([target.nbytes for target, _ in pairs]) < _MIN_PARALLEL_BYTES:
            _copy_all(pairs)
        else:
            # By size, so that all threads get as much: kernels and biases take turns in a tree.
            pieces = sorted((piece for pair in pairs for piece in _pieces(*pair)), key=_size, reverse=True)
            in_parallel(_copy_all, [pieces[start::_THREADS] for start in range(_THREADS)], _THREADS)
        for target, _ in pairs:
            memory.freeze(target)
        self._block, self._offset = np.empty(0, np.uint8), 0
        if self._reuse:
            _end_of_copies()
        else:
            forget()


def _size(pair: tuple[_Array, _Array]) -> int:
    return int(pair[0].nbytes)


def _copy_all(pairs: list[tuple[_Array, _Array]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


def _pieces(target: _Array, source: _Array) -> Iterator[tuple[_Array, _Array]]:
    if target.nbytes <= 2 * _PIECE_BYTES or not source.flags.c_contiguous:
        yield target, source
        return
    # As bytes, whatever the address.
    flat_target, flat_source = (np.frombuffer(memory.as_bytes(array), _BYTE) for array in (target, source))
    for start in range(0, target.nbytes, _PIECE_BYTES):
        yield flat_target[start : start + _PIECE_BYTES], flat_source[start : start + _PIECE_BYTES]


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


def _take(nbytes: int) -> np.ndarray[Any, Any]:
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


def _end_of_copies() -> None:
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
