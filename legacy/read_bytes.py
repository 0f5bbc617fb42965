"""Read bytes of a msgpack checkpoint from a local file or an object of a store; `Window` reads front to back.

Both sources read one version of the checkpoint, even if it is replaced meanwhile.
"""

from __future__ import annotations

import bisect
import errno
from typing import NamedTuple

from flax_ckpt_compat._core.byte_reads import HEAD_BYTES, Source
from flax_ckpt_compat._core.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.local.local_file import LocalFile
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.thread_pools import in_parallel

from . import format

_CACHE_LIMIT = 64 * 2**20  # bytes
_AT_ONCE = 64  # requests, most of them for some kB
_SLACK = 512  # bytes around a likely next read, because names differ in length
_SAME = 64  # bytes by which two distances differ that count as equal, for the same reason
_REMEDY = "restore another checkpoint, copy this one again, or check that it is a checkpoint"


class WindowSizes(NamedTuple):
    """Sizes of the window over the structure, in bytes."""

    smallest: int  # at the beginning, and after a skip
    largest: int  # limit of growth
    read_over: int  # longest array that is read over, not skipped, because another read takes longer
    growth: int  # factor from one window to the next


OF_FILES = WindowSizes(smallest=4 * 2**10, largest=256 * 2**10, read_over=0, growth=2)
# A request takes as long as reading 1 MiB or more.
_OF_OBJECTS = WindowSizes(smallest=HEAD_BYTES, largest=4 * 2**20, read_over=256 * 2**10, growth=8)


