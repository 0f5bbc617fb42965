"""Compute the checksums of arrays while they are written, so that the source is not read again to verify a result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from flax_ckpt_compat._convert.output_trees import Output, array_nbytes
from flax_ckpt_compat._core import checksums, memory
from flax_ckpt_compat._core.thread_pools import Once, Pool
from flax_ckpt_compat._core.tree import KeyData, Path, StoredArray

Name = tuple[str, Path]
# Bytes; smaller arrays are cheap to read again.
_FROM = 256 << 10


@contextmanager
def of_reads(output: Output, progress: Callable[[int], None]) -> Iterator[dict[Name, int]]:
    """Yield the CRC-32s of the arrays that are read in a ``with`` block, computed on another thread, once it has ended.

    They are those of all bytes of an array in C order, by item and key path; small arrays have none. The size of each
    array that is read is reported to ``progress``."""
    crcs: dict[Name, int] = {}
    pool, pending = Pool(1, "flax-ckpt-digest"), list[tuple[Name, Once]]()

    def finish() -> None:
        while pending:
            name, computed = pending.pop()
            crcs[name] = computed.result()

    def read_whole(name: Name, read: Callable[[], Any], nbytes: int) -> Any:
        finish()  # so that nothing holds the array before
        value = read()
        if type(value) is np.ndarray and value.nbytes >= _FROM and value.flags.c_contiguous and name not in crcs:
            pending.append((name, pool.submit(checksums.crc32, memory.as_bytes(value))))
        progress(nbytes)
        return value

    def read_part(read: Callable[[Any], Any], box: tuple[slice, ...]) -> Any:
        value = read(box)
        progress(value.nbytes)
        return value

    for name, leaf in output.leaves.items():
        array = leaf.data if isinstance(leaf, KeyData) else leaf
        if isinstance(array, StoredArray):
            array.read = functools.partial(read_whole, name, array.read, array_nbytes(leaf))
            if array.read_part is not None:
                array.read_part = functools.partial(read_part, array.read_part)
    try:
        yield crcs
    finally:
        finish()
