"""Record the checksums of a save while TensorStore writes the same bytes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from flax_ckpt_compat._core import checksums, grid, memory
from flax_ckpt_compat._core.orbax_layout import CHECKSUMS, DATA_DIRECTORY, MANIFEST
from flax_ckpt_compat._core.thread_pools import Once, in_parallel, start_thread
from flax_ckpt_compat._core.tree import Shard

from .checksum_file import Record
from .zarr import ArrayInfo

_THREADS = min(8, os.cpu_count() or 1)
# A multiple of the block's size; large enough for threads to pay.
_PIECE_BYTES = 16 * checksums.BLOCK_BYTES


class Recorder:
    """Computes the checksums of what one process writes."""

    def __init__(self) -> None:
        self.record = Record()  # the result, whose chunks are complete once `finish` has returned
        self._pending: list[tuple[str, np.ndarray[Any, Any]]] = []
        self._computed: Once | None = None

    def add_bytes(self, key: str, data: bytes) -> None:
        """Add a small chunk."""
        self.record.chunks[key] = checksums.of_blocks(data)

    def add_shard(self, prefix: str, info: ArrayInfo, shard: Shard) -> None:
        """Add the chunks of a shard, whose memory must not change until `finish` has returned."""
        for cell, box in grid.cells(shard.index, info.chunks):
            if grid.overlap(box, shard.index) == box:  # else zarr pads it, or other shards hold the rest
                self._pending.append((prefix + info.chunk_key(cell), shard.data[grid.relative_to(box, shard.index)]))

    def start(self) -> None:
        """Start to compute the checksums of the large chunks so far, on other threads; `finish` comes next."""
        pending, self._pending = self._pending, []
        if pending:
            self._computed = Once(self._compute, pending)
            start_thread(self._computed.run, "flax-ckpt-sums")

    def finish(self) -> None:
        """Wait until those that were started are computed, and drop their memory."""
        computed, self._computed = self._computed, None
        if computed is not None:
            computed.result()

    def _compute(self, pending: list[tuple[str, np.ndarray[Any, Any]]]) -> None:
        pieces, found = [], dict[tuple[str, int], bytes]()
        for key, chunk in pending:
            data = memory.as_bytes(np.ascontiguousarray(chunk))
            pieces += [(key, at, data[at : at + _PIECE_BYTES]) for at in range(0, len(data), _PIECE_BYTES)]

        def add(piece: tuple[str, int, memoryview]) -> None:
            key, at, data = piece
            found[key, at] = checksums.of_blocks(data)

        in_parallel(add, pieces, _THREADS)
        for key, at, _ in pieces:
            self.record.chunks[key] = self.record.chunks.get(key, b"") + found[key, at]


def file_of_database(record: Record, folder: str, path: str) -> dict[str, bytes]:
    """Complete the record of a finished database's chunks with what lies in its folder; return full path → content."""
    data, manifest = os.path.join(folder, DATA_DIRECTORY), os.path.join(folder, MANIFEST)
    record.data_files = frozenset(os.listdir(data) if os.path.isdir(data) else ())
    if os.path.exists(manifest):
        with open(manifest, "rb") as file:
            record.add_files(path, {manifest: file.read()})
    return {os.path.join(folder, CHECKSUMS): record.encode()}