class StoredObject(Source):
    """An object of a store, of which what was read for the structure is cached.

    The length of an array is stored where the array begins, so each large one costs a request that waits for the one
    before it. But layers repeat the same shapes in the same order, and so do the moments of an optimizer. What followed
    a similar read is therefore requested along with this one.
    """

    def __init__(self, location: Location):
        self.opened = location.open_file()
        self.location, self.path, self.size, self.is_closed = location, location.path, self.opened.size, False
        # Offsets, in order, and the bytes from there on. They contain most small arrays.
        self._offsets, self._cached = [0], [self.opened.head]
        self._steps: list[tuple[int, int]] = []  # of each `look`: distance from the one before, and length
        self._at = 0

    def look(self, start: int, stop: int) -> bytes:
        """Read bytes of the structure, and what is likely to be read next."""
        self._steps.append((start - self._at, stop - start))
        self._at = start
        if (known := self._find(start, stop)) is not None:
            return known
        spans = [(start, stop), *self._likely_next(stop)]
        data = in_parallel(lambda span: self.opened.read(*span), spans, _AT_ONCE)
        for (at, _), part in zip(spans, data, strict=True):
            place = bisect.bisect_right(self._offsets, at)
            self._offsets.insert(place, at)
            self._cached.insert(place, part)
        while sum(map(len, self._cached)) > _CACHE_LIMIT and self._offsets[0] < start:
            del self._offsets[0], self._cached[0]
        return data[0]

    def _likely_next(self, end: int) -> list[tuple[int, int]]:
        """Return the ranges of what followed the last read that was like the current one, over and over."""
        (distance, length), last = self._steps[-1], len(self._steps) - 1
        before = ((at, *self._steps[at]) for at in reversed(range(last)))
        like = next((at for at, step, size in before if size == length and abs(step - distance) <= _SAME), last)
        followed = self._steps[like + 1 :]
        found, at = list[tuple[int, int]](), self._at
        while followed and len(found) < _AT_ONCE:
            distance, length = followed[len(found) % len(followed)]
            at += distance
            start, end = max(at - _SLACK, end), min(at + length + _SLACK, self.size)
            if start >= end:
                break
            found.append((start, end))
        return found

    def _find(self, start: int, stop: int) -> bytes | None:
        """Return bytes from the cache if all are there."""
        parts = []
        while start < stop:
            index = bisect.bisect_right(self._offsets, start) - 1
            at = start - self._offsets[index] if index >= 0 else 0
            part = self._cached[index][at : at + stop - start] if index >= 0 else b""
            if not part:
                return None
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes from memory, or by one request; see `Source`."""
        known = self._find(start, stop)
        return self.opened.read(start, stop) if known is None else known

    def contradicts(self, data: memoryview, offset: int) -> bool:
        """Return whether cached bytes differ from these, which were read later."""
        end = offset + len(data)
        for start, cached in zip(self._offsets, self._cached, strict=True):
            first, last = max(start, offset), min(start + len(cached), end)
            if first < last and cached[first - start : last - start] != data[first - offset : last - offset]:
                return True
        return False

    def close(self) -> None:
        """Drop the cache."""
        self.is_closed = True
        self._offsets, self._cached = [], []


MsgpackSource = LocalFile | StoredObject


def open_source(location: Location) -> MsgpackSource:
    """Open a file or object; raise if nothing is there, or it is empty or no file."""
    path = location.path
    try:
        with translated(path, "read", (OSError, ValueError)):
            source = StoredObject(location) if location.is_remote else LocalFile(path)
    except FileNotFoundError as error:
        message = f"{path}: no such checkpoint; list the directory for others"
        raise CheckpointNotFoundError(message, path=path) from error
    except StorageError as error:
        if error.errno != errno.EISDIR:
            raise
        message = f"{path}: expected a msgpack file, found something that is not a file"
        raise CorruptCheckpointError(message, path=path) from error
    if not source.size:
        source.close()
        found = "found an empty one: its writer never finished; restore another checkpoint"
        raise CorruptCheckpointError(f"{path}: expected a msgpack file, {found}", path=path)
    return source


class Window:
    """A range of the file in memory, which moves from its beginning to its end; the data of arrays is skipped."""

    __slots__ = ("_look", "_sizes", "_step", "at", "base", "data", "fresh_until", "path", "size")

    def __init__(self, source: MsgpackSource, data: bytes = b""):
        """Begin with these first bytes of the source."""
        self._look = source.look if isinstance(source, StoredObject) else source.read
        self._sizes = OF_FILES if source.is_local else _OF_OBJECTS
        self._step = self._sizes.smallest // self._sizes.growth  # the first refill multiplies it
        self.path = source.path
        self.size = source.size
        self.data = data  # bytes of the range, from the offset ``base`` in the file
        self.base = self.at = 0  # the next value starts at ``data[at]``; beyond its end after a skip
        # While ``at`` is not above this, ``data`` holds `format.MAX_HEADER` more bytes, or the rest of the file.
        self.fresh_until = self._fresh()

    def _fresh(self) -> int:
        is_end = self.base + len(self.data) == self.size
        return self.size if is_end else len(self.data) - format.MAX_HEADER

    def refill(self) -> None:
        """Move the window to the current position: small after a skip, growing otherwise."""
        if self.base + self.at > self.size:
            raise IndexError("the file ends")
        skipped, sizes = self.at - len(self.data), self._sizes
        self._step = sizes.smallest if skipped > sizes.read_over else min(self._step * sizes.growth, sizes.largest)
        self.base += self.at
        self.at = 0
        self.data = self._pread(min(self._step, self.size - self.base), self.base)
        self.fresh_until = self._fresh()

    def take(self, length: int) -> bytes:
        """Read the next ``length`` bytes, also beyond the window."""
        end = self.end_of(length)
        piece = self.data[self.at : end] if end <= len(self.data) else self._pread(length, self.base + self.at)
        self.at = end
        if end > self.fresh_until:
            self.refill()
        return piece

    def tag(self) -> int:
        """Return the first byte of the next value, which the window holds with all before the value's data."""
        if self.at > self.fresh_until:
            self.refill()
        return self.data[self.at]

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
        data = b""
        while len(data) < length:  # the system gives at most 2 GiB at once
            more = self._look(offset + len(data), offset + length)
            if not more:
                found = f"the end of the file {len(data)} bytes into a read of {length}; it shrank"
                raise self.corrupt(found, offset - self.base)
            data += more
        return data
