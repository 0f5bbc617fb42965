"""Read ranges of files into memory, for both formats: neighbours together, on threads, and with their checksums.

A format plans a `Read` for each range that it wants, with the leaf that it belongs to. `neighbours` groups them into
`Run`s, each of which is one system call or one request, and `read_runs` reads these. Whoever knows checksums of the
bytes is shown all of them, block by block, while they are in the CPU's cache.
"""

from __future__ import annotations

import abc
import bisect
import functools
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.checksums import BLOCK_BYTES
from flax_ckpt_compat._core.local import memory_map
from flax_ckpt_compat._core.local.safe_open import check_end
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Path

# All sizes in bytes. Of a local file: the largest gap to read over (mostly keys and headers), and largest joint read.
_LOCAL_GAP, _LOCAL_RUN = 512, 256 * 2**10
# A request to a store takes about as long as reading 1 MiB, so neighbours are read together with what is between them.
_STORE_GAP = 64 * 2**10
# A large read is planned in pieces of this size, for several threads.
PIECE_BYTES = 16 * 2**20
# Below this, threads cost more than they gain.
_THREADS_FROM_BYTES = 4 * 2**20
# Shorter parts of a joint read are copied: a system call takes at most IOV_MAX pieces of memory.
_DIRECT_FROM = 4 * 2**10


class Source(abc.ABC):
    """One version of a file, read in ranges by several threads.

    Attributes:
        path: its path, for errors.
        gap: how many bytes between two reads are read with them.
        longest: bytes of the largest joint read; a longer one is of one range.
        threads: how many read at once.
    """

    path: str
    gap: int
    longest: int
    threads: int
    is_local = False

    @abc.abstractmethod
    def fill(self, pieces: Iterable[memoryview], offset: int) -> int:
        """Fill pieces of memory with consecutive bytes and return their number; fewer only at the end."""

    def stands_alone(self, read: Read) -> bool:  # noqa: ARG002  (others tell by the read)
        """Return whether a read costs less alone than with its neighbours."""
        return False


class LocalFile(Source):
    """A local file, open as a descriptor."""

    gap, longest, is_local = _LOCAL_GAP, _LOCAL_RUN, True
    # Two more than CPUs: some wait for the disk while others copy.
    threads = min(8, (os.cpu_count() or 1) + 2)

    def __init__(self, path: str, descriptor: int) -> None:
        self.path, self._fd = path, descriptor
        self._closer = weakref.finalize(self, os.close, descriptor)

    @property
    def is_closed(self) -> bool:
        """Return whether the descriptor is closed."""
        return self._fd < 0

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def fill(self, pieces: Iterable[memoryview], offset: int) -> int:
        """Fill memory, see `Source`; raise StorageError if no more is read, though the file still has its size."""
        rest, at = [piece for piece in pieces if piece], offset
        with translated(self.path, "read"):
            while rest:
                count = os.preadv(self._fd, rest, at)
                at += count
                if not count:
                    check_end(self._fd, at)
                    break
                memory.drop_first(rest, count)
        return at - offset

    def stands_alone(self, read: Read) -> bool:
        """Return whether a read has memory of its own, into which the system reads it."""
        return read.target is not None

    def map(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray[Any, Any] | None]:
        """Map ranges (offset and length); see `memory_map.map_regions`."""
        return memory_map.map_regions(self._fd, ranges)

    def close(self) -> None:
        """Close the file."""
        self._closer()
        self._fd = -1


class StoredFile(Source):
    """A file of a store; ``read`` returns its bytes from a start to a stop, or to its end."""

    gap, longest, threads = _STORE_GAP, PIECE_BYTES, 16

    def __init__(self, path: str, read: Callable[[int, int], bytes]) -> None:
        self.path, self._read = path, read

    def answer(self, start: int, stop: int) -> bytes:
        """Return the answer to a request of these bytes."""
        return self._read(start, stop)

    def fill(self, pieces: Iterable[memoryview], offset: int) -> int:
        """Fill memory with the answer to one request; see `Source`."""
        wanted = list(pieces)
        data = memoryview(self.answer(offset, offset + sum(map(len, wanted))))
        at = 0
        for piece in wanted:
            part = data[at : at + len(piece)]
            piece[: len(part)] = part
            at += len(part)
        return at


class Read(NamedTuple):
    """A range of a source to read."""

    source: Source
    offset: int
    nbytes: int
    owner: Path  # leaf that it belongs to
    # Memory for the bytes, or for the first of them; None if they are handed over, for what `content` says.
    target: memoryview | None = None
    content: Any = None
    origin: int = 0  # offset at which blocks with a checksum each begin


class Run(NamedTuple):
    """A range of a source that is read at once, and the reads in it, by their offset."""

    source: Source
    start: int
    stop: int
    reads: Sequence[Read]


