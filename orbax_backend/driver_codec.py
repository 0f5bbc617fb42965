"""Decode chunks of all codecs but those of `chunk_codecs` by TensorStore's zarr drivers, from memory."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from flax_ckpt_compat._core.load_tensorstore import load_tensorstore, use_tensorstore

from .chunk_codecs import ChunkChecksumError, UndecodableChunkError, UnsupportedCodecError

# What TensorStore says of a wrong checksum, and of codecs that it does not have.
_CHECKSUM_ERROR, _UNKNOWN_CODEC = "Digest mismatch", "is not registered"


@dataclasses.dataclass(frozen=True, slots=True)
class DriverCodec:
    """Encoding of the chunks of one array, which TensorStore decodes."""

    driver: str  # TensorStore's name of it
    file: str  # name of the metadata
    metadata: bytes  # of the whole array
    dtype: np.dtype[Any]  # of the array, like the next
    chunks: tuple[int, ...]
    key: str  # of its first chunk

    def decode(
        self, stored: bytes | memoryview | None, nbytes: int, target: memoryview | None = None
    ) -> bytes | memoryview:
        """Return the bytes of a chunk, of fill values without ``stored``; with a ``target``, they are put there."""
        use_tensorstore()
        ts = load_tensorstore()
        try:
            context = ts.Context()
            store = ts.KvStore.open("memory://", context=context).result()
            store[self.file] = json.dumps({**json.loads(self.metadata), "shape": list(self.chunks)}).encode()
            if stored is not None:
                store[self.key] = bytes(stored)
            spec = {"driver": self.driver, "kvstore": "memory://"}
            values = ts.open(spec, open=True, read=True, context=context).result().read().result()
        except (ValueError, OSError, NotImplementedError) as error:
            if _UNKNOWN_CODEC in str(error):
                raise UnsupportedCodecError(f"has a codec that TensorStore does not know ({error})") from error
            kind = ChunkChecksumError if _CHECKSUM_ERROR in str(error) else UndecodableChunkError
            raise kind(f"does not decode ({error})") from error
        data = np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8).data
        if len(data) != nbytes:
            raise UndecodableChunkError(f"has {len(data)} decoded bytes, expected {nbytes}")
        if target is None:
            return data
        target[:] = data
        return target
