"""Read ranges of a local file, open as a descriptor: a rename replaces its name, not its bytes."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.local.safe_open import open_regular
from flax_ckpt_compat._core.storage import HEAD_BYTES, Source
from flax_ckpt_compat._core.storage_errors import translated

MAPPED_FROM = 32 * 2**10  # bytes, below which a copy costs no more than the page faults


class LocalFile(Source):
    """A regular file."""

    # Between arrays are mostly keys and headers.
    gap, longest, is_local = 512, 256 * 2**10, True
    # Two more than CPUs: some wait for the disk while others copy.
    threads = min(8, (os.cpu_count() or 1) + 2)

    def __init__(self, path: str):
        self.path, self._fd = path, open_regular(path)
        self._closer = weakref.finalize(self, os.close, self._fd)
        self.size = os.fstat(self._fd).st_size

    @functools.cached_property
    def head(self) -> bytes:  # type: ignore[override]
        """Return the first bytes."""
        return self.read(0, HEAD_BYTES)

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        """Return whether the descriptor is closed."""
        return self._fd < 0

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def read(self, start: int, stop: int) -> bytes:
        """Read from ``start`` to ``stop`` or the end."""
        stop = min(stop, self.size)
        return b"" if stop <= start else os.pread(self._fd, stop - start, start)

    def fill(self, pieces: Sequence[memoryview], offset: int) -> int:
        """Fill memory, see `Source`."""
        rest, at = [piece for piece in pieces if piece], offset
        with translated(self.path, "read"):
            while rest:
                count = os.preadv(self._fd, rest, at)
                at += count
                if not count:
                    break
                memory.drop_first(rest, count)
        return at - offset

    def map(self, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        """Map ranges (offset and length); see `map_regions`."""
        return map_regions(self._fd, ranges)

    def close(self) -> None:
        """Close the file."""
        self._closer()
        self._fd = -1


def map_regions(fd: int, regions: Sequence[tuple[int, int]]) -> list[np.ndarray[Any, Any] | None]:
    """Map regions (offset and length) of a file as writable uint8 arrays over one mapping.

    Return None for regions to read instead: empty ones, those beyond the end of the file or overlapping another region,
    and all if the system cannot map the file. Writing to an array changes neither the file nor another region.
    Truncating the file while an array is alive kills the process that touches it. The descriptor may be closed
    afterwards; each mapping has one of its own."""
    size = os.fstat(fd).st_size
    views: list[np.ndarray[Any, Any] | None] = [None] * len(regions)
    chosen, first, last = [], size, 0
    for number in sorted(range(len(regions)), key=regions.__getitem__):
        offset, length = regions[number]
        if length and last <= offset and offset + length <= size:
            chosen.append(number)
            first, last = min(first, offset), offset + length
    try:
        with os.fdopen(fd, "rb", closefd=False) as file:
            whole = np.asarray(np.memmap(file, np.uint8, "c", first, (last - first,))) if chosen else None
    except (OSError, ValueError):
        return views
    for number in chosen:
        offset, length = regions[number]
        assert whole is not None
        views[number] = whole[offset - first : offset - first + length]
    return views
