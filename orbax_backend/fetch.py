"""Reads stored arrays into fresh memory: plain bytes by ``pread`` in threads, everything else by TensorStore."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.errors import CorruptCheckpointError, StorageError

from .index import Extent, Index, Place, Present
from .names import key_prefix
from .zarr import ArrayInfo

_Array = np.ndarray[Any, Any]
_THREADS = min(8, 2 * (os.cpu_count() or 1))
_PIECE_BYTES = 16 << 20
# zstd, the best of the codecs at this, turns 4 bytes into at most 128 KiB.
_MAX_RATIO = 1 << 16
_CACHE_BYTES = 64 << 20
_MAX_CHUNKS = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One array to read: its stored name, metadata, and key path for messages."""

    name: str
    info: ArrayInfo
    shown: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a file, and the memory it goes to."""

    job: Job
    extent: Extent
    target: memoryview


class Fetcher:
    """Reads arrays of one open checkpoint."""

    def __init__(self, path: str, index: Index, fills_missing: bool) -> None:
        self._path = path
        self._index = index
        self._fills_missing = fills_missing
        # Its own context, because nodes are cached by path and another checkpoint may take this path.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})

    def fetch(self, jobs: Sequence[Job]) -> list[_Array]:
        """The arrays, with the stored dtype, in memory of their own.

        Raises:
            CorruptCheckpointError: bytes are missing or do not decode; names the leaf.
            StorageError: the file system refused.
        """
        by_driver: list[tuple[Job, _Array]] = []
        pieces: list[_Piece] = []
        arrays = []
        sizes: dict[str, int] = {}
        for job in jobs:
            places = self._locate(job, sizes)
            if len(places) == 1 and job.info.is_one_raw_chunk and not isinstance(places[0], Present):
                array = self._plain(job, places[0], pieces)
            else:
                array = self._empty(job)
                if array.size:
                    by_driver.append((job, array))
            arrays.append(array)
        opened = [(job, array, self._open(job)) for job, array in by_driver]
        self._read_pieces(pieces)
        self._copy(opened)
        return arrays

    def _plain(self, job: Job, place: bytes | Extent, pieces: list[_Piece]) -> _Array:
        """An array whose bytes are known (then filled in) or lie in a file (then added to the pieces)."""
        length = _stored_bytes(place)
        if length != job.info.nbytes:
            raise self._corrupt(job, f"its data has {length} bytes, expected {job.info.nbytes} for {_show(job.info)}")
        array = self._empty(job)
        target = memory.as_bytes(array)
        if isinstance(place, Extent):
            for start in range(0, length, _PIECE_BYTES):
                part = target[start : start + _PIECE_BYTES]
                pieces.append(_Piece(job, Extent(place.file, place.offset + start, len(part)), part))
        else:
            target[:] = place
        return array

    def _locate(self, job: Job, sizes: dict[str, int]) -> list[Place]:
        """Where all chunks lie; a missing one is an error unless the checkpoint's convention is to leave some out."""
        prefix, places, stored = key_prefix(job.name), [], 0
        may_lack = self._fills_missing and job.info.has_fill_value
        # Where chunks may be missing the first one does not end the walk over a hostile grid of 2**60.
        for key in itertools.islice(job.info.chunk_keys(), _MAX_CHUNKS if may_lack else None):
            place = self._index.find(prefix + key)
            if place is None and may_lack:
                continue
            if place is None:
                raise self._corrupt(job, f"the chunk {prefix + key!r} is missing")
            if isinstance(place, Extent):
                self._check_inside(job, place, sizes)
            places.append(place)
            stored += _stored_bytes(place)
        if not may_lack and job.info.nbytes > stored * _MAX_RATIO:
            raise self._corrupt(job, f"{stored} stored bytes cannot hold {_show(job.info)}")
        return places

    def _check_inside(self, job: Job, extent: Extent, sizes: dict[str, int]) -> None:
        if extent.file not in sizes:
            try:
                sizes[extent.file] = os.path.getsize(os.path.join(self._path, extent.file))
            except FileNotFoundError as error:
                raise self._corrupt(job, f"the file {extent.file} is missing") from error
            except OSError as error:
                raise self._refused(extent.file, error) from error
        # TensorStore would take a missing file for an empty value (measured).
        if extent.offset + extent.length > sizes[extent.file]:
            raise self._corrupt(
                job,
                f"the file {extent.file} has {sizes[extent.file]} bytes, expected at least "
                f"{extent.offset + extent.length}",
            )

    def _empty(self, job: Job) -> _Array:
        try:
            return memory.empty(job.info.shape, job.info.dtype)
        except (MemoryError, ValueError) as error:
            raise self._corrupt(job, f"there is no memory for {_show(job.info)}") from error

    def _read_pieces(self, pieces: list[_Piece]) -> None:
        if not pieces:
            return
        pieces.sort(key=lambda piece: (piece.extent.file, piece.extent.offset))
        files: dict[str, int] = {}
        try:
            for piece in pieces:
                if piece.extent.file not in files:
                    files[piece.extent.file] = self._open_file(piece)
            _in_threads(lambda piece: self._read_piece(files[piece.extent.file], piece), pieces)
        finally:
            for fd in files.values():
                os.close(fd)

    def _open_file(self, piece: _Piece) -> int:
        try:
            return os.open(os.path.join(self._path, piece.extent.file), os.O_RDONLY)
        except FileNotFoundError as error:
            raise self._corrupt(piece.job, f"the file {piece.extent.file} is missing") from error
        except OSError as error:
            raise self._refused(piece.extent.file, error) from error

    def _read_piece(self, fd: int, piece: _Piece) -> None:
        done = 0
        while done < piece.extent.length:
            try:
                count = os.preadv(fd, [piece.target[done:]], piece.extent.offset + done)
            except OSError as error:
                raise self._refused(piece.extent.file, error) from error
            if not count:
                raise self._corrupt(piece.job, f"the file {piece.extent.file} ends too early")
            done += count

    def _open(self, job: Job) -> Any:
        spec = {
            "driver": job.info.driver,
            "kvstore": self._index.kvstore(key_prefix(job.name)),
            "fill_missing_data_reads": self._fills_missing and job.info.has_fill_value,
        }
        with _Translated(self, job):
            return ts.open(spec, open=True, read=True, context=self._context)

    def _copy(self, opened: list[tuple[Job, _Array, Any]]) -> None:
        copies = []
        for job, array, future in opened:
            with _Translated(self, job):
                store = future.result()
                if store.shape != job.info.shape:
                    raise ValueError(f"the shape {store.shape} was expected to be {job.info.shape}")
                copies.append((job, array, _start_copy(array, store)))
        for job, array, copy in copies:
            with _Translated(self, job):
                copy.result()
            if not array.dtype.isnative:
                array.view(array.dtype.newbyteorder()).byteswap(inplace=True)

    def _corrupt(self, job: Job, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}: the array {job.shown!r} (stored as {job.name!r}) cannot be read: {what}; "
            f"restore the files from a copy, or restore the other leaves only",
            path=self._path,
            leaf=job.shown,
        )

    def _refused(self, file: str, error: OSError) -> StorageError:
        full = os.path.join(self._path, file)
        return StorageError(
            f"{full} could not be read: {error.strerror or error}; check the disk and permissions",
            path=full,
            errno=error.errno,
        )