class Filled(NamedTuple):
    """Consecutive bytes of a source in memory."""

    starts: Sequence[int]  # offset of each piece in the source
    pieces: Sequence[memoryview]

    def cut(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the parts of a range that are here, each with its offset in the source."""
        starts, pieces = self
        for number in range(max(bisect.bisect_right(starts, start) - 1, 0), len(pieces)):
            first = starts[number]
            if first >= stop:
                return
            at = max(start, first)
            if part := pieces[number][at - first : stop - first]:
                yield at, part


class Sums(Protocol):
    """Checks the bytes of runs against what is known of them."""

    def add(self, run: Run, filled: Filled) -> None:
        """Take bytes of a run in, in its order, on any thread; raise ChecksumError if they are damaged."""


Deliver = Callable[[list[tuple[Read, memoryview]]], object]
# Returns the error for a file that ends before a read; None for one that ends in a run, behind all its reads.
Ended = Callable[[Read | None], Exception]
offset_of = operator.itemgetter(1)


def neighbours(reads: Iterable[Read], longest: int | None = None) -> list[Run]:
    """Group reads into runs, by source and offset; ``longest`` replaces that of the sources."""
    by_source: dict[Source, list[Read]] = {}
    for read in reads:
        by_source.setdefault(read.source, []).append(read)
    return [run for source, some in by_source.items() for run in _grouped(source, some, longest or source.longest)]


def _grouped(source: Source, reads: list[Read], longest: int) -> list[Run]:
    alone: list[Read] = []
    groups: list[list[Read]] = []
    gap, stands_alone = source.gap, source.stands_alone
    first = end = -gap - 1
    for read in sorted(reads, key=offset_of):
        _, offset, nbytes, *_ = read
        if stands_alone(read):  # it does not part its neighbours
            alone.append(read)
            continue
        if offset - end > gap or offset + nbytes - first > longest:
            groups.append([])
            first = offset
        groups[-1].append(read)
        end = max(end, offset + nbytes)
    runs = [Run(source, read.offset, read.offset + read.nbytes, [read]) for read in alone]
    for group in groups:
        runs.append(Run(source, group[0].offset, max([read.offset + read.nbytes for read in group]), group))
    return sorted(runs, key=offset_of)


def read_runs(
    runs: Sequence[Run], deliver: Deliver, ended: Ended, meter: Meter = OFF, sums: Sums | None = None
) -> None:
    """Read runs into the memory of their reads, on several threads.

    ``deliver`` is called for each run with the reads that have no memory, and their bytes. Raise what ``ended`` returns
    if a file is too short."""
    read = functools.partial(_read_run, deliver, ended, meter, sums)
    is_local = bool(runs) and runs[0].source.is_local
    if len(runs) < 2 or (is_local and sum([run.stop - run.start for run in runs]) < _THREADS_FROM_BYTES):
        for run in runs:
            read(run)
    else:
        in_parallel(read, runs, runs[0].source.threads, in_runs=is_local)


def _read_run(deliver: Deliver, ended: Ended, meter: Meter, sums: Sums | None, run: Run) -> None:
    source, reads = run.source, run.reads
    filled, rest = _memory_of(run)
    for part in _steps(run, filled) if sums is not None else (filled,):
        start, count = part.starts[0], source.fill(part.pieces, part.starts[0])
        if count < sum(map(len, part.pieces)):
            raise ended(next((read for read in reads if read.offset + read.nbytes > start + count), None))
        if sums is not None:
            sums.add(run, part)
    if rest:
        _hand_over(rest, filled, deliver)
    if reads and meter.is_on:
        meter.add(sum([read.nbytes for read in reads]), reads[-1].owner)


def _memory_of(run: Run) -> tuple[Filled, Sequence[Read]]:
    """Return memory for the bytes of a run, that of its reads where it can be, and the other reads."""
    _, at, stop, reads = run
    starts: list[int] = []
    pieces: list[memoryview] = []
    rest: list[Read] = []

    def close_gap(end: int) -> None:
        if end > at:
            starts.append(at)
            pieces.append(np.empty(end - at, np.uint8).data)

    for read in reads:
        target = read.target
        if target is None or read.offset < at or (len(target) < _DIRECT_FROM and len(reads) > 1):
            rest.append(read)
            continue
        close_gap(read.offset)
        starts.append(read.offset)
        pieces.append(target)
        at = read.offset + len(target)
    close_gap(stop)
    return Filled(starts or [at], pieces), rest


def _steps(run: Run, filled: Filled) -> Iterator[Filled]:
    """Yield the memory of a run block by block, where it is long and its blocks are those of its one read."""
    if not run.source.is_local or len(run.reads) != 1 or run.stop - run.start <= BLOCK_BYTES:
        yield filled
        return
    origin = run.reads[0].origin
    for start, piece in zip(*filled, strict=True):
        at, stop = start, start + len(piece)
        while at < stop:
            end = min(stop, at + BLOCK_BYTES - (at - origin) % BLOCK_BYTES)
            yield Filled([at], [piece[at - start : end - start]])
            at = end


def _hand_over(reads: Sequence[Read], filled: Filled, deliver: Deliver) -> None:
    """Copy the bytes of reads to their memory, and deliver those of the others."""
    found: list[tuple[Read, memoryview]] = []
    for read in reads:
        parts = [part for _, part in filled.cut(read.offset, read.offset + read.nbytes)]
        data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        if read.target is None:
            found.append((read, data))
        else:
            read.target[:] = data[: len(read.target)]
    if found:
        deliver(found)
