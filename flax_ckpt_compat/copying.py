"""Copies of arrays in host memory, made on several threads: for as long as they take, the caller waits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._core.pools import Pool

_THREADS = min(8, os.cpu_count() or 1)
# Below this, starting threads takes longer.
_WORTH_THREADS = 4 * 2**20
_PIECE = 8 * 2**20

_Array = np.ndarray[Any, Any]


class Copies:
    """Collects what is to be copied, then copies all of it at once."""

    def __init__(self) -> None:
        self._pairs: list[tuple[_Array, _Array]] = []

    def of(self, source: _Array) -> _Array:
        """New memory, in C order, which has the values once `make` has returned."""
        target = np.empty(source.shape, source.dtype)
        self._pairs.append((target, source))
        return target

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
