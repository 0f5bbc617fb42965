"""Read stored arrays into new memory: raw chunks by ranged reads in threads, others through TensorStore."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from flax_ckpt_compat._core import memory, paths
from flax_ckpt_compat._core.errors import CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.local import mapping
from flax_ckpt_compat._core.thread_pools import Pool

from . import grid, remote_reads, uncompressed
from .array_reads import ArrayRead, Job, by_chunk, show
from .grid import Box
from .mapped import arrays as arrays_over_files
from .sources import new_context, read_range, sizes_of, wait
from .stored_names import key_prefix
from .stored_values import ByteRange, Index, OpaqueValue, StoredValue
from .uncompressed import Copy, Piece, in_threads

_log = logging.getLogger("flax_ckpt_compat")
_Array = np.ndarray[Any, Any]
_CHUNKS_AT_ONCE = min(8, 2 * (os.cpu_count() or 1))
# Of all codecs zstd expands most: 4 bytes to at most 128 KiB.
_MAX_RATIO = 1 << 16
_CACHE_BYTES = 64 << 20
_MAX_CHUNKS = 1 << 20


class Fetcher:
    """Reads arrays of one open checkpoint."""

    def __init__(self, path: str, index: Index, fills_missing: bool) -> None:
        self._path = path
        self._index = index
        self._fills_missing = fills_missing
        self._in_files = fills_missing and index.kvstore("")["driver"] != "ocdbt"
        self._context = new_context(path, _CACHE_BYTES)

    def fetch(self, jobs: Sequence[Job], *, mapped: bool = False) -> list[_Array]:
        """Read arrays, with the stored dtype.

        Args:
            jobs: arrays and boxes to read.
            mapped: map raw chunks of local files instead of reading them.

        Raises:
            CorruptCheckpointError: bytes are missing or do not decode; names the leaf.
            StorageError: the file system refused.
        """
        extents: list[tuple[Job, ByteRange]] = []
        located = [self._locate(job, extents) for job in jobs]
        self._check_bounds(extents)
        ready = arrays_over_files(self._path, jobs, located) if mapped else {}
        wanted = [pair for number, pair in enumerate(zip(jobs, located, strict=True)) if number not in ready]
        reads = [self._allocate(job, *found) for job, found in wanted]
        groups: dict[str, list[ArrayRead]] = {}
        for read in reads:
            if read.array.size:
                groups.setdefault(read.job.name, []).append(read)
        raw = [group for group in groups.values() if _is_raw(group)]
        opened = [(group, self._open(group[0].job)) for group in groups.values() if not _is_raw(group)]
        self._read_pieces([piece for group in raw for piece in _reads_of(group)])
        self._read_opened(opened)
        self._warn_of_missing_chunks([read for read in reads if self._in_files and not read.complete])
        return mapping.merge_by_index(ready, [read.array for read in reads])

    def _allocate(self, job: Job, chunks: list[tuple[StoredValue, Box]], complete: bool) -> ArrayRead:
        try:
            return ArrayRead(job, memory.empty(job.shape, job.info.dtype), chunks, complete)
        except (MemoryError, ValueError) as error:
            raise self._corrupt(job, f"there is no memory for {show(job)}") from error

    def _locate(self, job: Job, extents: list[tuple[Job, ByteRange]]) -> tuple[list[tuple[StoredValue, Box]], bool]:
        """Locate all chunks; raise for a missing one unless its release left out chunks of the fill value."""
        prefix, found, stored, complete = key_prefix(job.name), [], 0, True
        may_be_missing = self._fills_missing and job.info.has_fill_value
        # If chunks may be missing, the first one does not end the loop over a hostile grid of 2**60.
        limit = _MAX_CHUNKS if may_be_missing else None
        for cell, box in itertools.islice(job.cells(), limit):
            key = prefix + job.info.chunk_key(cell)
            value = self._index.find(key)
            if value is None and may_be_missing:
                complete = False
                continue
            if value is None:
                raise self._corrupt(job, f"the chunk {key!r} is missing")
            self._check(job, value, extents)
            found.append((value, box))
            stored += _stored_bytes(value)
        if not may_be_missing and math.prod(job.shape) * job.info.dtype.itemsize > stored * _MAX_RATIO:
            raise self._corrupt(job, f"{stored} stored bytes cannot hold {show(job)}")
        # Chunks beyond the limit were not looked up; TensorStore does that.
        return found, complete and not (may_be_missing and len(found) == _MAX_CHUNKS)

    def _warn_of_missing_chunks(self, reads: list[ArrayRead]) -> None:
        """Warn of missing chunk files: unlike the keys of a database, files can get lost in copying without a trace."""
        names = sorted({read.job.keystr for read in reads})
        if names:
            _log.warning(
                f"{self._path}: not all chunk files of the arrays {names[:8]} are there; they are read as the fill "
                f"value, because releases of Orbax before 0.10.3 left out chunks of only that value. If files were "
                f"lost in copying, copy the checkpoint again"
            )

    def _check(self, job: Job, value: StoredValue, extents: list[tuple[Job, ByteRange]]) -> None:
        if isinstance(value, OpaqueValue):
            return
        length, expected = _stored_bytes(value), job.info.chunk_nbytes
        if job.info.raw and length != expected:
            raise self._corrupt(job, f"its data has {length} bytes, expected {expected} for {show(job)}")
        if isinstance(value, ByteRange):
            extents.append((job, value))

    def _check_bounds(self, extents: list[tuple[Job, ByteRange]]) -> None:
        """Check that files contain the ranges; TensorStore would read a missing file as an empty value (measured)."""
        files = list(dict.fromkeys(extent.file for _, extent in extents))
        sizes = dict(zip(files, sizes_of([os.path.join(self._path, file) for file in files]), strict=True))
        for job, extent in extents:
            size = sizes[extent.file]
            if isinstance(size, OSError):
                raise self._unreadable(job, extent.file, size) from size
            if extent.offset + extent.length > size:
                raise self._corrupt(
                    job,
                    f"the file {extent.file} has {size} bytes, expected at least {extent.offset + extent.length}",
                )

    def _read_pieces(self, pieces: list[Piece]) -> None:
        if not pieces:
            return
        pieces.sort(key=lambda piece: (piece.extent.file, piece.extent.offset))
        if paths.is_url(self._path):
            remote_reads.in_threads(self._read_run, remote_reads.runs(pieces))
            return
        files: dict[str, int] = {}
        try:
            for piece in pieces:
                if piece.extent.file not in files:
                    files[piece.extent.file] = self._open_file(piece)
            in_threads(lambda piece: piece.read(lambda p, target: self._fill(files[p.extent.file], p, target)), pieces)
        finally:
            for fd in files.values():
                os.close(fd)

    def _open_file(self, piece: Piece) -> int:
        try:
            return os.open(os.path.join(self._path, piece.extent.file), os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(piece.owner, piece.extent.file, error) from error

    def _fill(self, fd: int, piece: Piece, target: memoryview) -> None:
        done = 0
        while done < piece.extent.length:
            try:
                count = os.preadv(fd, [target[done:]], piece.extent.offset + done)
            except OSError as error:
                raise self._refused(piece.extent.file, error) from error
            if not count:
                raise self._corrupt(piece.owner, f"the file {piece.extent.file} ends too early")
            done += count

    def _read_run(self, pieces: list[Piece]) -> None:
        """Read neighbouring ranges of one object in one request."""
        file, start = pieces[0].extent.file, pieces[0].extent.offset
        stop = max(piece.extent.offset + piece.extent.length for piece in pieces)
        try:
            data = memoryview(read_range(os.path.join(self._path, file), start, stop))
        except OSError as error:
            raise self._unreadable(pieces[0].owner, file, error) from error
        if len(data) < stop - start:
            raise self._corrupt(pieces[-1].owner, f"the object {file} ends too early")
        for piece in pieces:
            at = piece.extent.offset - start
            remote_reads.deliver(piece, data[at : at + piece.extent.length])

    def _open(self, job: Job) -> Any:
        spec = {
            "driver": job.info.driver,
            "kvstore": self._index.kvstore(key_prefix(job.name)),
            "fill_missing_data_reads": self._fills_missing and job.info.has_fill_value,
        }
        with _TranslateErrors(self, job):
            return ts.open(spec, open=True, read=True, context=self._context)

    def _read_opened(self, opened: list[tuple[list[ArrayRead], Any]]) -> None:
        """Read arrays through TensorStore."""
        started: list[tuple[ArrayRead, Any]] = []
        shared: list[tuple[list[ArrayRead], Any]] = []
        for group, future in opened:
            job = group[0].job
            with _TranslateErrors(self, job):
                store = wait(self._path, future)
                if store.shape != job.info.shape:
                    raise ValueError(f"the shape {store.shape} was expected to be {job.info.shape}")
                if _share_chunks(group):
                    shared.append((group, store))
                else:
                    started += [(read, _start_copy(read, store)) for read in group]
        nbytes = sum(read.array.nbytes for read, _ in started)
        for read, copied in started:
            with _TranslateErrors(self, read.job):
                wait(self._path, copied, nbytes)
            if not read.array.dtype.isnative:
                read.array.view(read.array.dtype.newbyteorder()).byteswap(inplace=True)
        for group, store in shared:
            with _TranslateErrors(self, group[0].job):
                _read_by_chunk(self._path, group, store)

    def _corrupt(self, job: Job, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}: the array {job.keystr!r} (stored as {job.name!r}) cannot be read: {what}; "
            f"restore the files from a copy, or restore the other leaves only",
            path=self._path,
            leaf=job.keystr,
        )

    def _unreadable(self, job: Job, file: str, error: OSError) -> Exception:
        if isinstance(error, FileNotFoundError):
            return self._corrupt(job, f"the file {file} is missing")
        return self._refused(file, error)

    def _refused(self, file: str, error: OSError) -> StorageError:
        if isinstance(error, StorageError):
            return error
        full = os.path.join(self._path, file)
        return StorageError(
            f"{full} could not be read: {error.strerror or error}; check the disk and permissions",
            path=full,
            errno=error.errno,
        )


class _TranslateErrors:
    """Translates TensorStore's errors about one array."""

    def __init__(self, fetcher: Fetcher, job: Job) -> None:
        self._fetcher, self._job = fetcher, job

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, OSError, NotImplementedError)) and not isinstance(error, StorageError):
            raise self._fetcher._corrupt(self._job, str(error)) from error


