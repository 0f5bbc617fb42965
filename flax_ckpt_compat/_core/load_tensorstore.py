"""Load TensorStore, where only a part of the library needs it, and encode by its codecs.

Listings of checkpoints do without it, and without numpy."""

from __future__ import annotations

import collections
import functools
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core.errors import ForkedProcessError, OutOfMemoryError
from flax_ckpt_compat._core.text_formatting import format_size
from flax_ckpt_compat._core.thread_pools import run_apart

if TYPE_CHECKING:
    import numpy as np

# Address space of TensorStore's library and of each of its threads: it aborts at 60 MiB on two cores (measured).
_TENSORSTORE_BYTES, _THREAD_BYTES = 80 << 20, 16 << 20
# Threads that encode at once, and sizes of buffers for which an array is kept open.
_SLOTS, _MAX_ARRAYS = 64, 64
_state = {"used": False, "forked": False}


def load_tensorstore() -> Any:
    """Import TensorStore and return it; raise OutOfMemoryError if a limit leaves too little, so that it would abort."""
    if "tensorstore" not in sys.modules:
        _check_address_space()
        # In another thread: after Ctrl-C interrupted it, a second import aborts the process (0.1.86, measured).
        run_apart(functools.partial(importlib.import_module, "tensorstore"))
    return importlib.import_module("tensorstore")


def _check_address_space() -> None:
    with suppress(ImportError, OSError, ValueError):  # other systems than Linux
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return
        with open("/proc/self/statm", "rb") as file:
            left = limit - int(file.read().split()[0]) * resource.getpagesize()
        needed = _TENSORSTORE_BYTES + (os.cpu_count() or 1) * _THREAD_BYTES
        if left < needed:
            raise OutOfMemoryError(
                f"{format_size(max(0, left))} of address space are left to this process, but TensorStore, which reads "
                f"and writes Orbax's format, needs {format_size(needed)}; free memory, or raise "
                "the limit of this process (ulimit -v)"
            )


def use_tensorstore(path: str = "") -> None:
    """Note that TensorStore is used from now on; raise ForkedProcessError if it was before this process was forked."""
    _state["used"] = True
    if _state["forked"]:
        raise ForkedProcessError(
            f"{path}{': ' if path else ''}this process was forked from one that had used TensorStore, which reads and "
            "writes Orbax's format and object stores, and would abort it. Restore and save in the parent, or start "
            "processes by 'spawn' or 'forkserver' (multiprocessing.set_start_method; multiprocessing_context= of data "
            "loaders)",
            path=path or None,
        )


os.register_at_fork(after_in_child=lambda: _state.update(forked=_state["used"]))


class Encoder:
    """Encodes buffers by codecs of zarr v3, on several threads.

    Those of one size share an array, since opening one takes time."""

    def __init__(self, codecs: Sequence[Mapping[str, Any]]) -> None:
        self._codecs, self._tensorstore = codecs, load_tensorstore()
        self._context = self._tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._store = self._tensorstore.KvStore.open("memory://", context=self._context).result()
        self._arrays: dict[int, Any] = {}
        self._slots = collections.deque(range(_SLOTS))

    def encode(self, data: np.ndarray[Any, Any]) -> bytes:
        """Encode an array of bytes, at least one."""
        length, slot = len(data), self._slots.popleft()
        array, key = self._array(length), f"{length}/c/{slot}/0"
        try:
            array[slot].write(data, can_reference_source_data_indefinitely=True).result()
            encoded: bytes = self._store.read(key).result().value
        finally:
            del self._store[key]
            self._slots.append(slot)
        return encoded

    def _array(self, length: int) -> Any:
        array = self._arrays.get(length)
        if array is None:
            if len(self._arrays) >= _MAX_ARRAYS:
                self._arrays.clear()
            array = self._tensorstore.open(self._spec(length), create=True, open=True, context=self._context).result()
            self._arrays[length] = array
        return array

    def _spec(self, length: int) -> dict[str, Any]:
        """Return the spec of an array in memory, of which each row of so many bytes is a chunk."""
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "memory", "path": f"{length}/"},
            "metadata": {
                "shape": [_SLOTS, length],
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, length]}},
                "data_type": "uint8",
                "codecs": ["bytes", *self._codecs],
            },
            "store_data_equal_to_fill_value": True,
        }
