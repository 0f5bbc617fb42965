"""Has the kernel write TensorStore's files to disk while they are still being written.

TensorStore writes a file and then syncs it, so that the disk idles while the bytes are copied, and the copying waits
while the disk works. Told early, the kernel does both at once: one array of 1 GiB took half the time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.syncing import start_writeback

_EVERY = 0.01  # seconds
_LEAST = 8 << 20


class Writeback:
    """Follows the files in a directory as they grow; only hints, so that nothing depends on it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        # What was handed over, by inode: files get their names at the end.
        self._begun: dict[int, int] = {}

    def until_done(self, future: Any) -> None:
        """Waits for TensorStore's future, and raises what it raises."""
        while not future.done():
            with suppress(TimeoutError):
                future.exception(timeout=_EVERY)
            with suppress(OSError):
                self._go_on()
        future.result()

    def _go_on(self) -> None:
        with os.scandir(self._directory) as entries:
            for entry in entries:
                size, begun = entry.stat().st_size, self._begun.get(entry.inode(), 0)
                if size - begun >= _LEAST:
                    self._begin(entry.path, begun, size)
                    self._begun[entry.inode()] = size

    def _begin(self, path: str, start: int, stop: int) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            start_writeback(descriptor, start, stop - start)
        finally:
            os.close(descriptor)
