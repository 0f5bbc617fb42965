"""Read ranges of files into memory, for both formats: neighbours together, on threads, and with their checksums.

A format plans a `Read` for each range that it wants, with the leaf that it belongs to. `neighbours` groups them into
`Run`s, each of which is one system call or one request, and `read_runs` reads these."""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Path, show_path

# All sizes in bytes. What is read first of a file.
HEAD_BYTES = 64 * 2**10
# A larger read is cut into pieces of this size, for several threads.
PIECE_BYTES = 16 * 2**20
# Of fewer bytes, or smaller reads on average, threads cost more than they gain: Python does not work in two at once.
_THREADS_FROM_BYTES, _THREADS_FROM_AVERAGE = 4 * 2**20, 16 * 2**10
# A read of so many bytes of a local file fills its memory by a system call of its own; shorter ones are copied there.
_DIRECT_FROM = 32 * 2**10


class Source(abc.ABC):
    """One version of a file, read in ranges by several threads; what replaces it meanwhile is never mixed in."""

    path: str  # or URL
    size: int
    # Bytes between two ranges that are read together, which cost less than another read: a request to a store takes as
    # long as 1 MiB. Bytes of the longest read that joins several ranges. Threads that read at once.
    gap, longest, threads = 64 * 2**10, 16 * 2**20, 16
    is_local = is_closed = False
    crc32c: int | None = None  # of this version, where its store reports one

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """Read from ``start`` to ``stop`` or the end; raise StorageError if this version is no longer there."""

    def fill(self, target: memoryview, offset: int) -> int:
        """Fill memory with bytes, and return their number; fewer at the end."""
        data = self.read(offset, offset + len(target))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:  # noqa: B027  (stores inherit it)
        """Close it; of a store nothing is open."""


class Read(NamedTuple):
    """A range of a source to read."""

    source: Source
    offset: int
    nbytes: int
    owner: Path  # leaf that it belongs to
    # Memory for the bytes, or for the first of them; None if they are handed over, for what `content` says.
    target: memoryview | None = None
    content: Any = None
    origin: int = 0  # offset from which the pieces are counted that it may be cut into


class Run(NamedTuple):
    """A range of a source that is read at once, and the reads in it, by their offset."""

    source: Source
    start: int
    stop: int
    reads: Sequence[Read]


Deliver = Callable[[list[tuple[Read, memoryview]]], object]
# Is shown the bytes of each run, fewer if the file ends behind the reads, on any thread; raises ChecksumError if they
# are damaged.
Check = Callable[[Run, memoryview], object]


def cut(read: Read, size: int) -> Iterator[Read]:
    """Yield the parts of a read, which has memory, that end where pieces of this size do."""
    _, start, nbytes, _, target, _, origin = read
    at, stop = start, start + nbytes
    assert target is not None
    while at < stop:
        end = min(stop, at + size - (at - origin) % size)
        yield read._replace(offset=at, nbytes=end - at, target=target[at - start : end - start])
        at = end


def neighbours(reads: Iterable[Read], piece: int = PIECE_BYTES, longest: int | None = None) -> list[Run]:
    """Cut reads into pieces, and group them into runs; ``longest`` replaces that of the sources."""
    by_source: dict[Source, list[Read]] = {}
    for read in reads:
        some = by_source.setdefault(read.source, [])
        if read.target is None or read.nbytes <= piece:
            some.append(read)
        else:
            some.extend(cut(read, piece))
    return [run for source, some in by_source.items() for run in _grouped(source, some, longest or source.longest)]


def _grouped(source: Source, reads: list[Read], longest: int) -> list[Run]:
    # An empty array may lie behind the end of a file, where nothing else is.
    groups, gap = [[read] for read in reads if not read.nbytes], source.gap
    first = end = -gap - 1
    for read in sorted(filter(operator.attrgetter("nbytes"), reads), key=operator.attrgetter("offset")):
        _, offset, nbytes, _, target, *_ = read
        is_direct = source.is_local and nbytes >= _DIRECT_FROM and target is not None and len(target) == nbytes
        if is_direct or offset - end > gap or offset + nbytes - first > longest:
            groups.append([])
            first = offset
        groups[-1].append(read)
        end = -gap - 1 if is_direct else max(end, offset + nbytes)
    runs = [Run(source, some[0].offset, max([read.offset + read.nbytes for read in some]), some) for some in groups]
    return sorted(runs, key=operator.attrgetter("start"))


def ends_early(read: Read) -> CorruptCheckpointError:
    """Return the error for a file that ends before a read does."""
    path, leaf = read.source.path, show_path(read.owner)
    found = f"the leaf {leaf!r} cannot be read: the file ends too early, before byte {read.offset + read.nbytes}"
    message = f"{path}: {found}; restore it from a backup, another checkpoint, or the other leaves only"
    return CorruptCheckpointError(message, path=path, leaf=leaf)


def read_runs(runs: Sequence[Run], deliver: Deliver, meter: Meter = OFF, check: Check | None = None) -> None:
    """Read runs into the memory of their reads, on several threads; ``deliver`` gets the reads that have none."""
    read = functools.partial(_read_run, deliver, meter, check)
    is_local = bool(runs) and runs[0].source.is_local
    nbytes = sum([run.stop - run.start for run in runs]) if is_local else 0
    is_small = nbytes < max(_THREADS_FROM_BYTES, _THREADS_FROM_AVERAGE * sum([len(run.reads) for run in runs]))
    if len(runs) < 2 or (is_local and is_small):
        for run in runs:
            read(run)
    else:
        in_parallel(read, runs, runs[0].source.threads, in_runs=is_local)


def _read_run(deliver: Deliver, meter: Meter, check: Check | None, run: Run) -> None:
    source, start, stop, reads = run
    target = reads[0].target if len(reads) == 1 else None
    if is_direct := target is not None and len(target) == stop - start:
        data = target
    elif source.is_local:
        data = np.empty(stop - start, np.uint8).data
    else:
        data = memoryview(source.read(start, stop))
    if is_direct or source.is_local:
        data = data[: source.fill(data, start)]
    if len(data) < stop - start:
        for read in reads:
            if read.offset + read.nbytes > start + len(data):
                raise ends_early(read)
    if check is not None:
        check(run, data)
    found: list[tuple[Read, memoryview]] = []
    if not is_direct:
        for read in reads:
            part = data[read.offset - start : read.offset - start + read.nbytes]
            if read.target is None:
                found.append((read, part))
            else:
                read.target[:] = part[: len(read.target)]
    if found:
        deliver(found)
    if reads and meter.is_on:
        meter.add(sum([read.nbytes for read in reads]), reads[-1].owner)
