"""Copy arrays to host memory for an async save. The caller blocks until this returns.

Most of the time goes into page faults of new memory. Large blocks get huge pages, several threads touch them, and the
next save uses them again, unless the setting ``reuse_host_memory`` forbids it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._save import host_memory

_THREADS = min(8, os.cpu_count() or 1)
# Below so many bytes, starting threads takes longer than copying.
_MIN_PARALLEL_BYTES = 4 * 2**20
_PIECE_BYTES = 8 * 2**20
_FIRST_BLOCK, _LARGEST_BLOCK = 2**20, 64 * 2**20

_Array = np.ndarray[Any, Any]


class Copies:
    """A batch of array copies in shared memory blocks: `add` the arrays, then `make` all copies at once."""

    def __init__(self, *, reuse: bool = True) -> None:
        self._reuse = reuse
        self._pairs: list[tuple[_Array, Any]] = []
        self._block = np.empty(0, np.uint8)
        self._offset = 0
        self._next_block = _FIRST_BLOCK

    def add(self, source: Any) -> _Array:
        """Return the copy of a numpy or jax array, in C order; its values are undefined until `make` has returned."""
        if source.nbytes >= _LARGEST_BLOCK:
            target = np.ndarray(source.shape, source.dtype, self._memory(source.nbytes))
        else:
            offset = self._allocate(source.nbytes)  # may replace the block
            target = np.ndarray(source.shape, source.dtype, self._block, offset)
        self._pairs.append((target, source))
        return target

    def _allocate(self, nbytes: int) -> int:
        """Return an aligned offset in the current block; start a new block when it is full."""
        if self._offset + nbytes > self._block.nbytes:
            self._block = self._memory(max(self._next_block, nbytes))
            self._offset, self._next_block = 0, min(2 * self._next_block, _LARGEST_BLOCK)
        offset = self._offset
        self._offset += nbytes + -nbytes % memory.ALIGNMENT
        return offset

    def _memory(self, nbytes: int) -> _Array:
        return host_memory.take(nbytes) if self._reuse else memory.empty((nbytes,), np.dtype(np.uint8))

    def make(self) -> None:
        """Make all copies, in pieces of the largest arrays. They are read-only: nobody else changes them any more."""
        pairs, self._pairs = [(target, np.asarray(source)) for target, source in self._pairs], []
        if _THREADS == 1 or sum([target.nbytes for target, _ in pairs]) < _MIN_PARALLEL_BYTES:
            _copy_all(pairs)
        else:
            pieces = [piece for pair in pairs for piece in _pieces(*pair)]
            in_parallel(_copy_all, [pieces[start::_THREADS] for start in range(_THREADS)], _THREADS)
        for target, _ in pairs:
            memory.freeze(target)
        self._block, self._offset = np.empty(0, np.uint8), 0
        if self._reuse:
            host_memory.end_of_copies()
        else:
            host_memory.forget()


def _copy_all(pairs: list[tuple[_Array, _Array]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


def _pieces(target: _Array, source: _Array) -> Iterator[tuple[_Array, _Array]]:
    if target.nbytes <= 2 * _PIECE_BYTES or not source.flags.c_contiguous:
        yield target, source
        return
    flat_target, flat_source = target.reshape(-1), source.reshape(-1)
    step = max(1, _PIECE_BYTES // target.itemsize)
    for start in range(0, flat_target.size, step):
        yield flat_target[start : start + step], flat_source[start : start + step]
