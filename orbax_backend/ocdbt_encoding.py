"""Decode what OCDBT's manifests and nodes consist of: checksums, Zstandard frames, columns of numbers and names."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.tensorstore_codecs import decode

# Nodes of Orbax's databases hold at most 100 MB; a larger claim is hostile.
MAX_DECODED_BYTES = 1 << 28
_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_BLOCK = 128 << 10
_RAW, _RLE, _COMPRESSED = 0, 1, 2
_CHECKSUM, _SINGLE_SEGMENT = 4, 32
# The error of a read past the end (TensorStore 0.1.71 to 0.1.86, measured).
_END = re.compile(r"Not enough data.*at uncompressed byte (\d+)", re.DOTALL)
# OCDBT's limit of keys and paths.
_MAX_NAME = 65535
# Names share prefixes, and nodes are compressed, so few bytes can encode very much. All columns may take this much,
# and so much more for each byte of the nodes; those of a thousand hosts, all alike, take 1,450 (worked out). A
# name is several objects.
_LEAST_BYTES, _BYTES_RATIO, _BYTES_PER_NAME, _BYTES_PER_NUMBER = 1 << 27, 1 << 11, 200, 8
# Names are padded to the longest one if that is short, and takes at most so many times their memory.
_MAX_PADDED, _MAX_PADDING = 1 << 10, 4
_FEW_NAMES = 100  # fewer are decoded one after another
_SHARES_TOO_MUCH = "a name was expected to share no more bytes than the one before has"
_ZERO = np.zeros(1, np.uint8)
# Bytes of a varint of 64 bits, of most varints, and of 28 bits.
_VARINT_BYTES, _USUAL_VARINT_BYTES, _BYTES_IN_32_BITS = 10, 3, 4
Numbers = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


class UndecodableError(Exception):
    """Our decoder cannot handle the database; TensorStore's own driver may."""


def check_crc32c(data: bytes) -> None:
    """Check data that ends in its own CRC-32C, little-endian; raise ValueError if the checksums differ."""
    own = checksums.crc32c
    if own is None or own(memoryview(data)[:-4]).to_bytes(4, "little") != data[-4:]:
        decode(data, "crc32c", len(data) - 4)  # which gives the error


def decompress_zstd(frame: bytes) -> bytes:
    """Decompress exactly one frame of up to `MAX_DECODED_BYTES`; raise UndecodableError if its length is unknown."""
    length, limit = _content_size(frame)
    if limit > MAX_DECODED_BYTES:
        raise ValueError(f"at most {MAX_DECODED_BYTES} decompressed bytes were expected, found up to {limit}")
    if length is None:
        length = _length_by_reading(frame, limit)
    return decode(frame, "zstd", length) if length else b""


def _length_by_reading(frame: bytes, limit: int) -> int:
    # zarr chunks have a known size, but frames written as a stream do not record theirs. The exact read that follows
    # verifies the length found here.
    try:
        decode(frame, "zstd", limit + 1)
    except ValueError as error:
        found = _END.search(str(error))
        if found is None or int(found[1]) > limit:
            raise _translate(error) from error
        return int(found[1])
    raise ValueError(f"at most {limit} decompressed bytes were expected, found {limit + 1}")


def _translate(error: ValueError) -> Exception:
    return UndecodableError(str(error)) if "Not enough data" in str(error) else error


def _content_size(frame: bytes) -> tuple[int | None, int]:
    """Parse frame and block headers (RFC 8878); return the content size, if recorded, and an upper bound."""
    if frame[:4] != _MAGIC or len(frame) < 6:
        raise ValueError(f"a Zstandard frame ({_MAGIC.hex()}) was expected, found {frame[:4].hex() or 'nothing'}")
    descriptor = frame[4]
    single = bool(descriptor & _SINGLE_SEGMENT)
    width = (int(single), 2, 4, 8)[descriptor >> 6]
    start = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    recorded = int.from_bytes(frame[start : start + width], "little") + (256 if width == 2 else 0)
    limit, end = _blocks(frame, start + width)
    end += 4 if descriptor & _CHECKSUM else 0
    if end != len(frame):
        raise ValueError(f"a Zstandard frame of {len(frame)} bytes was expected, found one of {end}")
    if not width:
        return None, limit
    if recorded > limit:
        raise ValueError(f"at most {limit} decompressed bytes were expected, found {recorded}")
    return recorded, recorded


