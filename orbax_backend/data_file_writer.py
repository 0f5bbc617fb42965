"""Write the values of a new OCDBT database to its data files, on several threads.

Each batch of values becomes a file of its own, so that the system writes and syncs several at once. Bytes are written
from the memory that they are in, and their checksums are computed by the thread that writes them.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from contextlib import suppress
from typing import Any

import numpy as np

from flax_ckpt_compat._core import checksums, memory
from flax_ckpt_compat._core.array_boxes import Shape, full_box
from flax_ckpt_compat._core.local import new_file
from flax_ckpt_compat._core.orbax_layout import DATA_DIRECTORY, MANIFEST
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.thread_pools import Pool, Task

from .chunk_codecs import checksum_of, compressed
from .files import ByteRange, sync_directory, write_file
from .ocdbt import Entry
from .ocdbt_encode import INLINE_BYTES, encode_index
from .zarr import Encoding

_THREADS = min(8, os.cpu_count() or 1)
# Values of about this size are a batch; of a large checkpoint, later ones have more, to make fewer files.
BATCH_BYTES, _LATER_BATCH_BYTES, _FIRST_BATCHES = 16 << 20, 64 << 20, 16
_BUFFERED_BYTES = 4 << 20
_PART_BYTES = 16 << 20  # of a large value, which is copied, summed and counted part by part; blocks of checksums


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """One chunk of an array, and what the index says of it once it is written."""

    key: str
    data: Any  # bytes, or an array in C order; None once it is written
    encoding: Encoding
    shape: Shape = ()  # of an array as it is stored: at the edge of a larger one, with zeros behind it on some axes
    may_change: bool = False  # whether other threads of the program may write to the array meanwhile
    entry: bytes | ByteRange = b""  # place relative to the database, or the value itself, if it became small enough

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
        self._path, self._sums, self._meter, self._past_cache = path, sums, meter, past_cache
        self.values = list[Value]()  # all that were added
        self._batch, self._batch_nbytes, self._n_batches = list[Value](), 0, 0
        self._pool, self._tasks = Pool(_THREADS), collections.deque[tuple[Task, int]]()

    def add(self, value: Value) -> None:
        """Add a value, to be written in the background."""
        self.values.append(value)
        self._batch.append(value)
        self._batch_nbytes += value.nbytes
        if self._batch_nbytes >= (BATCH_BYTES if self._n_batches < _FIRST_BATCHES else _LATER_BATCH_BYTES):
            self.submit()

    def make_room(self, nbytes: int) -> None:
        """Wait until little memory is held besides an array of ``nbytes`` that is read next."""
        if self._batch_nbytes + nbytes > BATCH_BYTES:
            self.submit()
        self._wait(max(0, 2 * BATCH_BYTES - nbytes))

    def submit(self) -> None:
        """Begin to write what was added."""
        if self._batch:
            if not self._n_batches:
                _make_folder(self._path)
            self._tasks.append((self._pool.submit(self._write, self._batch), self._batch_nbytes))
            self._batch, self._batch_nbytes, self._n_batches = [], 0, self._n_batches + 1

    def finish(self) -> None:
        """Write and sync everything; the directory of the files remains to be synced."""
        self.submit()
        self._wait()

    def abandon(self, *, wait: bool) -> None:
        """Begin nothing more; ``wait`` for what the threads are writing."""
        self._pool.cancel(wait=wait)

    def _wait(self, nbytes: int = 0) -> None:
        """Wait until at most so many bytes are left to be written; raise a failure."""
        while self._tasks and (sum(size for _, size in self._tasks) > nbytes or self._tasks[0][0].done):
            self._tasks[0][0].result()
            self._tasks.popleft()

    def _write(self, values: list[Value]) -> None:
        """Write a batch to a new file, and sync it."""
        file = _DataFile(self._path, past_cache=self._past_cache)
        try:
            for value in values:
                self._put(file, value)
            file.flush()
        except BaseException:
            file.discard()
            raise
        file.close()

    def _put(self, file: _DataFile, value: Value) -> None:
        """Write a value, and drop its data; what may change meanwhile is copied, to store what is summed."""
        data, encoding = value.stored(), value.encoding
        if not encoding.splits:
            value.entry = self._append(file, value, data)
        else:
            if value.may_change:
                data = memoryview(bytes(data))
            if encoding.codec is None:
                file.make_room_for(data)
            encoded = data if encoding.codec is None else memoryview(compressed(data))
            end = checksum_of(encoded)
            self._count(value, len(data))
            if encoding.codec is not None and len(encoded) + len(end) <= INLINE_BYTES:
                value.entry = bytes(encoded) + end
            else:
                value.entry = file.append(encoded, memoryview(end))
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
            file.append(part)
            self._count(value, len(part))
        if self._sums is not None:
            self._sums[value.key] = b"".join(sums)
        return place

    def _count(self, value: Value, nbytes: int) -> None:
        if self._meter.is_on:
            self._meter.add(nbytes, value.key.partition("/")[0])


class _DataFile:
    """A new data file, written by one thread."""

    def __init__(self, folder: str, *, past_cache: bool) -> None:
        self.name, self.size = new_name(), 0  # relative to the folder; bytes, with those that are not written yet
        self._file = new_file.create(os.path.join(folder, self.name), past_cache=past_cache)
        self._pieces: list[memoryview] = []
        self._buffered = 0
        self.close, self.discard = self._file.close, self._file.discard

    def append(self, *pieces: memoryview) -> ByteRange:
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
            self.append(memoryview(bytes((memory.address_of(data) - self.size) % memory.PAGE)))

    def flush(self) -> None:
        """Write what was added."""
        self._file.write(self._pieces)
        self._buffered = 0


def new_name() -> str:
    """Return the name of a new data file, relative to its database."""
    return f"{DATA_DIRECTORY}/{os.urandom(16).hex()}"


def _make_folder(path: str) -> None:
    """Make the folder of data files; the database itself may have been removed, and is not made anew."""
    with suppress(FileExistsError):
        os.mkdir(os.path.join(path, DATA_DIRECTORY))


def write_index(path: str, entries: list[Entry]) -> None:
    """Write the index of a database, whose data files are written, and sync all names of these and the index itself."""
    file, folder = new_name(), os.path.join(path, DATA_DIRECTORY)
    with memory.pause_gc():
        nodes, manifest = encode_index(entries, file)
    _make_folder(path)
    write_file(os.path.join(path, file), nodes)
    sync_directory(folder)
    write_file(os.path.join(path, MANIFEST), manifest)
