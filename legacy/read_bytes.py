"""Read bytes of a msgpack checkpoint from a local file or an object of a store; `Window` reads front to back.

Both sources read one version of the checkpoint, even if it is replaced meanwhile.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from flax_ckpt_compat._core.byte_reads import HEAD_BYTES, Source
from flax_ckpt_compat._core.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.thread_pools import in_parallel

from . import format

# Bytes that a store is asked for at once, several parts at a time, and a system, which gives at most 2 GiB.
_PART, _FILE_PART = 4 * 2**20, 2**30
_REMEDY = "restore another checkpoint, copy this one again, or check that it is a checkpoint"


class WindowSizes(NamedTuple):
    """Sizes of the window over the structure, in bytes."""

    smallest: int  # at the beginning, and after a skip
    largest: int  # limit of growth
    read_over: int  # longest array that is read over, not skipped, because another read takes longer
    growth: int  # factor from one window to the next


OF_FILES = WindowSizes(smallest=4 * 2**10, largest=256 * 2**10, read_over=0, growth=2)
# A request takes as long as reading 1 MiB or more.
_OF_OBJECTS = WindowSizes(smallest=HEAD_BYTES, largest=8 * _PART, read_over=2**20, growth=8)


def open_source(location: Location) -> Source:
    """Open a file or object; raise if nothing is there, or it is empty or no file."""
    path = location.path
    try:
        with translated(path, "read", (OSError, ValueError)):
            source = location.open_file()
    except FileNotFoundError as error:
        message = f"{path}: no such checkpoint; list the directory for others"
        raise CheckpointNotFoundError(message, path=path) from error
    except StorageError as error:
        if error.errno != errno.EISDIR:
            raise
        raise CorruptCheckpointError(f"{path}: expected a msgpack file, found no file", path=path) from error
    if not source.size:
        source.close()
        found = "found an empty one: its writer never finished; restore another checkpoint"
        raise CorruptCheckpointError(f"{path}: expected a msgpack file, {found}", path=path)
    return source


def read_parts(source: Source, start: int, stop: int) -> bytes:
    """Read a range, of an object in parts at the same time; fewer bytes at the end."""
    step = _FILE_PART if source.is_local else _PART
    return b"".join(in_parallel(lambda at: source.read(at, min(at + step, stop)), range(start, stop, step)))


class Window:
    """A range of the file in memory, which moves from its beginning to its end; the data of arrays is skipped."""

    def __init__(self, source: Source, data: bytes = b""):
        """Begin with these first bytes of the source."""
        self.source = source
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
        data = read_parts(self.source, offset, offset + length)
        if len(data) != length:
            found = f"the end of the file {len(data)} bytes into a read of {length}; it shrank"
            raise self.corrupt(found, offset - self.base)
        return data
