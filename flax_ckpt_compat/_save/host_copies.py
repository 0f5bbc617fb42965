"""Copies of arrays in host memory, for as long as whose making the caller waits.

Most of that time is the system's, for memory that is touched for the first time. Large blocks get large pages, which
numpy asks for, and several threads touch them: copies of 504 MB in 144 arrays took 33 ms so, and 190 ms one by one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.thread_pools import Pool

_THREADS = min(8, os.cpu_count() or 1)
# Below this, starting threads takes longer.
_WORTH_THREADS = 4 * 2**20
_PIECE = 8 * 2**20
_FIRST_BLOCK, _LARGEST_BLOCK = 2**20, 64 * 2**20

_Array = np.ndarray[Any, Any]


class Copies:
    """Collects what is to be copied, then copies all of it at once, into memory that the copies share."""

    def __init__(self) -> None:
        self._pairs: list[tuple[_Array, _Array]] = []
        self._block = np.empty(0, np.uint8)
        self._at = 0
        self._next_block = _FIRST_BLOCK

    def of(self, source: _Array) -> _Array:
        """New memory, in C order, which has the values once `make` has returned."""
        if source.nbytes >= _LARGEST_BLOCK:
            target = np.empty(source.shape, source.dtype)
        else:
            at = self._room_for(source.nbytes)
            target = np.ndarray(source.shape, source.dtype, self._block, at)
        self._pairs.append((target, source))
        return target

    def _room_for(self, nbytes: int) -> int:
        """An aligned place in the block, of which a new one is made where this one is full."""
        if self._at + nbytes > self._block.nbytes:
            self._block = memory.empty((max(self._next_block, nbytes),), np.dtype(np.uint8))
            self._at, self._next_block = 0, min(2 * self._next_block, _LARGEST_BLOCK)
        at = self._at
        self._at += nbytes + -nbytes % memory.ALIGNMENT
        return at

    def make(self) -> None:
        """Makes all copies; the largest arrays in pieces."""
        pairs, self._pairs = self._pairs, []
        if _THREADS == 1 or sum([target.nbytes for target, _ in pairs]) < _WORTH_THREADS:
            for target, source in pairs:
                np.copyto(target, source)
            return
        with Pool(_THREADS, thread_name_prefix="flax-ckpt-copy") as pool:
            for done in [pool.submit(_copy_all, group) for group in _groups(pairs)]:
                done.result()


def _copy_all(pairs: list[tuple[_Array, _Array]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


def _groups(pairs: list[tuple[_Array, _Array]]) -> Iterator[list[tuple[_Array, _Array]]]:
    """About equal amounts of work; small arrays together."""
    group: list[tuple[_Array, _Array]] = []
    nbytes = 0
    for piece in itertools.chain.from_iterable(itertools.starmap(_pieces, pairs)):
        group.append(piece)
        nbytes += piece[0].nbytes
        if nbytes >= _PIECE:
            yield group
            group, nbytes = [], 0
    yield group


def _pieces(target: _Array, source: _Array) -> Iterator[tuple[_Array, _Array]]:
    if target.nbytes <= 2 * _PIECE or not source.flags.c_contiguous:
        yield target, source
        return
    flat_target, flat_source = target.reshape(-1), source.reshape(-1)
    step = max(1, _PIECE // target.itemsize)
    for start in range(0, flat_target.size, step):
        yield flat_target[start : start + step], flat_source[start : start + step]
