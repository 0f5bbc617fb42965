"""What a msgpack checkpoint is read from: a local file, or an object of a store."""

from __future__ import annotations

import bisect
import os
import stat
import weakref
from typing import NamedTuple, Protocol

from flax_ckpt_compat._core.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.object_store import client

_CACHE_LIMIT = 64 * 2**20  # bytes


class WindowSizes(NamedTuple):
    """What a window on the structure reads at a time, in bytes.

    Attributes:
        first: at the start.
        tiny: behind a large array; 0 for no less than elsewhere.
        least: after any other jump.
        most: after growing.
        through: bytes of an array that are read on over, and not skipped, because asking anew takes longer.
    """

    first: int
    tiny: int
    least: int
    most: int
    through: int


class Source(Protocol):
    """Bytes at offsets, all of one version of the checkpoint, whatever replaces it meanwhile.

    Attributes:
        path: of the file, or the URL.
        size: in bytes.
        window_sizes: what a window on the structure reads at a time.
        threads: how many reads go on at once.
        is_local: one read costs little beside its bytes.
    """

    path: str
    size: int
    window_sizes: WindowSizes
    threads: int
    is_local: bool

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be read any more."""
        ...

    def read(self, length: int, offset: int) -> bytes:
        """Bytes; fewer only where they end."""
        ...

    def read_into(self, target: memoryview, offset: int) -> int:
        """Reads into memory and returns how many bytes; 0 only at the end."""
        ...

    def holds(self, offset: int, length: int) -> bool:
        """Whether these bytes are in memory already."""
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...


class File:
    """A local file, by its descriptor."""

    # Behind a large array most often lies just the header of the next one: whoever wants one leaf of a large file
    # reads little more than that leaf.
    window_sizes = WindowSizes(first=4 * 2**10, tiny=192, least=8 * 2**10, most=256 * 2**10, through=0)
    # Two more than processors: some wait for the disk while others copy.
    threads = min(8, (os.cpu_count() or 1) + 2)
    is_local = True

    def __init__(self, path: str):
        self.path = path
        self._fd = _open(path)
        self._closer = weakref.finalize(self, os.close, self._fd)
        try:
            self.size = _size(self._fd, path)
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the descriptor is gone."""
        return self._fd < 0

    def fileno(self) -> int:
        """Its descriptor."""
        return self._fd

    def read(self, length: int, offset: int) -> bytes:
        """See `Source.read`."""
        return os.pread(self._fd, length, offset)

    def read_into(self, target: memoryview, offset: int) -> int:
        """See `Source.read_into`."""
        return os.preadv(self._fd, [target], offset)

    def holds(self, offset: int, length: int) -> bool:  # noqa: ARG002
        """See `Source.holds`."""
        return False

    def close(self) -> None:
        """Closes the file."""
        self._closer()
        self._fd = -1


class StoredObject:
    """An object of a store."""

    # A request takes as long as reading 1 MiB or more, so tiny ones, which often are not enough, do not pay, nor does
    # one for each of many arrays that lie behind one another, of which none tells where the next one begins.
    window_sizes = WindowSizes(first=64 * 2**10, tiny=0, least=8 * 2**10, most=4 * 2**20, through=256 * 2**10)
    threads = 16
    is_local = False

    def __init__(self, url: str):
        self.path = url
        self.is_closed = False
        try:
            self._object = client.Object(url)
        except FileNotFoundError as error:
            raise _not_found(url) from error
        self.size = self._object.size
        if not self.size:
            raise _empty(url)
        # What was read to learn the structure, in order: most small arrays lie in it.
        self._offsets: list[int] = []
        self._buffers: list[bytes] = []
        self._room = _CACHE_LIMIT

    def read(self, length: int, offset: int) -> bytes:
        """See `Source.read`."""
        found = self._object.read(offset, offset + length)
        if len(found) <= self._room and (not self._offsets or offset > self._offsets[-1]):
            self._offsets.append(offset)
            self._buffers.append(found)
            self._room -= len(found)
        return found

    def holds(self, offset: int, length: int) -> bool:
        """See `Source.holds`."""
        return self._cached(offset, length) is not None

    def _cached(self, offset: int, length: int) -> list[memoryview] | None:
        """These bytes, if all of them were read before."""
        parts = []
        while length:
            index = bisect.bisect_right(self._offsets, offset) - 1
            start = offset - self._offsets[index] if index >= 0 else 0
            part = memoryview(self._buffers[index] if index >= 0 else b"")[start : start + length]
            if not part:
                return None
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts

    def read_into(self, target: memoryview, offset: int) -> int:
        """See `Source.read_into`."""
        at = 0
        for part in self._cached(offset, len(target)) or [memoryview(self._object.read(offset, offset + len(target)))]:
            target[at : at + len(part)] = part
            at += len(part)
        return at

    def close(self) -> None:
        """Forgets what was kept."""
        self.is_closed = True
        self._offsets, self._buffers = [], []


def open_source(path: str) -> Source:
    """What is at a path or URL.

    Raises:
        CheckpointNotFoundError: nothing.
        CorruptCheckpointError: it is empty, or no file.
        StorageError: the file system or store refused.
    """
    return StoredObject(path) if client.is_url(path) else File(path)


def storage_error(path: str, error: Exception) -> StorageError:
    """The error for a read that the system refused."""
    number = getattr(error, "errno", None)
    return StorageError(f"{path}: reading failed: {error}; check the file system", path=path, errno=number)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise _not_found(path) from error
    except (OSError, ValueError) as error:
        raise storage_error(path, error) from error


def _not_found(path: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"{path}: no such checkpoint; list the directory for others", path=path)


def _size(fd: int, path: str) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpointError(f"{path}: expected a msgpack file, found something that is no file", path=path)
    if not status.st_size:
        raise _empty(path)
    return status.st_size


def _empty(path: str) -> CorruptCheckpointError:
    message = f"{path}: expected a msgpack file, found an empty one; its writer never finished, restore another"
    return CorruptCheckpointError(message, path=path)
