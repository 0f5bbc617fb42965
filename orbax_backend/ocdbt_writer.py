"""Write arrays, or one process's shards of them, to a new OCDBT database: values as they come, then the index of all.

Each batch of values becomes a data file of its own, so that the system writes and syncs several at once, on several
threads. Bytes are written from the memory that they are in, and the thread that writes them computes their checksums.
"""

from __future__ import annotations

import collections
import errno
import functools
import json
import math
import os
import re
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from flax_ckpt_compat._core import array_boxes, checksums, memory
from flax_ckpt_compat._core.array_boxes import Box, Shape, full_box
from flax_ckpt_compat._core.backend import WriteOptions
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import new_file
from flax_ckpt_compat._core.local.syncing import sync_directory, write_file
from flax_ckpt_compat._core.orbax_layout import DATA_DIRECTORY, MANIFEST
from flax_ckpt_compat._core.thread_pools import Pool, Task
from flax_ckpt_compat._core.tree import Shard, is_jax_array

from .chunk_codecs import CHECKSUM_NBYTES, checksum_of, compressed, with_checksum
from .encode_leaves import EncodedLeaf
from .files import ByteRange
from .ocdbt import Entry
from .ocdbt_encode import INLINE_BYTES, encode_index
from .stored_names import key_prefix
from .zarr import ArrayInfo, Encoding, dump_metadata, parse_array_metadata

_THREADS = min(8, os.cpu_count() or 1)
# Values of about this size are a batch; of a large checkpoint, later ones have more, to make fewer files.
BATCH_BYTES, _LATER_BATCH_BYTES, _FIRST_BATCHES = 16 << 20, 64 << 20, 16
_BUFFERED_BYTES = 4 << 20
_PART_BYTES = 16 << 20  # of a large value, which is copied, summed and counted part by part; blocks of checksums
# A copy of a smaller array is cheaper than an entry of its own in a system call.
_COPY_BELOW_BYTES = 16 << 10
# Paths that real Orbax could not open: TensorStore writes ``a\\b`` to ``a/b``.
_REFUSED = {r"\\": "has a backslash", r"\.__lock(/|$)": "ends in .__lock", "[\ud800-\udfff]": "is not UTF-8"}


class Value(NamedTuple):
    """One chunk of an array."""

    key: str
    data: np.ndarray[Any, Any]
    encoding: Encoding
    shape: Shape  # as it is stored: at the edge of a larger array, with zeros behind it on some axes
    may_change: bool = False  # whether other threads of the program may write to the array meanwhile


def _padded(array: np.ndarray[Any, Any], shape: Shape) -> np.ndarray[Any, Any]:
    """Return an array with zeros behind it on each axis, if it is smaller than a shape."""
    if array.shape == shape:
        return array
    larger = np.zeros(shape, array.dtype)
    larger[full_box(array.shape)] = array
    return larger


class Database:
    """A new OCDBT database."""

    def __init__(self, path: str, encoding: Encoding, options: WriteOptions, sums: dict[str, bytes] | None) -> None:
        """Begin a database in the directory ``path``; ``sums`` gets the checksums of chunks that have none."""
        for pattern, why in _REFUSED.items():
            if re.search(pattern, path):
                what = f"a name in this path {why}, and TensorStore, which reads Orbax's format, takes no such path"
                raise StorageError(f"{path}: {what}; rename it, or save as msgpack", path=path, errno=errno.EILSEQ)
        self._path, self._encoding, self._sums = path, encoding, sums
        self._meter, self._past_cache = options.meter, options.past_cache
        self._batch, self._batch_nbytes, self._n_batches = list[Value](), 0, 0
        self._pool, self._tasks = Pool(_THREADS), collections.deque[tuple[Task, int]]()
        self._entries: list[Entry] = []  # of the index: of what lies in it, or is written
        self._known_cells: dict[Any, list[_Cells]] = {}
        self._form_of = functools.cache(form_of)

    def add_array(self, name: str, stored: EncodedLeaf, is_primary: bool = True) -> None:
        """Add one array, or its shards in this process; its memory must not change before the database is finished."""
        form = self._form_of(stored.shape, stored.write_shape, stored.dtype, self._encoding)
        prefix = key_prefix(name)
        encoding, info = form.encoding, form.info
        if is_primary:
            self._entries.append(((prefix + encoding.metadata_file).encode(), form.text))
        if not form.nbytes:
            return
        if form.is_small and info.chunks == stored.shape and not stored.spans_processes:
            self._add_small(prefix + form.first_key, stored.whole().tobytes(), encoding)
            return
        shards = stored.shards()
        may_change = memory.may_change(stored.source)
        for shard, cells in zip(shards, self._cells(stored, info, shards), strict=True):
            for key, box in cells:
                data = shard.data if box is None else shard.data[box]
                if form.is_small:
                    self._add_small(prefix + key, _padded(data, info.chunks).tobytes(), encoding)
                else:
                    self._add(Value(prefix + key, data, encoding, info.chunks, may_change))

    def _add(self, value: Value) -> None:
        """Add a value, to be written in the background."""
        self._batch.append(value)
        self._batch_nbytes += int(value.data.nbytes)
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
            self._tasks.append((self._pool.submit(self._write_batch, self._batch), self._batch_nbytes))
            self._batch, self._batch_nbytes, self._n_batches = [], 0, self._n_batches + 1

    def finish(self) -> None:
        """Write all values and the index, and sync them; the directory itself remains to be synced."""
        self.submit()
        self._wait()
        if self._entries:
            write_index(self._path, self._entries)

    def abandon(self, *, wait: bool) -> None:
        """Begin nothing more; ``wait`` for what the threads are writing."""
        self._pool.cancel(wait=wait)

    def _wait(self, nbytes: int = 0) -> None:
        """Wait until at most so many bytes are left to be written; raise a failure."""
        while self._tasks and (sum(size for _, size in self._tasks) > nbytes or self._tasks[0][0].done):
            self._entries += self._tasks[0][0].result()
            self._tasks.popleft()

    def _write_batch(self, values: list[Value]) -> list[Entry]:
        """Write a batch to a new file, and sync it; return its entries."""
        file = _DataFile(self._path, past_cache=self._past_cache)
        try:
            entries = [(value.key.encode(), self._write_value(file, value)) for value in values]
            file.flush()
        except BaseException:
            file.discard()
            raise
        file.close()
        return entries

    def _write_value(self, file: _DataFile, value: Value) -> bytes | ByteRange:
        """Write a value; what may change meanwhile is copied, to store what is summed.

        Return its place relative to the database, or the value itself, if it became small enough."""
        data = memory.as_bytes(np.ascontiguousarray(_padded(value.data, value.shape)))
        if not value.encoding.checksums:
            return self._write_raw(file, value, data)
        if value.may_change:
            data = memoryview(bytes(data))
        self._count(value, len(data))
        if value.encoding.zstd:
            data = memoryview(compressed(data))
            if len(data) + CHECKSUM_NBYTES <= INLINE_BYTES:
                return with_checksum(bytes(data))
        else:
            file.make_room_for(data)
        return file.append(data, memoryview(checksum_of(data)))

    def _write_raw(self, file: _DataFile, value: Value, data: memoryview) -> ByteRange:
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

    def _cells(self, stored: EncodedLeaf, info: ArrayInfo, shards: list[Shard]) -> list[_Cells]:
        """Return the chunks of each shard; those of jax arrays of one shape and sharding are the same."""
        if not is_jax_array(stored.source):
            return [_cells_of(shard, info) for shard in shards]
        known = stored.sharding, stored.shape, info.chunks, info.zarr3
        if known not in self._known_cells:
            self._known_cells[known] = [_cells_of(shard, info) for shard in shards]
        return self._known_cells[known]

    def _add_small(self, key: str, data: bytes, encoding: Encoding) -> None:
        """Add the bytes of a small chunk without compression."""
        if len(data) + encoding.checksums * CHECKSUM_NBYTES > INLINE_BYTES:
            self._add(Value(key, np.frombuffer(data, np.uint8), encoding, (len(data),)))
        else:
            self._entries.append((key.encode(), with_checksum(data) if encoding.checksums else data))


