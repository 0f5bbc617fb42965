"""Encode and decode stored chunks: zstd, a CRC-32C behind, and shards of one chunk, which are what Orbax writes.

TensorStore's zarr drivers decode all other codecs; see `zarr`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import zstandard
from crc32c import crc32c

CHECKSUM_NBYTES, ZSTD_LEVEL = 4, 1
# Of all codecs zstd expands most: 4 bytes to at most 128 KiB.
MAX_RATIO = 1 << 16
_INDEX_NBYTES = 16  # offset and size of the only chunk of a shard
_of_thread = threading.local()  # to make a compressor or decompressor takes far longer than a small chunk
_NOTHING = b"\xff" * _INDEX_NBYTES  # the index of a shard without it


class UndecodableChunkError(Exception):
    """A chunk does not decode; the text goes on after "the chunk"."""


class ChunkChecksumError(UndecodableChunkError):
    """A chunk does not match the checksum behind it."""


class UnsupportedCodecError(UndecodableChunkError):
    """A chunk has a codec that nothing here decodes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkCodec:
    """Encoding of stored chunks: compression, checksum, and place in a shard."""

    zstd: bool = False
    checksum: bool = False  # whether their CRC-32C follows
    sharded: bool = False  # whether each is the only one of a shard, whose index is at the end, with its CRC-32C

    def decode(self, stored: bytes | memoryview, nbytes: int, target: memoryview | None = None) -> bytes | memoryview:
        """Return the bytes of a chunk: the ``target`` of its size, if they could be decompressed there."""
        check_ratio(stored, nbytes)
        data = _in_shard(memoryview(stored)) if self.sharded else memoryview(stored)
        if self.checksum:
            data = checked(data)
        return _decompressed(data, nbytes, target) if self.zstd else whole(data, nbytes)


def _in_shard(stored: memoryview) -> memoryview:
    index = checked(stored[max(0, len(stored) - _INDEX_NBYTES - CHECKSUM_NBYTES) :])
    start, size = (int.from_bytes(index[at : at + 8], "little") for at in (0, 8))
    if index == _NOTHING or start + size > len(stored):
        raise UndecodableChunkError("is missing in its shard")
    return stored[start : start + size]


RAW = ChunkCodec()  # of chunks that are stored as they are


def check_ratio(stored: bytes | memoryview, nbytes: int) -> None:
    """Raise UndecodableChunkError, before memory is asked for, if no codec makes so many bytes of a chunk."""
    if nbytes > len(stored) * MAX_RATIO:
        raise UndecodableChunkError(f"has {len(stored)} bytes, which cannot hold {nbytes}")


def whole(data: bytes | memoryview, nbytes: int) -> bytes | memoryview:
    """Return the bytes of a chunk; raise if they are more or fewer."""
    if len(data) != nbytes:
        raise UndecodableChunkError(f"has {len(data)} bytes, expected {nbytes}")
    return data


def compressed(data: Any) -> bytes:
    """Return a zstd frame of some bytes, at the level that Orbax uses (0.12.8)."""
    if not hasattr(_of_thread, "compressor"):
        _of_thread.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    frame: bytes = _of_thread.compressor.compress(data)
    return frame


def with_checksum(data: bytes) -> bytes:
    """Return some bytes with their CRC-32C behind."""
    return data + checksum_of(data)


def checksum_of(data: Any) -> bytes:
    """Return the CRC-32C of some bytes, as it is stored behind them."""
    return crc32c(data).to_bytes(CHECKSUM_NBYTES, "little")


def checked(data: memoryview) -> memoryview:
    """Return what is before the CRC-32C at the end of some bytes; raise `ChunkChecksumError` if it is another."""
    body, end = data[:-CHECKSUM_NBYTES], data[-CHECKSUM_NBYTES:]
    if end != checksum_of(body):
        raise ChunkChecksumError("does not match its CRC-32C")
    return body


def _decompressed(frame: memoryview, nbytes: int, target: memoryview | None) -> bytes | memoryview:
    data: bytes | memoryview
    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed not in (-1, nbytes):  # -1: not recorded
            raise UndecodableChunkError(f"has {claimed} decompressed bytes, expected {nbytes}")
        if target is None:
            if not hasattr(_of_thread, "decompressor"):
                _of_thread.decompressor = zstandard.ZstdDecompressor()
            data = _of_thread.decompressor.decompress(frame, max_output_size=nbytes, allow_extra_data=False)
            length = len(data)
        else:
            data, reader, length = target, zstandard.ZstdDecompressor().stream_reader(frame), 0
            while length < nbytes and (more := reader.readinto(target[length:])):
                length += more
            length += len(reader.read(1))
    except zstandard.ZstdError as error:
        raise UndecodableChunkError(f"does not decompress ({error})") from error
    if length != nbytes:
        raise UndecodableChunkError(f"has {length} decompressed bytes, expected {nbytes}")
    return data


def codec_of(specs: Sequence[Any], chunks: Sequence[int]) -> tuple[ChunkCodec | None, bool]:
    """Return the codec of a zarr v3 array with chunks of this shape, and whether its numbers are big-endian.

    The codec is None where only TensorStore decodes it."""
    names = list(map(_name, specs))
    if names == ["sharding_indexed"]:
        shard = specs[0]["configuration"]
        codec, is_big = codec_of(shard["codecs"], chunks)
        index, at_end = list(map(_name, shard["index_codecs"])), shard.get("index_location", "end") == "end"
        is_known = at_end and index == ["bytes", "crc32c"] and not _is_big(shard["index_codecs"][0])
        if codec is None or codec.sharded or not is_known or list(shard["chunk_shape"]) != list(chunks):
            return None, is_big
        return dataclasses.replace(codec, sharded=True), is_big
    known = {(): RAW, ("zstd",): ChunkCodec(zstd=True), ("crc32c",): ChunkCodec(checksum=True)}
    known["zstd", "crc32c"] = ChunkCodec(zstd=True, checksum=True)
    return known.get(tuple(names[1:])) if names[:1] == ["bytes"] else None, _is_big(specs[0])


def _name(spec: Any) -> str:
    return spec if isinstance(spec, str) else str(spec["name"])


def _is_big(spec: Any) -> bool:
    return isinstance(spec, Mapping) and (spec.get("configuration") or {}).get("endian") == "big"
