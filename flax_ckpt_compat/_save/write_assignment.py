"""Share out the writing of arrays that several processes hold whole, as data-parallel jobs hold their states."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any, NamedTuple

from flax_ckpt_compat._core.tree import Path

# Smaller arrays are left to process 0: they are written together.
_MIN_BYTES = 2**20


class _Replicated(NamedTuple):
    nbytes: int
    holders: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]


class Replicas:
    """Arrays of one save that are replicated over processes, process 0 among them."""

    def __init__(self) -> None:
        self._arrays: dict[Path, _Replicated] = {}

    def holders(self) -> dict[Path, tuple[int, ...]]:
        """Return the processes that hold each."""
        return {path: array.holders for path, array in self._arrays.items()}

    def add(self, path: Path, array: Any, holders: Collection[int]) -> None:
        """Add a ``jax.Array``, and the processes that hold it."""
        if array.nbytes >= _MIN_BYTES and len(holders) > 1:
            self._arrays[path] = _Replicated(array.nbytes, tuple(sorted(holders)), str(array.dtype), array.shape)

    def writers(self) -> dict[Path, int]:
        """Return which process writes each array, about as many bytes each: the same for the same arrays."""
        loads: dict[int, int] = {}
        found = {}
        for path, (nbytes, holders, *_) in sorted(self._arrays.items(), key=lambda item: (-item[1].nbytes, item[0])):
            writer = min(holders, key=lambda process: (loads.get(process, 0), process))
            loads[writer] = loads.get(writer, 0) + nbytes
            found[path] = writer
        return found

    def digest(self) -> str:
        """Return what has to be the same in all processes that share out the work."""
        text = repr([(path, tuple(array)) for path, array in sorted(self._arrays.items())])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