def _blocks(frame: bytes, at: int) -> tuple[int, int]:
    """Return the most bytes that the blocks can hold, and the offset of their end."""
    limit, last = 0, False
    while not last and at + 3 <= len(frame) and limit <= MAX_DECODED_BYTES:
        header = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        limit += _MAX_BLOCK if kind == _COMPRESSED else size
        at += 3 + (1 if kind == _RLE else size)
    if not last and limit <= MAX_DECODED_BYTES:
        raise ValueError(f"the last block of a Zstandard frame was expected, found the end at byte {at}")
    return limit, (at if last else len(frame))


def _padded(shared: Any, lengths: Any, text: Any, width: int) -> Any:
    """Return names as an array of bytes padded with zeros, one place of all names after the other."""
    count, few = len(lengths), shared.astype(np.uint16)
    starts = np.cumsum(lengths - shared) - lengths  # place 0 of the name would be here in the text
    places = np.empty((width, count), np.uint8)
    common = int(shared[1:].min()) if count > 1 else 0  # what all have of the first
    places[:common] = text[:common, None]
    for place in range(common, width):
        rows = np.flatnonzero(few <= place)  # the others repeat the name before
        found = np.where(lengths[rows] > place, text[np.minimum(starts[rows] + place, len(text) - 1)], 0)
        places[place] = np.repeat(found, np.diff(rows, append=count))
    return np.ascontiguousarray(places.T).view(f"S{width}").reshape(count)


class MemoryBudget:
    """Bounds the memory of all columns of a database."""

    def __init__(self) -> None:
        self._left = _LEAST_BYTES

    def grow(self, nbytes: int) -> None:
        """Allow for so many more bytes of nodes."""
        self._left += nbytes * _BYTES_RATIO

    def take(self, nbytes: int) -> None:
        """Use memory; raise ValueError if there is too little."""
        self._left -= nbytes
        if self._left < 0:
            raise ValueError("columns in proportion to the size of the nodes were expected, found far longer ones")