class _DataFile:
    """A new data file, written by one thread."""

    def __init__(self, folder: str, *, past_cache: bool) -> None:
        self.name, self.size = _new_name(), 0  # relative to the folder; bytes, with those that are not written yet
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
            self.append(memoryview(bytes((np.frombuffer(data, np.uint8).ctypes.data - self.size) % memory.PAGE)))

    def flush(self) -> None:
        """Write what was added."""
        self._file.write(self._pieces)
        self._buffered = 0


def _new_name() -> str:
    return f"{DATA_DIRECTORY}/{os.urandom(16).hex()}"


def _make_folder(path: str) -> None:
    """Make the folder of data files; the database itself may have been removed, and is not made anew."""
    with suppress(FileExistsError):
        os.mkdir(os.path.join(path, DATA_DIRECTORY))


def write_index(path: str, entries: list[Entry]) -> None:
    """Write the index of a database, whose data files are written, and sync all names of these and the index itself."""
    file, folder = _new_name(), os.path.join(path, DATA_DIRECTORY)
    with memory.pause_gc():
        nodes, manifest = encode_index(entries, file)
    _make_folder(path)
    write_file(os.path.join(path, file), nodes)
    sync_directory(folder)
    write_file(os.path.join(path, MANIFEST), manifest)


class Form(NamedTuple):
    """The storage of arrays of one shape and dtype."""

    encoding: Encoding
    text: bytes  # of the metadata
    info: ArrayInfo
    first_key: str
    nbytes: int  # of one shard
    is_small: bool  # whether chunks are copied, and put into the index if that takes them


def form_of(shape: Shape, write_shape: Shape, dtype: Any, encoding: Encoding) -> Form:
    """Return how arrays are stored whose shards have the shape ``write_shape``."""
    # Not of the largest local shard: processes without any must decide as the others do.
    nbytes = math.prod(write_shape) * dtype.itemsize
    if encoding.zstd and nbytes <= INLINE_BYTES:
        encoding = Encoding(checksums=True)
    text = json.dumps(dump_metadata(shape, write_shape, dtype, encoding), separators=(",", ":")).encode()
    info = parse_array_metadata(text, zarr3=encoding.checksums)
    is_small = not encoding.zstd and info.chunk_nbytes < _COPY_BELOW_BYTES
    return Form(encoding, text, info, info.chunk_key((0,) * len(shape)), nbytes, is_small)


_Cells = list[tuple[str, Box | None]]  # key of a chunk below the array's prefix, and its box in a shard, if not all


def _cells_of(shard: Shard, info: ArrayInfo) -> _Cells:
    """Return the chunks of a shard, which has all of each."""
    found: _Cells = []
    for cell, box in array_boxes.cells(shard.index, info.chunks):
        box = array_boxes.overlap(box, array_boxes.full_box(info.shape))
        if array_boxes.overlap(box, shard.index) != box:
            raise ValueError(f"the chunk {info.chunk_key(cell)} was expected to lie in one shard")
        found.append((info.chunk_key(cell), None if box == shard.index else array_boxes.relative_to(box, shard.index)))
    return found
