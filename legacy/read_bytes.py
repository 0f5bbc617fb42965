"""Read bytes of a msgpack checkpoint from a local file or an object of a store.

Both sources read one version of the checkpoint, even if it is replaced meanwhile.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from flax_ckpt_compat._core.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.local.local_file import LocalFile
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage import HEAD_BYTES, Source
from flax_ckpt_compat._core.storage_errors import storage_error
from flax_ckpt_compat._core.thread_pools import in_parallel

from .read_ahead import Buffers, Guesses

_CACHE_LIMIT = 64 * 2**20  # bytes
_AT_ONCE = 64  # requests, most of them for some kB


class WindowSizes(NamedTuple):
    """Sizes of the window over the structure, in bytes."""

    first: int
    tiny: int  # size after a large array; 0 to use ``smallest``
    smallest: int  # size after any other skip
    largest: int  # limit of growth
    read_over: int  # longest array that is read over, not skipped, because another read takes longer
    growth: int = 2  # factor from one window to the next


class File(LocalFile):
    """A local file."""

    # Mostly the header of the next array follows a large array, so reading one leaf of a large file reads little else.
    window_sizes = WindowSizes(first=4 * 2**10, tiny=192, smallest=8 * 2**10, largest=256 * 2**10, read_over=0)

    def __init__(self, path: str):
        try:
            super().__init__(path)
        except (IsADirectoryError, StorageError) as error:
            message = f"{path}: expected a msgpack file, found something that is not a file"
            raise CorruptCheckpointError(message, path=path) from error
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise storage_error(path, error, "read") from error

    def look(self, length: int, offset: int) -> bytes:
        """Read bytes of the structure; fewer only at the end."""
        data = os.pread(self._fd, length, offset)
        if (missing := min(length, self.size - offset) - len(data)) > 0:  # a system call returns at most 2 GiB
            rest = bytearray(missing)
            data += rest[: self.fill([memoryview(rest)], offset + len(data))]
        return data


class StoredObject(Source):
    """An object of a store, of which what was read for the structure is cached."""

    # A request takes as long as reading 1 MiB or more, so neither tiny requests, which often need a second one, nor
    # one request per array in a row of arrays pay.
    window_sizes = WindowSizes(
        first=HEAD_BYTES, tiny=0, smallest=8 * 2**10, largest=4 * 2**20, read_over=256 * 2**10, growth=8
    )

    def __init__(self, location: Location):
        self.opened = location.open_file()
        self.location, self.path, self.size, self.is_closed = location, location.path, self.opened.size, False
        # It contains most small arrays.
        self._cache, self._ahead = Buffers(_CACHE_LIMIT), Buffers(0)
        self._cache.add(0, self.opened.head)
        self._guesses = Guesses(self.size)

    def look(self, length: int, offset: int) -> bytes:
        """Read bytes of the structure, and what may be read next; fewer only at the end."""
        self._guesses.record(offset, length)
        if (known := self._cached(offset, length)) is not None:
            return b"".join(known)
        spans = dict.fromkeys([(offset, offset + length), *self._guesses.ranges()])
        data = in_parallel(lambda span: self.opened.read(*span), spans, _AT_ONCE)
        self._ahead = Buffers(sum(map(len, data)))
        for (start, _), part in zip(spans, data, strict=True):
            self._cache.add(start, part)
            self._ahead.add(start, part)
        return data[0]

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes from memory, or by one request; see `Source`."""
        known = self._cached(start, stop - start)
        return self.opened.read(start, stop) if known is None else b"".join(known)

    def is_cached(self, offset: int, length: int) -> bool:
        """Return whether these bytes are cached in memory."""
        return self._cached(offset, length) is not None

    def _cached(self, offset: int, length: int) -> list[memoryview] | None:
        return self._cache.find(offset, length) or self._ahead.find(offset, length)

    def contradicts(self, data: memoryview, offset: int) -> bool:
        """Return whether cached bytes differ from these, which were read later."""
        return self._cache.contradict(data, offset) or self._ahead.contradict(data, offset)

    def close(self) -> None:
        """Drop the cache."""
        self.is_closed = True
        self._cache = self._ahead = Buffers(0)


MsgpackSource = File | StoredObject


def open_source(location: Location) -> MsgpackSource:
    """Open a file or object; raise if nothing is there, or it is empty or no file."""
    path = location.path
    try:
        source = StoredObject(location) if location.is_remote else File(path)
    except FileNotFoundError as error:
        message = f"{path}: no such checkpoint; list the directory for others"
        raise CheckpointNotFoundError(message, path=path) from error
    if not source.size:
        source.close()
        raise CorruptCheckpointError(
            f"{path}: expected a msgpack file, found an empty one: its writer never finished; restore another "
            "checkpoint",
            path=path,
        )
    return source
