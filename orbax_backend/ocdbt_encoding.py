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
# Of many names, a place that one in eight or fewer have of their own, as a sample tells, is decoded for these alone.
_FEW, _MANY, _SAMPLED = 8, 200, 4096
_AT_ONCE = 1 << 14  # places of names, besides those of one place
# Bytes of a varint of 64 bits, and of most varints. Fewer numbers are decoded one after another.
_VARINT_BYTES, _USUAL_VARINT_BYTES, _FEW_NUMBERS = 10, 3, 8
# The bits of a varint in its bytes; the shifts by which neighbours of one, two and four bytes join, and their bits.
_SEPTETS = 0x7F7F7F7F7F7F7F7F
_SEPTET_LANES = ((1, 0x007F007F007F007F), (2, 0x00003FFF00003FFF), (4, 0x000000000FFFFFFF))
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


def _padded(shared: Any, lengths: Any, starts: Any, text: Any, width: int) -> Any:
    """Return names padded with zeros, in rows of bytes.

    ``text``, what names do not share with the one before, has place 0 of each at ``starts``, and ends in a zero."""
    split, stop = _dense_places(shared, lengths, width)
    heads = (shared < split).nonzero()[0]
    if 2 * len(heads) > len(lengths):  # of names that the sample is not like: each level has at most half of them
        split = 0
    if split:  # few names differ in the first places, and their rows are repeated
        rows = _padded(shared[heads], lengths[heads], starts[heads], text, width)
        rows = np.repeat(rows, np.append(heads[1:], len(lengths)) - heads, axis=0)
    else:
        rows = np.empty((len(lengths), width), np.uint8)
    _fill(rows, shared, lengths, starts, text, range(split, stop))
    if stop < width:  # few names have the last ones
        rows[:, stop:] = 0
        long = (lengths > stop).nonzero()[0]
        some = np.empty((len(long), width), np.uint8)
        _fill(some, shared[long], lengths[long], starts[long], text, range(stop, width))
        rows[long, stop:] = some[:, stop:]
    return rows


def _dense_places(shared: Any, lengths: Any, width: int) -> tuple[int, int]:
    """Return between which places many names differ from the one before, by a sample."""
    if len(lengths) < _MANY:
        return 0, width
    step = 1 + len(lengths) // _SAMPLED
    few = len(lengths[::step]) // _FEW
    n_differing, n_ended = (np.cumsum(np.bincount(some[::step], minlength=width)[:width]) for some in (shared, lengths))
    split = int(n_differing.searchsorted(few, "right"))
    return split, max(split, int(n_ended.searchsorted(len(lengths[::step]) - few)))


