"""Copy arrays to host memory for an async save. The caller blocks until this returns.

New pages can cost far more than the copy, so each manager keeps the memory of its last save for the next one. It is
used again once nothing refers to the arrays in it: what a save still reads is never written to.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.thread_pools import in_parallel

_THREADS = 4
# Below so many bytes, starting threads takes longer than copying.
_MIN_PARALLEL_BYTES = 4 * 2**20
_PIECE_BYTES = 8 * 2**20
_BLOCK_BYTES = 64 * 2**20
# Advice that not every system has: huge pages; the kernel may take the pages until they are written to again.
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_FREE: int | None = getattr(mmap, "MADV_FREE", None)

_Array = np.ndarray[Any, Any]
_BYTE = np.dtype(np.uint8)


class _Block:
    """Pages of this process alone; `bytes` lends them to one save at a time."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._lent: weakref.ref[_Array] | None = None
        _advise(self._pages, _HUGE_PAGES)

    @property
    def is_free(self) -> bool:
        """Return whether no array in it is left."""
        return self._lent is None or self._lent() is None

    def bytes(self) -> _Array:
        """Return the pages with undefined values."""
        lent: _Array = np.frombuffer(self._pages, _BYTE)  # the base of views of it, and of views of these
        pages = self._pages
        self._lent = weakref.ref(lent, lambda _: _advise(pages, _FREE))
        return lent


def _advise(pages: mmap.mmap, advice: int | None) -> None:
    if advice is not None:
        with suppress(OSError):
            pages.madvise(advice)


# Manager → the blocks of its last save. Changed by single operations only, as a signal handler may save, too.
_kept: weakref.WeakKeyDictionary[Any, list[_Block]] = weakref.WeakKeyDictionary()


class Copies:
    """A batch of array copies: `add` the arrays, then `make` all copies at once."""

    def __init__(self, manager: Any) -> None:
        """Use the memory of the manager's last save, if that save has ended."""
        self._manager, self._free, self._used = manager, list[_Block](), list[_Block]()
        with suppress(TypeError):  # an object that has no weak references, or no hash
            self._free = [block for block in _kept.pop(manager, ()) if block.is_free]
        self._pairs: list[tuple[_Array, _Array]] = []
        self._bytes, self._offset = np.empty(0, _BYTE), 0

    def add(self, source: _Array) -> _Array:
        """Return the copy of an array, in C order; its values are undefined until `make` has returned."""
        # At a page, the disk can take a large array from here past the page cache.
        alignment = memory.PAGE if source.nbytes >= memory.PAGED_FROM else memory.ALIGNMENT
        self._offset += -self._offset % alignment
        if self._offset + source.nbytes > self._bytes.nbytes:
            self._bytes, self._offset = self._next_block(source.nbytes), 0
        target = np.ndarray(source.shape, source.dtype, self._bytes, self._offset)
        self._offset += source.nbytes
        self._pairs.append((target, source))
        return target

    def _next_block(self, nbytes: int) -> _Array:
        block = next((block for block in self._free if block.nbytes >= nbytes), None)
        if block is not None:
            self._free.remove(block)
        else:
            try:
                block = _Block(max(_BLOCK_BYTES, nbytes))
            except OSError:
                return memory.empty((nbytes,), _BYTE)
        self._used.append(block)
        return block.bytes()

    def make(self) -> None:
        """Make all copies. They are read-only: nobody else changes them any more."""
        pairs, self._pairs = self._pairs, []
        if sum([target.nbytes for target, _ in pairs]) < _MIN_PARALLEL_BYTES:
            _copy_all(pairs)
        else:
            pieces = [piece for pair in pairs for piece in _pieces(*pair)]
            in_parallel(_copy_all, [pieces[start::_THREADS] for start in range(_THREADS)], _THREADS)
        for target, _ in pairs:
            memory.freeze(target)
        with suppress(TypeError):
            _kept[self._manager] = self._used
        self._bytes, self._free, self._used = np.empty(0, _BYTE), [], []


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
