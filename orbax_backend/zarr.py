"""Encode and decode the metadata of an array: ``.zarray`` (zarr v2) and ``zarr.json`` (zarr v3)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.array_boxes import cells, full_box
from flax_ckpt_compat._core.dtypes import ZARR_ML_DTYPES, ZARR_TYPESTRS, dtype_from_name, zarr_name
from flax_ckpt_compat._core.orbax_layout import ARRAY_METADATA_FILES

from . import chunk_codecs
from .chunk_codecs import RAW, ChunkCodec, check_ratio, codec_of, whole
from .load_tensorstore import load_tensorstore

# What TensorStore says of a wrong checksum, and of codecs that it does not have.
_TENSORSTORE_ERRORS = {
    "is not registered": chunk_codecs.UnsupportedCodecError,
    "Digest mismatch": chunk_codecs.ChunkChecksumError,
}
_V3_NAMES = ZARR_ML_DTYPES | {np.dtype(name).name for name in ZARR_TYPESTRS}
# The level is that of Orbax 0.12.8; older TensorStore reads no metadata without ``checksum`` (0.1.71, measured).
_ZSTD = {"name": "zstd", "configuration": {"level": chunk_codecs.ZSTD_LEVEL, "checksum": False}}
_SPLIT_CHUNK_BYTES = 8 << 20
# A chunk is in one file, and object stores accept at most 5 GiB per request.
_PLAIN_CHUNK_BYTES = 2 << 30
MAX_RANK = 32  # TensorStore's and (about) numpy's


class Encoding(NamedTuple):  # which hashes quickly: every array's is looked up
    """Codecs of the chunks of a checkpoint."""

    # Whether chunks end with their CRC-32C, and are decoded whole; arrays are zarr v3 then, which has that codec.
    checksums: bool = False
    zstd: bool = False  # whether they are compressed before that
    part_bytes: int | None = None  # see `WriteOptions.part_bytes`

    @property
    def metadata_file(self) -> str:
        """Return the name of the file with an array's metadata."""
        return ARRAY_METADATA_FILES[self.checksums]

    @property
    def chunk_bytes(self) -> int:
        """Return the limit of a chunk; see `chunk_shape`."""
        return _SPLIT_CHUNK_BYTES if self.checksums else self.part_bytes or _PLAIN_CHUNK_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayInfo:
    """The metadata of one array."""

    # Shape and dtype of the whole array; the dtype has the stored byte order.
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]  # shape of one chunk
    zarr3: bool
    has_fill_value: bool  # whether there is a value for missing chunks
    separator: str  # separator of the indices in chunk keys
    prefix: str
    codec: ChunkCodec | None  # how chunks are decoded; None if TensorStore does that
    text: bytes  # the metadata

    @property
    def raw(self) -> bool:
        """Return whether chunks are stored in C order without a codec."""
        return self.codec is RAW

    @property
    def chunk_nbytes(self) -> int:
        """Return the size of one chunk in bytes, decoded; zarr also stores those at the edge whole."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def chunk_key(self, cell: tuple[int, ...]) -> str:
        """Return the key of a chunk, relative to the array's prefix."""
        first = [self.prefix] if self.prefix else []
        return self.separator.join([*first, *map(str, cell)]) or "0"

    def keys(self) -> Iterator[str]:
        """Yield the keys of all chunks."""
        return (self.chunk_key(cell) for cell, _ in cells(full_box(self.shape), self.chunks))

    def decode(self, stored: bytes | memoryview, target: memoryview | None = None) -> bytes | memoryview:
        """Return the bytes of a chunk; see `ChunkCodec.decode`."""
        if self.codec is not None:
            return self.codec.decode(stored, self.chunk_nbytes, target)
        check_ratio(stored, self.chunk_nbytes)
        return whole(memory.as_bytes(self._by_tensorstore(bytes(stored), self.chunks)), self.chunk_nbytes)

    def fill_value(self) -> Any:
        """Return the value of all that is in missing chunks."""
        return self._by_tensorstore(None, (1,) * len(self.shape)).reshape(-1)[0]

    def _by_tensorstore(self, stored: bytes | None, chunks: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return the array of one chunk, which is missing without ``stored``."""
        ts = load_tensorstore()
        try:
            context = ts.Context()
            store = ts.KvStore.open("memory://", context=context).result()
            metadata = {**json.loads(self.text), "shape": list(chunks)}
            store[ARRAY_METADATA_FILES[self.zarr3]] = json.dumps(metadata).encode()
            if stored is not None:
                store[self.chunk_key((0,) * len(chunks))] = stored
            spec = {"driver": "zarr3" if self.zarr3 else "zarr", "kvstore": "memory://"}
            values = ts.open(spec, open=True, read=True, context=context).result().read().result()
        except (ValueError, OSError, NotImplementedError) as error:
            kinds = (kind for what, kind in _TENSORSTORE_ERRORS.items() if what in str(error))
            raise next(kinds, chunk_codecs.UndecodableChunkError)(f"does not decode ({error})") from error
        return np.ascontiguousarray(values, self.dtype)


class UnsupportedArrayError(Exception):
    """An array is of a type that this release does not read; the text goes on after "it is"."""


def chunk_shape(shape: tuple[int, ...], write_shape: tuple[int, ...], itemsize: int, limit: int) -> list[int]:
    """Choose the chunk shape of an array; chunks do not cross shards, which have the shape ``write_shape``.

    Shards above a ``limit`` in bytes are split along their first axes. It is 2 GiB for plain ones, which are read
    directly into place; 32 MiB in stores, for several connections; and 8 MiB for those with a codec, to use several
    threads, and to decode less for a part.
    """
    # zarr has no empty chunks, so an empty array has a chunk shape but stores no chunk.
    chunks = [max(1, length) for length in write_shape]
    for axis in range(len(chunks)):
        parts = -(-math.prod(chunks) * itemsize // limit)
        if parts < 2:
            break
        wanted = max(1, chunks[axis] // parts)
        # The last chunk is stored whole, so make all about equally long.
        wanted = -(-chunks[axis] // -(-chunks[axis] // wanted))
        chunks[axis] = wanted if write_shape[axis] == shape[axis] else _divisor(chunks[axis], wanted)
    return chunks


def _divisor(length: int, wanted: int) -> int:
    """Return the largest divisor up to ``wanted``, or the length itself if that divisor is far smaller."""
    found = next(side for side in range(wanted, 0, -1) if length % side == 0 or side * 8 < wanted)
    return found if length % found == 0 else length


def dump_metadata(
    shape: tuple[int, ...], write_shape: tuple[int, ...], dtype: np.dtype[Any], encoding: Encoding
) -> dict[str, Any]:
    """Return the ``.zarray`` or ``zarr.json`` of an array, with the keys that Orbax writes; see `chunk_shape`."""
    chunks = chunk_shape(shape, write_shape, dtype.itemsize, encoding.chunk_bytes)
    if encoding.checksums:
        return _dump_v3(list(shape), chunks, dtype, zstd=encoding.zstd)
    return {
        "chunks": chunks,
        "compressor": None,
        "dimension_separator": ".",
        "dtype": zarr_name(dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }


def _dump_v3(shape: list[int], chunks: list[int], dtype: np.dtype[Any], *, zstd: bool) -> dict[str, Any]:
    fill_values: dict[str, Any] = {"b": False, "c": [0.0, 0.0]}
    endian = "little" if dtype.newbyteorder("<") == dtype else "big"
    order = {} if dtype.itemsize == 1 else {"configuration": {"endian": endian}}
    return {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes", **order}, *([_ZSTD] if zstd else []), {"name": "crc32c"}],
        "data_type": dtype.name,
        "fill_value": fill_values.get(dtype.kind, 0),  # version 3 requires one; every chunk is stored
        "node_type": "array",
        "shape": shape,
        "zarr_format": 3,
    }


def parse_array_metadata(text: bytes, zarr3: bool) -> ArrayInfo:
    """Parse a ``zarr.json`` or ``.zarray``; raise ValueError if it is damaged, or describes an impossible array.

    Raise UnsupportedArrayError for dtypes, filters and grids that we do not know."""
    expected = 3 if zarr3 else 2
    try:
        metadata = json.loads(text)
        if metadata.get("zarr_format", expected) != expected:
            raise ValueError(f"unknown zarr_format {metadata['zarr_format']!r}")
        dtype, chunks, codec, prefix, separator = (_parse_v3 if zarr3 else _parse_v2)(metadata)
        if separator not in (".", "/"):
            raise ValueError(f"unknown separator {separator!r}")
        has_fill_value = metadata.get("fill_value") is not None
        shape = _lengths(metadata["shape"])
        info = ArrayInfo(shape, dtype, chunks, zarr3, has_fill_value, separator, prefix, codec, text)
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the array's metadata does not decode ({error!r})") from error
    if len(info.shape) != len(info.chunks) or 0 in info.chunks:
        raise ValueError(f"shape {info.shape} with chunks {info.chunks} is not a grid")
    if math.prod(max(1, length) for length in info.shape) * info.dtype.itemsize >= 2**62:
        raise ValueError(f"an array of shape {info.shape} fits no memory")
    return info


# Of an array: dtype, shape of chunks, codec, and prefix and separator of the keys of chunks.
_Parsed = tuple[np.dtype[Any], tuple[int, ...], ChunkCodec | None, str, Any]


def _parse_v2(metadata: dict[str, Any]) -> _Parsed:
    name = metadata["dtype"]
    if isinstance(name, list) or (name not in ZARR_ML_DTYPES and name not in ZARR_TYPESTRS):
        raise _unknown("dtype", name)
    if metadata.get("filters"):
        raise _unknown("filters", metadata["filters"])
    compressor = metadata.get("compressor")
    codec = RAW if compressor is None else ChunkCodec(zstd=True) if compressor["id"] == "zstd" else None
    if metadata.get("order", "C") != "C":
        codec = None
    return dtype_from_name(name), _lengths(metadata["chunks"]), codec, "", metadata.get("dimension_separator", ".")


def _parse_v3(metadata: dict[str, Any]) -> _Parsed:
    name = metadata["data_type"]
    if name not in _V3_NAMES:
        raise _unknown("data_type", name)
    grid, encoding = metadata["chunk_grid"], metadata["chunk_key_encoding"]
    if grid["name"] != "regular" or encoding["name"] not in ("default", "v2"):
        raise _unknown("chunk grid or key encoding", [grid["name"], encoding["name"]])
    dtype, chunks = dtype_from_name(name), _lengths(grid["configuration"]["chunk_shape"])
    codec, is_big = codec_of(metadata["codecs"], chunks)
    if is_big and name not in ZARR_ML_DTYPES:
        dtype = dtype.newbyteorder(">")
    elif is_big and dtype.itemsize > 1:  # numpy has no other byte order of it: TensorStore reads it
        codec = None
    prefix, separator = ("c", "/") if encoding["name"] == "default" else ("", ".")
    return dtype, chunks, codec, prefix, (encoding.get("configuration") or {}).get("separator", separator)


def _unknown(what: str, found: object) -> Exception:
    """Return the error for metadata of a kind that we do not know; what no writer writes is damage."""
    if isinstance(found, str | list):
        return UnsupportedArrayError(f"an array with the {what} {found!r:.200}")
    return ValueError(f"unknown {what} {found!r}")


def _lengths(value: object) -> tuple[int, ...]:
    lengths = tuple(value) if isinstance(value, list) else (None,)
    if len(lengths) > MAX_RANK or not all(type(length) is int and 0 <= length < 2**62 for length in lengths):
        raise ValueError(f"{value!r} is not a shape")
    return lengths