def _fill(rows: Any, shared: Any, lengths: Any, starts: Any, text: Any, places: range) -> None:
    """Set some places of names; see `_padded`."""
    step = max(1, _AT_ONCE // max(1, len(lengths)))
    for begin in places[::step]:
        some = np.arange(begin, min(begin + step, places.stop), dtype=np.int32)[:, None]
        own = shared <= some  # the others repeat the name before
        found = text[np.where(own & (lengths > some), starts + some, np.int32(len(text) - 1))]
        if not own.all():
            source = np.where(own, np.arange(len(lengths), dtype=np.int32), np.int32(0))
            found = np.take_along_axis(found, np.maximum.accumulate(source, axis=1), 1)
        rows[:, begin : begin + len(some)] = found.T


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
        """Begin at ``start``; the columns end at ``stop``, or with the data.

        Most of a node are inline values, so it is not copied."""
        self._data, self._budget, self._start, self._at = data, budget, start, start
        self._end = len(data) if stop is None else stop
        budget.take(self._end - start)
        self._bytes = np.frombuffer(data, np.uint8, self._end)

    @property
    def _place(self) -> int:
        """Return the number of bytes before the next, for messages."""
        return self._at - self._start

    def take(self, count: int) -> bytes:
        """Return the next bytes; raise ValueError if fewer are left, here and in the methods below."""
        return self._data[self._skip(count) : self._at]

    def _skip(self, count: int) -> int:
        """Move behind the next bytes, and return where they begin in the data."""
        left = self._end - self._at
        if count > left:
            raise ValueError(f"{count} bytes were expected at byte {self._place}, found {left}")
        self._at += count
        return self._at - count

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def varint(self) -> int:
        """Return the next number."""
        number = shift = 0
        while True:
            byte = self.byte()
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80 and number < 1 << 64:
                return number
            if shift == 7 * _VARINT_BYTES:
                raise ValueError(f"a number of 64 bits was expected before byte {self._place}, found a longer one")

    def varints(self, count: int) -> list[int]:
        """Return the next column of varints (7 bits a byte, lowest first)."""
        if count < _FEW_NUMBERS:
            return [self.varint() for _ in range(count)]
        self._budget.take(count * _BYTES_PER_NUMBER)
        column: list[int] = self.numbers(count).tolist()
        return column

    def numbers(self, count: int) -> Numbers:
        """Return the next column of varints as an array of an unsigned type that holds all of them."""
        width = 1
        while width < _VARINT_BYTES and self._data[self._at + width - 1 : self._at + width] >= b"\x80":
            width += 1
        alike = self._bytes[self._at : self._at + count * width]  # the column, if all numbers have that width
        if not count:
            return alike
        if len(alike) < count * width or width > 4:
            return self._uneven_numbers(count)
        rows = alike.reshape(count, width)
        if rows[:, -1].max() > 0x7F or rows[:, :-1].min(initial=0xFF) < 0x80:
            return self._uneven_numbers(count)
        self._at += len(alike)
        if width == 1:
            return alike
        words = np.zeros((count, 4), np.uint8)
        words[:, :width] = rows
        return self._joined(words.view("<u4").reshape(count), np.uint32(8 * (4 - width)))

    def _uneven_numbers(self, count: int) -> Numbers:
        window, ends = self._bytes[:0], np.zeros(0, np.int64)
        for most in (_USUAL_VARINT_BYTES, _VARINT_BYTES):
            if len(ends) < count:
                window = self._bytes[self._at : self._at + most * count]
                ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) < count:
            raise ValueError(f"{count} numbers were expected at byte {self._place}, found {len(ends)}")
        widths = np.diff(ends, prepend=-1)
        longest, starts, window = int(widths.max()), ends + 1 - widths, window[: ends[-1] + 1]
        if longest > _VARINT_BYTES or np.any(window[ends[widths == _VARINT_BYTES]] > 1):
            raise ValueError(f"numbers of 64 bits were expected at byte {self._place}, found a longer one")
        self._at += len(window)
        nbytes = 4 if longest <= 4 else 8
        padded = np.concatenate([window, np.zeros(nbytes, np.uint8)])
        words = np.ndarray((len(window),), f"<u{nbytes}", padded, 0, (1,)).take(starts)
        numbers = self._joined(words, (8 * (nbytes - np.minimum(widths, nbytes))).astype(words.dtype))
        for place in range(nbytes, longest):
            wide = np.flatnonzero(widths > place)
            numbers[wide] |= (window[starts[wide] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        return numbers

    def _joined(self, words: Numbers, unused: Any) -> Numbers:
        """Return the numbers of varints in words of 4 or 8 bytes, of which the highest bits are ``unused``."""
        self._budget.take(words.nbytes)
        whole = (1 << 8 * words.itemsize) - 1
        words = words << unused >> unused & words.dtype.type(_SEPTETS & whole)
        for shift, low in _SEPTET_LANES[: words.itemsize.bit_length() - 1]:
            lane = words.dtype.type(low & whole)
            words = words & lane | words >> words.dtype.type(shift) & lane << words.dtype.type(7 * shift)
        return words

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
        before, own = self.numbers(count - 1), self.numbers(count)
        if max(int(before.max(initial=0)), int(own.max())) > _MAX_NAME:
            raise ValueError(f"names of up to {_MAX_NAME} bytes were expected, found a longer one")
        shared, lengths, nbytes = np.zeros(count, np.int32), own.astype(np.int32), int(own.sum())
        shared[1:] = before
        lengths += shared
        width, total = int(lengths.max()), int(lengths.sum())
        if width > _MAX_NAME:
            raise ValueError(f"names of up to {_MAX_NAME} bytes were expected, found a longer one")
        if np.any(shared[1:] > lengths[:-1]):
            raise ValueError(_SHARES_TOO_MUCH)
        is_alike = 0 < width <= _MAX_PADDED and width * count <= _MAX_PADDING * total
        if not is_alike or 0 in self._data[self._at : self._at + nbytes]:
            self._budget.take(count * _BYTES_PER_NAME + total)
            return self.names(shared.tolist(), own.tolist())
        self._budget.take(width * count)
        text = np.frombuffer(self.take(nbytes), np.uint8)
        starts = np.cumsum(own, dtype=np.int32) - lengths
        return _padded(shared, lengths, starts, np.append(text, np.uint8(0)), width).view(f"S{width}").reshape(count)

    def slices(self, lengths: Sequence[int]) -> list[bytes]:
        """Return the next byte strings, of these lengths."""
        data, ends = self._data, itertools.accumulate(lengths, initial=self._skip(sum(lengths)))
        return [data[start:end] for start, end in itertools.pairwise(ends)]

    def last_slices(self, lengths: Sequence[int]) -> list[bytes]:
        """Return the byte strings at the end, of these lengths; what is before them is left."""
        start, before = self._at, self._end - sum(lengths)
        self._at = max(start, before)
        found = self.slices(lengths)
        self._at, self._end, self._bytes = start, before, self._bytes[:before]
        return found

    def finish(self) -> None:
        """Raise ValueError if bytes are left."""
        if self._at != self._end:
            raise ValueError(f"the end was expected at byte {self._place}, found {self._end - self._at} more bytes")