class _Translated:
    """Turns TensorStore's errors about one array into ours."""

    def __init__(self, fetcher: Fetcher, job: Job) -> None:
        self._fetcher, self._job = fetcher, job

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, OSError, NotImplementedError)):
            raise self._fetcher._corrupt(self._job, str(error)) from error


def _start_copy(array: _Array, store: Any) -> Any:
    """Has TensorStore write into our memory, in native byte order."""
    native = array if array.dtype.isnative else array.view(array.dtype.newbyteorder())
    return ts.array(native).write(store)


def _stored_bytes(place: Place) -> int:
    if isinstance(place, Present):
        return 1 << 40  # nothing is known, so nothing is refused
    return place.length if isinstance(place, Extent) else len(place)


def _in_threads(function: Callable[[_Piece], None], pieces: list[_Piece]) -> None:
    if sum(piece.extent.length for piece in pieces) < _PIECE_BYTES // 4:
        for piece in pieces:
            function(piece)
        return
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        # Few tasks of many pieces: a task costs more than a small read.
        step = max(1, len(pieces) // (_THREADS * 8))
        groups = [pieces[start : start + step] for start in range(0, len(pieces), step)]
        for done in [pool.submit(_each, function, group) for group in groups]:
            done.result()


def _each(function: Callable[[_Piece], None], pieces: list[_Piece]) -> None:
    for piece in pieces:
        function(piece)


def _show(info: ArrayInfo) -> str:
    return f"{info.dtype.name}{list(info.shape)}"
