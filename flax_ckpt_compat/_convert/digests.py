"""Compute the checksums of arrays while they are written, so that the source is not read again to verify a result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from flax_ckpt_compat._convert.output_trees import Contents, array_nbytes
from flax_ckpt_compat._core import checksums, memory
from flax_ckpt_compat._core.thread_pools import Once, Pool
from flax_ckpt_compat._core.tree import KeyData, Path, StoredArray

Name = tuple[str, Path]
# Bytes; smaller arrays are cheap to read again.
_FROM = 256 << 10


class Digests:
    """CRC-32s of the arrays that are read in a ``with`` block, computed on another thread."""

    def __init__(self, contents: Contents, progress: Callable[[int], None]) -> None:
        """Watch the reads of all arrays, and report the size of each to ``progress``."""
        # Item and key path → CRC-32 of all bytes of an array in C order; without those of small arrays.
        self.crcs: dict[Name, int] = {}
        self._pool, self._pending = Pool(1, "flax-ckpt-digest"), list[tuple[Name, Once]]()
        for name, leaf in contents.leaves.items():
            array = leaf.data if isinstance(leaf, KeyData) else leaf
            if isinstance(array, StoredArray):
                array.read = functools.partial(self._read, name, array.read, array_nbytes(leaf), progress)
                if array.read_part is not None:
                    array.read_part = functools.partial(_read_part, array.read_part, progress)

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()

    def _read(self, name: Name, read: Callable[[], Any], nbytes: int, progress: Callable[[int], None]) -> Any:
        self._finish()  # so that nothing holds the array before
        value = read()
        if type(value) is np.ndarray and value.nbytes >= _FROM and value.flags.c_contiguous and name not in self.crcs:
            self._pending.append((name, self._pool.submit(checksums.crc32, memory.as_bytes(value))))
        progress(nbytes)
        return value

    def _finish(self) -> None:
        while self._pending:
            name, computed = self._pending.pop()
            self.crcs[name] = computed.result()


def _read_part(read: Callable[[Any], Any], progress: Callable[[int], None], box: tuple[slice, ...]) -> Any:
    value = read(box)
    progress(value.nbytes)
    return value
