"""Read a local file whose checksums are recorded: in units of 1 MiB, each summed by the thread that reads it.

A unit is read by one system call, into the memory of its arrays where it can be, and summed while it is in the CPU's
cache.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from flax_ckpt_compat._core import checksums, memory
from flax_ckpt_compat._core.errors import ChecksumError
from flax_ckpt_compat._core.local import file_checksums
from flax_ckpt_compat._core.local.file_checksums import FileChecksums
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import show_path

from .byte_ranges import Span, offset_of, pack, truncated
from .read_bytes import File, Source

UNIT = checksums.BLOCK_BYTES
# Bytes. Shorter parts are copied: a system call takes at most IOV_MAX pieces of memory.
_DIRECT_FROM = 4 * 2**10
# The rest are headers of the same arrays.
_ALMOST = UNIT // 16 * 15
# Below this, threads cost more than they gain.
_THREADS_FROM_BYTES = 4 * 2**20
# Consecutive units that one thread reads: two threads that touch one new huge page (2 MiB) first both clear it.
_MAX_ROW = 16

Part = tuple[int, int, Span]  # start and stop in the file


def open_checksums(source: Source) -> ChecksummedFile | None:
    """Return the recorded checksums of a file; None if there are none."""
    if not isinstance(source, File):
        return None
    sums = file_checksums.recorded(source.fileno())
    return None if sums is None else ChecksummedFile(source, sums)


class ChecksummedFile:
    """An open file, its recorded checksums, and those of the units that were read."""

    def __init__(self, source: File, sums: FileChecksums) -> None:
        self._source, self._sums = source, sums
        self._units: list[int | None] = [None] * sums.n_units
        self._verified = [False] * len(sums.blocks)

    @property
    def is_verified(self) -> bool:
        """Return whether the whole file was verified."""
        return all(self._verified)

    def verify_data(self, data: bytes) -> None:
        """Verify the whole file, given its bytes."""
        view, units = memoryview(data), range(len(self._units))
        for unit in units:
            self._units[unit] = checksums.crc32(view[unit * UNIT : (unit + 1) * UNIT])
        self._verify(units, {})

    def verify_range(self, start: int, stop: int) -> None:
        """Read and verify the blocks that a range of the file intersects, but for those that were verified."""
        size = UNIT * self._sums.units_per_block
        blocks = range(start // size, min(-(-stop // size), len(self._verified)))
        units = [unit for block in blocks if not self._verified[block] for unit in self._sums.units_of(block)]
        self._read_units({unit: [] for unit in units}, [], set(units), OFF)

    def read(self, spans: Iterable[Span], values: list[Any], meter: Meter, *, whole: bool) -> None:
        """Read spans, and verify the blocks that they fill, or with ``whole`` the whole file.

        Units of which almost all is wanted are read as a whole, and others as far as they are wanted.
        """
        parts = parts_by_unit(spans, values, UNIT)
        if whole:
            parts |= {unit: [] for unit, found in enumerate(self._units) if found is None and unit not in parts}
            summed = set(parts)
        else:
            summed = {unit for unit, found in parts.items() if sum(stop - at for at, stop, _ in found) >= _ALMOST}
        self._read_units(parts, values, summed, meter)

    def _read_units(self, parts: dict[int, list[Part]], values: list[Any], summed: set[int], meter: Meter) -> None:
        units, threads = sorted(parts), self._source.threads
        if len(units) * UNIT < _THREADS_FROM_BYTES:
            self._read_row(parts, values, summed, meter, units)
        else:
            length = max(2, min(_MAX_ROW, len(units) // (2 * threads)))
            rows = [units[at : at + length] for at in range(0, len(units), length)]
            in_parallel(functools.partial(self._read_row, parts, values, summed, meter), rows, threads, in_runs=True)
        self._verify(summed, parts)

    def _read_row(
        self,
        all_parts: dict[int, list[Part]],
        values: list[Any],
        summed: Container[int],
        meter: Meter,
        row: Iterable[int],
    ) -> None:
        for unit in row:
            parts, first, last = all_parts[unit], unit * UNIT, min((unit + 1) * UNIT, self._sums.size)
            if unit not in summed:
                first, last = parts[0][0], max(stop for _, stop, _ in parts)
            pieces, copied, overlapping = _lay_out(parts, first, last)
            self._check_end(self._source.read_pieces(pieces, first), first, last, parts)
            if unit in summed:
                checksum = 0
                for piece in pieces:
                    checksum = checksums.crc32(piece, checksum)
                self._units[unit] = checksum
            for part in overlapping:
                data = np.empty(part[1] - part[0], np.uint8).data
                self._check_end(self._source.read_pieces([data], part[0]), part[0], part[1], [part])
                copied.append((part, data))
            if copied:
                copy_parts(copied, values)
            if parts and meter.is_on:
                meter.add(sum([stop - start for start, stop, _ in parts]), parts[-1][2].handle.path)

    def _check_end(self, count: int, start: int, stop: int, parts: Iterable[Part]) -> None:
        """Raise if fewer bytes than those of a range were read."""
        if count < stop - start:
            span = next((span for _, end, span in parts if end > start + count), None)
            raise self._changed() if span is None else truncated(self._source, span)

    def _verify(self, units: Iterable[int], parts: dict[int, list[Part]]) -> None:
        """Compare the checksums of blocks whose units are all known with the recorded ones."""
        for block in sorted({unit // self._sums.units_per_block for unit in units}):
            found = [self._units[unit] for unit in self._sums.units_of(block)]
            known = [checksums.encode(one) for one in found if one is not None]
            if len(known) == len(found):
                if checksums.total(b"".join(known)) != self._sums.blocks[block]:
                    raise self._damaged(block, parts)
                self._verified[block] = True

    def _damaged(self, block: int, parts: dict[int, list[Part]]) -> ChecksumError:
        path, units = self._source.path, self._sums.units_of(block)
        if file_checksums.recorded(self._source.fileno()) != self._sums:
            return self._changed()
        leaves = dict.fromkeys(show_path(span.handle.path) for unit in units for _, _, span in parts.get(unit, []))
        shown = ", ".join(map(repr, list(leaves)[:4])) + (", …" if len(leaves) > 4 else "")
        stop = min(units.stop * UNIT, self._sums.size)
        return ChecksumError(
            f"{path}: bytes {units.start * UNIT} to {stop} are not what was saved: their checksum differs from the "
            f"recorded one{f', and they hold data of {shown}' if leaves else ''}. Restore the file from a backup, or "
            f"restore an older step. To read it as it is, set checksums='off'",
            path=path,
            leaf=next(iter(leaves)) if len(leaves) == 1 else None,
        )

    def _changed(self) -> ChecksumError:
        path = self._source.path
        return ChecksumError(
            f"{path}: another program has written into the file while it was read; restore it again", path=path
        )


def parts_by_unit(spans: Iterable[Span], values: list[Any], size: int) -> dict[int, list[Part]]:
    """Cut spans where units of this size end; small arrays that are cut, or empty, get memory of their own."""
    parts: dict[int, list[Part]] = {}
    for span in sorted(spans, key=offset_of):
        units = range(span.offset // size, -(-(span.offset + span.nbytes) // size)) if span.nbytes else range(0)
        if len(units) != 1 and span.target is None:
            assert span.handle.dtype is not None
            values[span.number] = memory.empty(span.handle.shape, span.handle.dtype)
            span = span._replace(target=memory.as_bytes(values[span.number]))
        for unit in units:
            start, stop = max(span.offset, unit * size), min(span.offset + span.nbytes, (unit + 1) * size)
            parts.setdefault(unit, []).append((start, stop, span))
    return parts


def _lay_out(
    parts: Iterable[Part], first: int, last: int
) -> tuple[list[memoryview], list[tuple[Part, memoryview]], list[Part]]:
    """Return buffers for a range (array memory, scratch for gaps), parts to copy from scratch, and overlapping ones."""
    pieces: list[memoryview] = []
    copied: list[tuple[Part, memoryview]] = []
    overlapping: list[Part] = []
    waiting: list[Part] = []  # for the memory of the gap that they are in
    at = end = first

    def close_gap(stop: int) -> None:
        if stop == at:
            return
        gap = np.empty(stop - at, np.uint8).data
        pieces.append(gap)
        copied.extend((part, gap[part[0] - at : part[1] - at]) for part in waiting)
        waiting.clear()

    for part in parts:
        start, stop, span = part
        if start < end:
            overlapping.append(part)
            continue
        end = stop
        if span.target is None or stop - start < _DIRECT_FROM:
            waiting.append(part)
            continue
        close_gap(start)
        pieces.append(span.target[start - span.offset : stop - span.offset])
        at = stop
    close_gap(last)
    return pieces, copied, overlapping


def copy_parts(copied: Iterable[tuple[Part, memoryview]], values: list[Any]) -> None:
    """Copy parts of spans to the memory of their leaves."""
    small = []
    for (start, stop, span), data in copied:
        if span.target is None:
            small.append((span.number, span.handle, data))
        else:
            span.target[start - span.offset : stop - span.offset] = data
    pack(small, values)
