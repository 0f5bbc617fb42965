"""Write the values of a new OCDBT database to its data files, on several threads.

Each thread appends to a file of its own, so that the system writes and syncs several at once. Bytes are written from
the memory that they are in, and their checksums are computed by the thread that writes them.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from flax_ckpt_compat._core import checksums, memory
from flax_ckpt_compat._core.array_boxes import Shape, full_box
from flax_ckpt_compat._core.local import new_file
from flax_ckpt_compat._core.local.syncing import sync_directory
from flax_ckpt_compat._core.local.temporaries import create_directory
from flax_ckpt_compat._core.orbax_layout import DATA_DIRECTORY
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.thread_pools import Pool, Task, in_parallel

from .chunk_codecs import checksum_of, compressed
from .files import ByteRange
from .ocdbt_encode import INLINE_BYTES
from .zarr import Encoding

_THREADS = min(8, os.cpu_count() or 1)
# A file that has so many bytes gets no more values: it is synced, and uploaded, beside the next.
FILE_BYTES = 64 << 20
# Values are handed to a thread in batches of about this size.
BATCH_BYTES = 16 << 20
_BUFFERED_BYTES = 4 << 20
_PART_BYTES = 16 << 20  # of a large value, which is copied, summed and counted part by part; blocks of checksums


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """One chunk of an array, and where it is once it is written."""

    key: str
    data: Any  # bytes, or an array in C order; None once it is written
    encoding: Encoding
    shape: Shape = ()  # of an array as it is stored: at the edge of a larger one, with zeros behind it on some axes
    may_change: bool = False  # whether other threads of the program may write to the array meanwhile
    place: ByteRange | None = None  # relative to the database, or None if it became small enough for the index
    inline: bytes = b""

    @property
    def nbytes(self) -> int:
        """Return the size of the data."""
        return len(self.data) if isinstance(self.data, bytes) else int(self.data.nbytes)

    def stored(self) -> memoryview:
        """Return the bytes that are stored, before they are encoded."""
        if isinstance(self.data, bytes):
            return memoryview(self.data)
        return memory.as_bytes(np.ascontiguousarray(padded(self.data, self.shape)))


def padded(array: np.ndarray[Any, Any], shape: Shape) -> np.ndarray[Any, Any]:
    """Return an array with zeros behind it on each axis, if it is smaller than a shape."""
    if array.shape == shape:
        return array
    larger = np.zeros(shape, array.dtype)
    larger[full_box(array.shape)] = array
    return larger


class DataFiles:
    """The data files of one database."""

    def __init__(
        self, path: str, sums: dict[str, bytes] | None, meter: Meter = OFF, *, past_cache: bool = False
    ) -> None:
        """Write to a database in an existing directory.

        ``sums`` gets key → checksums of the blocks of each value that has none of its own."""
        self.names: list[str] = []  # relative to the database
        self._path, self._sums, self._meter, self._past_cache = path, sums, meter, past_cache
        self._pool, self._tasks = Pool(_THREADS), collections.deque[tuple[Task, int]]()
        self._free = collections.deque[_DataFile]()  # files that no thread is writing to
        self._abandoned = False

    def submit(self, values: list[Value], nbytes: int) -> None:
        """Write values, of so many bytes, in the background."""
        self._tasks.append((self._pool.submit(self._write, values), nbytes))

    def wait(self, nbytes: int = 0) -> None:
        """Wait until at most so many bytes are left to be written; raise a failure."""
        while self._tasks and (sum(size for _, size in self._tasks) > nbytes or self._tasks[0][0].done):
            self._tasks[0][0].result()
            self._tasks.popleft()

    def append(self, data: bytes) -> ByteRange:
        """Write a node of the index, once all values are written; return its place."""
        file = self._take()
        try:
            return file.append([memoryview(data)])
        finally:
            self._free.append(file)

    def finish(self) -> None:
        """Sync and close all files once everything is written."""
        in_parallel(_DataFile.close, list(self._free), _THREADS)
        self._free.clear()
        if self.names:
            sync_directory(os.path.join(self._path, DATA_DIRECTORY))

    def abandon(self, *, wait: bool) -> None:
        """Begin nothing more, and close the files; ``wait`` for what the threads are writing."""
        self._abandoned = True
        self._pool.cancel(wait=wait)
        self._close_abandoned()

    def _close_abandoned(self) -> None:
        with suppress(IndexError):
            while True:
                self._free.popleft().discard()

    def _write(self, values: list[Value]) -> None:
        file = self._take()
        try:
            for value in values:
                self._put(file, value)
            file.flush()
        finally:
            self._free.append(file)
            if self._abandoned:
                self._close_abandoned()

    def _take(self) -> _DataFile:
        """Return a file for more values."""
        with suppress(IndexError):
            while True:
                file = self._free.popleft()
                if file.size < FILE_BYTES:
                    return file
                file.close()
        if not self.names:
            with suppress(FileExistsError):  # another thread makes it
                create_directory(os.path.join(self._path, DATA_DIRECTORY))
        file = _DataFile(self._path, f"{DATA_DIRECTORY}/{os.urandom(16).hex()}", past_cache=self._past_cache)
        self.names.append(file.name)
        return file

    def _put(self, file: _DataFile, value: Value) -> None:
        """Write a value, and drop its data; what may change meanwhile is copied, to store what is summed."""
        data, encoding = value.stored(), value.encoding
        if not encoding.splits:
            value.place = self._append(file, value, data)
        else:
            if value.may_change:
                data = memoryview(bytes(data))
            if encoding.codec is None:
                file.make_room_for(data)
            encoded = data if encoding.codec is None else memoryview(compressed(data))
            end = checksum_of(encoded)
            self._count(value, len(data))
            if encoding.codec is not None and len(encoded) + len(end) <= INLINE_BYTES:
                value.inline = bytes(encoded) + end
            else:
                value.place = file.append([encoded, memoryview(end)])
        value.data = None

    def _append(self, file: _DataFile, value: Value, data: memoryview) -> ByteRange:
        """Add a value as it is; return its place."""
        file.make_room_for(data)
        place, sums = ByteRange(file.name, file.size, len(data)), list[bytes]()
        for at in range(0, len(data), _PART_BYTES):
            part = data[at : at + _PART_BYTES]
            if self._sums is not None:
                part = memoryview(bytes(part)) if value.may_change else part
                sums.append(checksums.of_blocks(part))
            file.append([part])
            self._count(value, len(part))
        if self._sums is not None:
            self._sums[value.key] = b"".join(sums)
        return place

    def _count(self, value: Value, nbytes: int) -> None:
        if self._meter.is_on:
            self._meter.add(nbytes, value.key.partition("/")[0])


class _DataFile:
    """A new data file, to which one thread at a time appends."""

    def __init__(self, folder: str, name: str, *, past_cache: bool) -> None:
        self.name, self.size = name, 0  # relative to the folder; bytes, with those that are not written yet
        self._file = new_file.create(os.path.join(folder, name), past_cache=past_cache)
        self._pieces: list[memoryview] = []
        self._buffered = 0

    def append(self, pieces: Sequence[memoryview]) -> ByteRange:
        """Add a value, which must not change before `flush`; return its place."""
        place = ByteRange(self.name, self.size, sum(map(len, pieces)))
        self._pieces += pieces
        self._buffered += place.length
        self.size += place.length
        if self._buffered >= _BUFFERED_BYTES:
            self.flush()
        return place

    def make_room_for(self, data: memoryview) -> None:
        """Add zeros, less than a page, so that a large value that comes next begins as far into a page as in memory."""
        if self._file.is_past_cache and len(data) >= memory.PAGED_FROM:
            self.append([memoryview(bytes((memory.address_of(data) - self.size) % memory.PAGE))])

    def flush(self) -> None:
        """Write what was added."""
        self._file.write(self._pieces)
        self._buffered = 0

    def close(self) -> None:
        """Write and sync everything, and close the file."""
        try:
            self.flush()
        except BaseException:
            self.discard()
            raise
        self._file.close()

    def discard(self) -> None:
        """Close the file as it is."""
        self._file.discard()