class Columns:
    """A sequential reader of columns."""

    def __init__(self, data: bytes, budget: MemoryBudget, start: int = 0, stop: int | None = None) -> None:
        """Begin at ``start``; the columns end at ``stop``, or with the data. Inline values are most of it: no copy."""
        self._data, self._budget, self._start, self._at = data, budget, start, start
        self._stop = len(data) if stop is None else stop
        budget.take(self._stop - start)
        self._bytes = np.frombuffer(data, np.uint8, self._stop)

    @property
    def _place(self) -> int:
        """Return the number of bytes before the next, for messages."""
        return self._at - self._start

    def take(self, count: int) -> bytes:
        """Return the next bytes; raise ValueError if fewer are left, here and in the methods below."""
        return self._data[self._skip(count) : self._at]

    def _skip(self, count: int) -> int:
        """Move behind the next bytes, and return where they begin in the data."""
        left = self._stop - self._at
        if count > left:
            raise ValueError(f"{count} bytes were expected at byte {self._place}, found {left}")
        self._at += count
        return self._at - count

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def varint(self) -> int:
        """Return the next number."""
        return self.varints(1)[0]

    def varints(self, count: int) -> list[int]:
        """Return the next column of varints (7 bits a byte, lowest first)."""
        self._budget.take(count * _BYTES_PER_NUMBER)
        column: list[int] = self.numbers(count).tolist()
        return column

    def numbers(self, count: int) -> Numbers:
        """Return the next column of varints as an array of an unsigned type that holds all of them."""
        found = self._bytes[self._at : self._at + count]
        if len(found) == count and not np.any(found & 0x80):
            self._at += count
            return found
        return self._long_varints(count)

    def _long_varints(self, count: int) -> Numbers:
        window, ends = self._bytes[:0], np.zeros(0, np.int64)
        for most in (_USUAL_VARINT_BYTES, _VARINT_BYTES):
            if len(ends) < count:
                window = self._bytes[self._at : self._at + most * count]
                ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) < count:
            raise ValueError(f"{count} numbers were expected at byte {self._place}, found {len(ends)}")
        starts = np.concatenate([[0], ends[:-1] + 1])
        widths = ends - starts + 1
        longest = int(widths.max())
        if longest > _VARINT_BYTES or np.any(window[ends[widths == _VARINT_BYTES]] > 1):
            raise ValueError(f"numbers of 64 bits were expected at byte {self._place}, found a longer one")
        dtype = np.uint32 if longest <= _BYTES_IN_32_BITS else np.uint64
        self._budget.take(count * np.dtype(dtype).itemsize)
        numbers: Numbers = (window[starts] & 0x7F).astype(dtype)
        for place in range(1, longest):
            wide = np.flatnonzero(widths > place)
            numbers[wide] |= (window[starts[wide] + place] & 0x7F).astype(dtype) << dtype(7 * place)
        self._at += int(ends[-1]) + 1
        return numbers

    def name_lengths(self, count: int, prefix: int = 0) -> tuple[list[int], list[int]]:
        """Return two columns for `names`: lengths of the prefix shared with the name before, and of the rest.

        The caller puts a prefix of so many bytes before each."""
        self._budget.take(count * (_BYTES_PER_NAME + prefix))
        shared, own = [0, *self.varints(count - 1)] if count else [], self.varints(count)
        lengths = list(map(operator.add, shared, own))
        if max(lengths, default=0) > _MAX_NAME:
            raise ValueError(f"names of up to {_MAX_NAME} bytes were expected, found one of {max(lengths)}")
        self._budget.take(sum(lengths))
        return shared, own

    def names(self, shared: Sequence[int], own: Sequence[int]) -> list[bytes]:
        """Return the names of which these are the lengths."""
        if any(map(operator.gt, shared[1:], map(operator.add, shared, own))):
            raise ValueError(_SHARES_TOO_MUCH)
        names, before, at = [], b"", 0
        text = self.take(sum(own))
        for count, more in zip(shared, own, strict=True):
            before = before[:count] + text[at : at + more]
            at += more
            names.append(before)
        return names

    def keys_with(self, count: int, prefix: int) -> Any:
        """Return what `keys` returns; the caller makes objects of them, with a prefix of so many bytes before each."""
        if count < _FEW_NAMES:
            return self.names(*self.name_lengths(count, prefix))
        self._budget.take(count * (_BYTES_PER_NAME + prefix))
        return self.keys(count)

    def keys(self, count: int) -> Any:
        """Return the next names, which are many, as an array if they are alike in length."""
        before, more = np.concatenate([_ZERO, self.numbers(count - 1)]), self.numbers(count)
        shared, own = (np.minimum(column, np.uint64(_MAX_NAME + 1)).astype(np.int64) for column in (before, more))
        lengths, start = shared + own, self._at
        width, total, nbytes = int(lengths.max()), int(lengths.sum()), int(own.sum())
        if width > _MAX_NAME:
            raise ValueError(f"names of up to {_MAX_NAME} bytes were expected, found a longer one")
        if np.any(shared[1:] > lengths[:-1]):
            raise ValueError(_SHARES_TOO_MUCH)
        is_alike = 0 < width <= _MAX_PADDED and width * count <= _MAX_PADDING * total
        if not is_alike or 0 in self._data[start : start + nbytes]:
            self._budget.take(count * _BYTES_PER_NAME + total)
            return self.names(shared.tolist(), own.tolist())
        self._budget.take(width * count)
        text = np.frombuffer(self.take(nbytes), np.uint8)
        return _padded(shared, lengths, np.append(text, _ZERO), width)

    def slices(self, lengths: Sequence[int]) -> list[bytes]:
        """Return the next byte strings, of these lengths."""
        data, ends = self._data, itertools.accumulate(lengths, initial=self._skip(sum(lengths)))
        return [data[start:end] for start, end in itertools.pairwise(ends)]

    def finish(self) -> None:
        """Raise ValueError if bytes are left."""
        if self._at != self._stop:
            raise ValueError(f"the end was expected at byte {self._place}, found {self._stop - self._at} more bytes")
