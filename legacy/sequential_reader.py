"""Read a file front to back in small windows, so that array data can be skipped."""

from __future__ import annotations

from collections.abc import Iterator

from flax_ckpt_compat._core.errors import CorruptCheckpointError

from . import format
from .read_bytes import MsgpackSource

_MIN_SKIP = 2 * 2**10
_FIRST_AHEAD = 512
_REMEDY = "restore another checkpoint, copy this one again, or check that it is a checkpoint"


class Window:
    """A range of the file in memory."""

    __slots__ = ("_sizes", "_source", "_step", "at", "base", "data", "fresh_until", "path", "size")

    def __init__(self, source: MsgpackSource):
        self._source, self._sizes = source, source.window_sizes
        self._step = self._sizes.first // self._sizes.growth  # the first refill multiplies it
        self.path = source.path
        self.size = source.size
        self.data = b""  # bytes of the range, from the offset ``base`` in the file
        self.base = self.at = 0  # the next value starts at ``data[at]``; beyond its end after a skip
        # While ``at`` is not above this, ``data`` holds `format.MAX_HEADER` more bytes, or the rest of the file, or at
        # least the whole next value up to an array's data.
        self.fresh_until = -1

    def refill(self) -> None:
        """Move the window to the current position: small after a skip, growing otherwise."""
        skipped, sizes = self.at - len(self.data), self._sizes
        self._step = sizes.smallest if skipped > sizes.read_over else min(self._step * sizes.growth, sizes.largest)
        self.base += self.at
        self.at = 0
        if skipped > _MIN_SKIP and self.size - self.base > sizes.tiny > 0:
            self.data = self._pread(sizes.tiny, self.base)
            self.fresh_until = last_key(self.data)
            if self.fresh_until >= 0:
                return
        self.data = self._pread(min(self._step, self.size - self.base), self.base)
        whole = self.base + len(self.data) == self.size
        self.fresh_until = self.size if whole else len(self.data) - format.MAX_HEADER

    def take(self, length: int) -> bytes:
        """Read the next ``length`` bytes, also beyond the window."""
        end = self.end_of(length)
        piece = self.data[self.at : end] if end <= len(self.data) else self._pread(length, self.base + self.at)
        self.at = end
        if end > self.fresh_until:
            self.refill()
        return piece

    def ahead(self) -> Iterator[bytes]:
        """Yield the bytes from the current position on, in growing pieces, without moving the window."""
        at, step = self.at, _FIRST_AHEAD
        while at < len(self.data):
            yield self.data[at : at + step]
            at, step = at + step, 4 * step
        offset, step = self.base + max(self.at, len(self.data)), self._sizes.first
        while offset < self.size:
            step = min(step * self._sizes.growth, self._sizes.largest)
            piece = self._pread(min(step, self.size - offset), offset)
            offset += len(piece)
            yield piece

    def skip(self, length: int) -> None:
        """Move past bytes that came from `ahead`."""
        self.at += length
        if self.at > self.fresh_until:
            self.refill()

    def end_of(self, length: int) -> int:
        """Return the position after the next ``length`` bytes; raise if the file has fewer."""
        end = self.at + length
        if self.base + end > self.size:
            left = self.size - self.base - self.at
            raise self.corrupt(f"a value of {length} bytes, but the file has only {max(left, 0)} left; it is truncated")
        return end

    def corrupt(self, found: str, at: int | None = None) -> CorruptCheckpointError:
        """Build the error for unexpected data at position ``at`` (default: the current one)."""
        offset = self.base + (self.at if at is None else at)
        message = f"{self.path}: byte {offset}: expected a Flax msgpack checkpoint, found {found}"
        return CorruptCheckpointError(f"{message}; {_REMEDY}", path=self.path)

    def _pread(self, length: int, offset: int) -> bytes:
        data = self._source.look(length, offset)
        if len(data) != length:
            found = f"the end of the file {len(data)} bytes into a read of {length}; it shrank"
            raise self.corrupt(found, offset - self.base)
        return data


_EXT_HEADERS = {0xC7: 3, 0xC8: 4, 0xC9: 6}  # tag, length, code
_INTS = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
_BINS = {0xC4: 2, 0xC5: 3, 0xC6: 5}
# Flax writes an array as a msgpack array of three: shape, dtype name and bytes.
_THREE = 0x93


def last_key(data: bytes) -> int:
    """Return the position of the next array's key if everything up to the array's data is in ``data``; else -1.

    The data begins at a key of a map. Keys of subtrees may precede that of the array."""
    at = 0
    try:
        while True:
            key = at
            at = _after_short_text(data, at)
            if at > 0 and 0x81 <= data[at] <= 0x8F:  # a short map: its first key follows
                at += 1
            else:
                return key if at > 0 and 0 < _after_array_header(data, at) <= len(data) else -1
    except IndexError:
        return -1


def _after_short_text(data: bytes, at: int) -> int:
    return at + 1 + (data[at] & 0x1F) if at >= 0 and 0xA0 <= data[at] <= 0xBF else -1


def _after_array_header(data: bytes, at: int) -> int:
    """Return the position of the array's data, or -1 if this is not an array of Flax."""
    width = _EXT_HEADERS.get(data[at])
    if width is None or data[at + width - 1] != format.EXT_ARRAY or data[at + width] != _THREE:
        return -1
    at += width + 1
    if not 0x90 <= data[at] <= 0x9F:
        return -1
    axes = data[at] & 0x0F
    at += 1
    for _ in range(axes):
        at += 1 if data[at] < 0x80 else _INTS[data[at]] if data[at] in _INTS else len(data) + 1
    at = _after_short_text(data, at)
    return at + _BINS[data[at]] if at > 0 and data[at] in _BINS else -1
