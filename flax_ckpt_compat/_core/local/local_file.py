"""Read ranges of a local file, open as a descriptor: a rename replaces its name, not its bytes."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Sequence
from typing import Any

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.local import memory_map
from flax_ckpt_compat._core.local.safe_open import open_regular
from flax_ckpt_compat._core.storage import HEAD_BYTES, Source
from flax_ckpt_compat._core.storage_errors import translated


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
        """Map ranges (offset and length); see `memory_map.map_regions`."""
        return memory_map.map_regions(self._fd, ranges)

    def close(self) -> None:
        """Close the file."""
        self._closer()
        self._fd = -1
