"""Read byte ranges of a msgpack checkpoint into the memory of its leaves."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.tree import show_path

from .read_bytes import File, Source

# All sizes in bytes. Largest gap to read over (mostly keys and headers), and largest joint read.
_GAP = 512
_RUN = 256 * 2**10
# A request to a store takes about as long as reading 1 MiB, so neighbours are read together, as many as make for some
# requests at once.
_STORE_GAP = 64 * 2**10
_STORE_RUNS, _MIN_STORE_RUN, _MAX_STORE_RUN = 12, 2 * 2**20, 8 * 2**20
offset_of = operator.itemgetter(0)


class Span(NamedTuple):
    """A range of the file to read."""

    offset: int  # start of the range
    nbytes: int
    handle: LeafHandle  # leaf that it belongs to
    number: int = -1  # index of a small array in the result
    target: memoryview | None = None  # to read into; None for a small array, which shares memory with its neighbours


def runs_of(source: Source, spans: list[Span]) -> list[list[Span]]:
    """Group neighbours into joint reads."""
    runs: list[list[Span]] = []
    alone: list[list[Span]] = []
    gap, longest = (_GAP, _RUN) if isinstance(source, File) else (_STORE_GAP, _store_run(spans))
    first = end = -gap - 1
    for span in sorted(spans, key=offset_of):
        if span.target is not None if isinstance(source, File) else source.is_cached(span.offset, span.nbytes):
            alone.append([span])  # what is cached between its neighbours does not part them
            continue
        if span.offset - end > gap or span.offset + span.nbytes - first > longest:
            runs.append([])
            first = span.offset
        runs[-1].append(span)
        end = max(end, span.offset + span.nbytes)
    return sorted(runs + alone, key=lambda run: run[0].offset) if isinstance(source, File) else runs + alone


def _store_run(spans: list[Span]) -> int:
    return min(max(sum([span.nbytes for span in spans]) // _STORE_RUNS, _MIN_STORE_RUN), _MAX_STORE_RUN)


def read_run(source: Source, values: list[Any], meter: Meter, run: list[Span]) -> None:
    """Read neighbours with one read; raise CorruptCheckpointError if the file ends early."""
    _read_run(source, values, run)
    if meter.is_on:
        meter.add(sum([span.nbytes for span in run]), run[-1].handle.path)


def _read_run(source: Source, values: list[Any], run: list[Span]) -> None:
    first, target = run[0].offset, run[0].target
    buffer = target if len(run) == 1 else None
    if buffer is None:
        buffer = np.empty(max([span.offset + span.nbytes for span in run]) - first, np.uint8).data
    count = source.read_into(buffer, first)
    if buffer is target and count == len(buffer):
        return
    small = []
    for span in run:
        start, stop = span.offset - first, span.offset - first + span.nbytes
        if stop > count:
            raise truncated(source, span)
        if span.target is None:
            small.append((span.number, span.handle, buffer[start:stop]))
        else:
            span.target[:] = buffer[start:stop]
    pack(small, values)


def pack(small: Sequence[tuple[int, LeafHandle, Any]], values: list[Any]) -> None:
    """Copy the bytes of arrays to aligned parts of new memory."""
    with memory.pause_gc():
        arrays = memory.pack([(handle.shape, cast(Any, handle.dtype), data) for _, handle, data in small])
        for (index, _, _), array in zip(small, arrays, strict=True):
            values[index] = array


def truncated(source: Source, span: Span) -> CorruptCheckpointError:
    """Return the error for a file that ends inside a span."""
    leaf = show_path(span.handle.path)
    message = f"{source.path}: {leaf}: expected {span.handle.nbytes} bytes of data from byte {span.offset}, found the "
    message += "end of the file; it was truncated while it was open; restore another checkpoint"
    return CorruptCheckpointError(message, path=source.path, leaf=leaf)
