"""Record the checksums of a save while TensorStore writes the same bytes."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flax_ckpt_compat._core import array_boxes, checksums, memory
from flax_ckpt_compat._core.fold_names import one_line
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.orbax_layout import CHECKSUMS, DATA_DIRECTORY, MANIFEST
from flax_ckpt_compat._core.thread_pools import Once, in_parallel, start_thread
from flax_ckpt_compat._core.tree import Shard

from .checksum_file import Record
from .zarr import ArrayInfo

_log = logging.getLogger("flax_ckpt_compat")
_THREADS = min(8, os.cpu_count() or 1)
# A multiple of the block's size; large enough for threads to pay.
_PIECE_BYTES = 16 * checksums.BLOCK_BYTES
_ZEROS = memoryview(bytes(checksums.BLOCK_BYTES))


class _Chunk(NamedTuple):
    """A chunk that is written."""

    key: str
    data: np.ndarray[Any, Any]
    shape: array_boxes.Shape  # as it is stored: at the edge of an array, with zeros behind the data on some axes


_Chunks = list[_Chunk]


class Recorder:
    """Computes the checksums of what one process writes."""

    def __init__(self) -> None:
        self.record = Record()  # the result, whose chunks are complete once `finish` has returned
        self.nbytes = 0  # of all chunks so far, as they are written
        self._pending: _Chunks = []
        self._changing: _Chunks = []  # those that others may write to meanwhile
        # Those of `start`, and their checksums before they are written.
        self._started: _Chunks = []
        self._before: dict[str, bytes] = {}
        self._computed: Once | None = None
        self._after: Once | None = None  # checksums of `_started` once it is written

    def add_bytes(self, key: str, data: bytes) -> None:
        """Add a small chunk."""
        self.record.chunks[key] = checksums.of_blocks(data)
        self.nbytes += len(data)

    def add_shard(self, prefix: str, info: ArrayInfo, shard: Shard, *, may_change: bool = False) -> None:
        """Add the chunks of a shard; those that change between `start` and `finish` get no checksums."""
        chunks = self._changing if may_change else self._pending
        for cell, box in array_boxes.cells(shard.index, info.chunks):
            box = array_boxes.overlap(box, array_boxes.full_box(info.shape))
            if array_boxes.overlap(box, shard.index) == box:  # else other shards hold the rest
                data = shard.data[array_boxes.relative_to(box, shard.index)]
                chunks.append(_Chunk(prefix + info.chunk_key(cell), data, info.chunks))
                self.nbytes += math.prod(info.chunks) * data.itemsize

    def start(self) -> None:
        """Start to compute the checksums of the large chunks so far, on other threads, before they are written."""
        self._started, self._changing = self._changing, []
        self._before = _sums(self._started)
        pending, self._pending = self._pending, []
        if pending:
            self._computed = Once(_sums, pending)
            start_thread(self._computed.run, "flax-ckpt-sums")

    def written(self) -> None:
        """Recompute checksums of mutable arrays in the background once their bytes are written, while files are synced.

        The last bytes, as many as the index has, may not be in the files yet: it is written with the chunks."""
        if self._started and self._after is None:
            self._after = Once(_sums, self._started)
            start_thread(self._after.run, "flax-ckpt-sums")

    def finish(self) -> None:
        """Wait until those that were started are computed, and drop their memory; call it when they are written."""
        computed, self._computed = self._computed, None
        started, self._started = self._started, []
        again, self._after = self._after or Once(_sums, started), None
        if computed is not None:
            self.record.chunks |= computed.result()
        after, before = again.result(), self._before
        self.record.chunks |= {key: sums for key, sums in after.items() if sums == before[key]}
        if changed := [key for key, sums in after.items() if sums != before[key]]:
            what = "changed while it was saved, so the checkpoint has a mixture of its values, without a checksum"
            _log.warning("The array of the chunk %s %s; let no thread write to it meanwhile", one_line(changed), what)


def _sums(chunks: _Chunks) -> dict[str, bytes]:
    pieces: list[tuple[str, _Chunk | memoryview]] = []
    sums: dict[str, bytes] = {}
    for chunk in chunks:
        if chunk.data.shape != chunk.shape:
            pieces.append((chunk.key, chunk))
            continue
        data = memory.as_bytes(np.ascontiguousarray(chunk.data))
        pieces += [(chunk.key, data[at : at + _PIECE_BYTES]) for at in range(0, len(data), _PIECE_BYTES)]
    found = in_parallel(lambda piece: _of_piece(piece[1]), pieces, _THREADS)
    for (key, _), part in zip(pieces, found, strict=True):
        sums[key] = sums.get(key, b"") + part
    return sums


def _of_piece(piece: _Chunk | memoryview) -> bytes:
    if not isinstance(piece, _Chunk):
        return checksums.of_blocks(piece)
    sums = checksums.BlockSums()
    for part in _padded(piece.data, piece.shape):
        sums.update(part)
    return sums.encoded()


def _padded(data: np.ndarray[Any, Any], shape: array_boxes.Shape) -> Iterator[memoryview]:
    """Yield the bytes of an array with zeros behind it on each axis, as zarr pads it, in C order."""
    if data.shape[1:] == shape[1:]:
        yield memory.as_bytes(np.ascontiguousarray(data))
    else:
        for row in data:
            yield from _padded(row, shape[1:])
    missing = (shape[0] - len(data)) * math.prod(shape[1:]) * data.itemsize
    for start in range(0, missing, len(_ZEROS)):
        yield _ZEROS[: missing - start]


def file_of_database(record: Record, folder: str, path: str) -> dict[str, bytes]:
    """Complete the record of a finished database's chunks with what lies in its folder; return full path → content."""
    data, manifest = os.path.join(folder, DATA_DIRECTORY), os.path.join(folder, MANIFEST)
    record.data_files = frozenset(os.listdir(data) if presence.isdir(data) else ())
    if presence.exists(manifest):
        with open(manifest, "rb") as file:
            record.add_files(path, {manifest: file.read()})
    return {os.path.join(folder, CHECKSUMS): record.encode()}