def _is_raw(group: list[ArrayRead]) -> bool:
    """Return whether all chunks are raw and their byte ranges are known."""
    return group[0].job.info.raw and all(
        read.complete and not any(isinstance(value, OpaqueValue) for value, _ in read.chunks) for read in group
    )


def _start_copy(read: ArrayRead, store: Any) -> Any:
    """Start TensorStore's copy into the array, in native byte order."""
    array = read.array
    native = array if array.dtype.isnative else array.view(array.dtype.newbyteorder())
    wanted = store if read.job.box is None else store[read.job.box][ts.d[:].translate_to[0]]
    return ts.array(native).write(wanted)


def _share_chunks(group: list[ArrayRead]) -> bool:
    """Return whether several reads share chunks; only TensorStore fills in missing ones, so all must be stored."""
    return (
        len(group) > 1
        and all(read.complete for read in group)
        and any(len(copies) > 1 for _, copies in by_chunk(group).values())
    )


def _read_by_chunk(path: str, group: list[ArrayRead], store: Any) -> None:
    """Decode each chunk once for all boxes in it."""
    with Pool(_CHUNKS_AT_ONCE) as pool:
        chunks = by_chunk(group).items()
        for done in [pool.submit(_read_chunk, path, store, start, copies) for start, (_, copies) in chunks]:
            done.result()


def _read_chunk(path: str, store: Any, start: tuple[int, ...], copies: list[Copy]) -> None:
    inner = grid.bounding_box([copy.source for copy in copies])
    box = tuple(slice(at + side.start, at + side.stop) for at, side in zip(start, inner, strict=True))
    values = wait(path, store[box].read(), math.prod(grid.shape_of(box)) * store.dtype.numpy_dtype.itemsize)
    uncompressed.scatter(
        values, [Copy(grid.relative_to(copy.source, inner), copy.array, copy.target) for copy in copies]
    )


def _reads_of(group: list[ArrayRead]) -> list[Piece]:
    """Return the ranges to read for boxes of one array of raw chunks."""
    job = group[0].job
    if len(group) == 1 and job.is_one_raw_chunk:
        ((value, _),) = group[0].chunks
        return uncompressed.plan_whole_chunk(job, value, group[0].array)
    found: list[Piece] = []
    for value, copies in by_chunk(group).values():
        found += uncompressed.plan_chunk(job, value, job.info.chunks, copies)
    return found


def _stored_bytes(value: StoredValue) -> int:
    if isinstance(value, OpaqueValue):
        return 1 << 40  # unknown, so nothing is refused
    return value.length if isinstance(value, ByteRange) else len(value)
