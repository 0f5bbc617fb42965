"""Read stored arrays into new memory, by ranged reads in threads."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.byte_reads import PIECE_BYTES, Deliver, Read, Source, ends_early, neighbours, read_runs
from flax_ckpt_compat._core.checksums import BLOCK_BYTES
from flax_ckpt_compat._core.errors import translated
from flax_ckpt_compat._core.local import local_file
from flax_ckpt_compat._core.local.local_file import LocalFile
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.tree import show_path

from .chunk_codecs import MAX_RATIO
from .files import ByteRange
from .open_index import Index
from .read_plan import ArrayRead, Piece, plan_pieces, runs
from .recorded_checksums import Checksums, Expected, check_blocks
from .stored_names import key_prefix

_log = logging.getLogger("flax_ckpt_compat")
_BYTE = np.dtype(np.uint8)
# Files that are open at once: a process may have 1024 open, by default, and a checkpoint of many hosts has more.
_MOST_OPEN = 128
# Releases before 0.10.3 left out chunks of the fill value. Arrays with such may take this many bytes of memory, or as
# much as zstd could expand the checkpoint to; a hostile grid has 2**60 chunks to look up.
_MAX_FILLED_BYTES, _MAX_MISSING = 1 << 30, 1 << 20


class ArrayReader:
    """Reads arrays of one open checkpoint."""

    def __init__(
        self, location: Location, index: Index, fills_missing: bool, recorded: Checksums | None = None
    ) -> None:
        """Prepare to read; with ``recorded``, chunks are checked against these checksums unless they are mapped."""
        self._location, self._index, self._fills_missing, self._recorded = location, index, fills_missing, recorded

    def read(self, reads: Sequence[ArrayRead], meter: Meter = OFF, *, mapped: bool = False) -> None:
        """Set the ``array`` of reads; with ``mapped``, raw chunks of local files may be mapped instead of read."""
        expected, missing = Expected(), 0
        for read in reads:
            missing = self._locate(read, expected, self._recorded, missing)
        self._check_filled([read for read in reads if not read.complete])
        if mapped and not self._location.is_remote:
            self._map(reads)
        groups: dict[str, list[ArrayRead]] = {}
        for read in reads:
            if read.array is None:
                read.array = self._allocate(read)
                if read.nbytes:
                    groups.setdefault(read.name, []).append(read)
        pieces: list[Piece] = []
        encoded: list[Piece] = []
        for group in groups.values():
            (pieces if group[0].info.raw else encoded).extend(plan_pieces(group))
        self._read_pieces(pieces, meter, _deliver, expected)
        self._read_pieces(encoded, OFF, functools.partial(_deliver, meter=meter))
        if not self._index.is_database:
            self._warn_of_missing_chunks([read for read in reads if not read.complete])

    def verify(self, read: ArrayRead, recorded: Checksums) -> bool:
        """Read a raw array in bounded memory to check it; return False unless all chunks have checksums."""
        expected = Expected()
        self._locate(read, expected, recorded)
        extents = [value for value, _ in read.chunks if isinstance(value, ByteRange)]
        if not read.info.raw or not read.complete or not expected.keys() >= set(extents):
            return False
        for extent in extents:
            for start in range(0, extent.length, PIECE_BYTES):
                count = min(PIECE_BYTES, extent.length - start)
                part = ByteRange(extent.file, extent.offset + start, count)
                piece = Piece(read, part, extent, memory.empty((count,), _BYTE))
                self._read_pieces([piece], OFF, _deliver, expected)
        return True

    def _locate(self, read: ArrayRead, expected: Expected, recorded: Checksums | None, missing: int = 0) -> int:
        """Locate all chunks, and count the missing ones, if its release left out chunks of the fill value."""
        prefix, stored, info = key_prefix(read.name), 0, read.info
        may_be_missing = self._fills_missing and info.has_fill_value
        for part in read.layout.parts:
            key = prefix + part.key
            value = self._index.find(key)
            if value is None and may_be_missing:
                read.complete, missing = False, missing + 1
                if missing > _MAX_MISSING:
                    raise read.corrupt(f"{missing} chunks are missing of it and of other arrays")
                continue
            if value is None:
                raise read.corrupt(f"the chunk {key!r} is missing")
            length = value.length if isinstance(value, ByteRange) else len(value)
            if info.raw and length != info.chunk_nbytes:
                raise read.corrupt(f"its data has {length} bytes, expected {info.chunk_nbytes} for {read}")
            sums = None if recorded is None else recorded.of_chunk(key, value)
            if sums is not None and isinstance(value, ByteRange):
                expected[value] = read, key, part.start, *sums
            read.chunks.append((value, part))
            stored += length
        if not may_be_missing and read.nbytes > stored * MAX_RATIO:
            raise read.corrupt(f"{stored} stored bytes cannot hold {read}")
        return missing

    def _check_filled(self, reads: Sequence[ArrayRead]) -> None:
        """Check that arrays with missing chunks, which the fill value replaces, are not absurdly large."""
        nbytes = sum(read.nbytes for read in reads)
        if nbytes > _MAX_FILLED_BYTES and nbytes > (stored := self._location.total_size()) * MAX_RATIO:
            what = f"{len(reads)} arrays without all their chunks take {nbytes} bytes of memory"
            largest = max(reads, key=lambda read: read.nbytes)
            raise largest.corrupt(f"{what}, but the checkpoint has {stored} bytes")

    def _map(self, reads: Sequence[ArrayRead]) -> None:
        """Map what is one range of a raw chunk of a file; what cannot be mapped is read afterwards."""
        files: dict[str, list[tuple[ArrayRead, ByteRange]]] = {}
        for read in reads:
            if not read.info.raw or len(read.chunks) != 1 or read.nbytes < local_file.MAPPED_FROM:
                continue
            (value, part), size = read.chunks[0], read.info.dtype.itemsize
            count, offsets = runs(read.info.chunks, part.source, read.shape, part.target)
            if isinstance(value, ByteRange) and count * size == read.nbytes:
                extent = ByteRange(value.file, value.offset + next(offsets)[0] * size, read.nbytes)
                files.setdefault(extent.file, []).append((read, extent))
        for file, wanted in files.items():
            with contextlib.suppress(OSError):  # the read that follows reports it
                with contextlib.closing(LocalFile((self._location / file).path)) as source:
                    views = source.map([(extent.offset, extent.length) for _, extent in wanted])
                for (read, _), view in zip(wanted, views, strict=True):
                    read.array = None if view is None else view.view(read.info.dtype).reshape(read.shape)

    def _allocate(self, read: ArrayRead) -> Any:
        try:
            array = memory.empty(read.shape, read.info.dtype)
        except (MemoryError, ValueError) as error:
            stored = self._location.total_size()
            if isinstance(error, MemoryError) and read.nbytes <= stored * MAX_RATIO:
                raise
            raise read.corrupt(f"there is no memory for {read}") from error
        if not read.complete:
            array[...] = read.info.fill_value()
        return array

    def _read_pieces(
        self, pieces: Sequence[Piece], meter: Meter, deliver: Deliver, expected: Expected | None = None
    ) -> None:
        files: dict[str, list[Piece]] = {}
        for piece in pieces:
            files.setdefault(piece.extent.file, []).append(piece)
        groups, is_remote = list(files.values()), self._location.is_remote
        check = functools.partial(check_blocks, expected) if expected else None
        step = max(len(groups), 1) if is_remote else _MOST_OPEN
        for start in range(0, len(groups), step):
            with contextlib.ExitStack() as opened:
                sources = [(self._open(group[0], opened), group) for group in groups[start : start + step]]
                reads = [piece.range_of(source) for source, group in sources for piece in group]
                for read in () if is_remote else reads:  # before memory of a claimed length is taken
                    if read.offset + read.nbytes > read.source.size:
                        raise ends_early(read)
                read_runs(neighbours(reads, PIECE_BYTES if is_remote else BLOCK_BYTES), deliver, meter, check)

    def _open(self, piece: Piece, opened: contextlib.ExitStack) -> Source:
        """Open the file of a piece, which is closed with ``opened``."""
        read, name = piece.read, piece.extent.file
        file = self._location / name
        if file.is_remote:
            return _DataObject(file, read, name)
        with _reading(file, read, name):
            return opened.enter_context(contextlib.closing(LocalFile(file.path)))

    def _warn_of_missing_chunks(self, reads: Sequence[ArrayRead]) -> None:
        """Warn of missing chunk files: unlike the keys of a database, files can get lost in copying without a trace."""
        names = sorted({show_path(read.path) for read in reads})
        if names:
            _log.warning(
                f"{self._location}: not all chunk files of the arrays {names[:8]} are there; they are read as the fill "
                f"value, because releases of Orbax before 0.10.3 left out chunks of only that value. If files were "
                f"lost in copying, copy the checkpoint again"
            )


@contextlib.contextmanager
def _reading(file: Location, read: ArrayRead, name: str) -> Iterator[None]:
    """Translate errors of reading a file; one that is missing is damage of the array."""
    with translated(file.path, "read"):
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:  # also a `MissingPathError` of a store
            raise read.corrupt(f"the file {name} is missing") from error


class _DataObject(Source):
    """A data file in a store: no other has its name, so it is not opened, which would take a request."""

    def __init__(self, file: Location, read: ArrayRead, name: str) -> None:
        self._file, self._needed, self.path = file, (read, name), file.path

    def read(self, start: int, stop: int) -> bytes:
        """Read a range by one request."""
        with _reading(self._file, *self._needed):
            return self._file.read(start, stop)


def _deliver(found: list[tuple[Read, memoryview]], meter: Meter = OFF) -> None:
    """Copy what was read to the arrays; count what is decoded."""
    for read, data in found:
        piece: Piece = read.content
        piece.deliver(data)
        if meter.is_on:
            meter.add(sum(copy.array[copy.target].nbytes for copy in piece.copies), read.owner)
