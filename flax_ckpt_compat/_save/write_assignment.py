"""Share out the writing of arrays that several processes hold whole, as data-parallel jobs hold their states."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection
from typing import Any

from flax_ckpt_compat._core.tree import Path, show_path

# Smaller arrays are left to process 0: they are written together.
_MIN_BYTES = 2**20


class Replicas:
    """Arrays of one save that are replicated over processes, process 0 among them."""

    def __init__(self) -> None:
        self._arrays: dict[Path, tuple[tuple[int, ...], str, tuple[int, ...]]] = {}  # holders, dtype and shape

    def add(self, path: Path, array: Any, holders: Collection[int]) -> None:
        """Add a ``jax.Array``, and the processes that hold it."""
        if array.nbytes >= _MIN_BYTES and len(holders) > 1:
            self._arrays[path] = tuple(sorted(holders)), str(array.dtype), array.shape

    def writers(self) -> dict[Path, int]:
        """Return which process writes each array, by a hash of its name."""
        return {
            path: holders[zlib.crc32(show_path(path).encode("utf-8", "surrogateescape")) % len(holders)]
            for path, (holders, _, _) in self._arrays.items()
        }

    def digest(self) -> str:
        """Return what has to be the same in all processes that share out the work."""
        text = repr(sorted(self._arrays.items()))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
