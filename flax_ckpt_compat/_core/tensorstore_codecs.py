"""Encode and decode buffers by TensorStore's zarr v3 codecs."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.load_tensorstore import load_tensorstore

ts = load_tensorstore()
Codec = str | Mapping[str, Any]
# Threads that encode at once, and sizes of buffers for which an array is kept open.
_SLOTS, _MAX_ARRAYS = 64, 64


def decode(data: bytes, codec: Codec, length: int) -> bytes:
    """Decode a buffer of so many decoded bytes; raise ValueError if it does not decode to these."""
    context = _context()
    ts.KvStore.open("memory://", context=context).result()["c/0"] = data
    array: Any = ts.open(_spec([length], "", [codec]), create=True, open=True, context=context).result()
    decoded: bytes = array.read().result().tobytes()
    return decoded


class Encoder:
    """Encodes buffers, on several threads; those of one size share an array, since opening one takes time."""

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self._codecs, self._context = codecs, _context()
        self._store = ts.KvStore.open("memory://", context=self._context).result()
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
            spec = _spec([_SLOTS, length], f"{length}/", self._codecs)
            array = ts.open(spec, create=True, open=True, context=self._context).result()
            self._arrays[length] = array
        return array


def _context() -> Any:
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


def _spec(shape: list[int], path: str, codecs: Sequence[Codec]) -> dict[str, Any]:
    """Return the spec of an array of bytes in memory, of which each row is a chunk."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "memory", "path": path},
        "metadata": {
            "shape": shape,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [1, *shape[1:]] if shape[1:] else shape},
            },
            "data_type": "uint8",
            "codecs": ["bytes", *codecs],
        },
        "store_data_equal_to_fill_value": True,
    }
