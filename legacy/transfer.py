"""Moving bytes from the file into the arrays' own memory."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.tree import show_path

from .source import Source

# Arrays below this are better read together than each on its own.
SMALL = 32 * 2**10
# A gap of unwanted bytes (keys and headers, mostly) that is cheaper to read than to skip.
_GAP = 512
_BLOCK = 256 * 2**10
_BLOCKS_AT_ONCE = 64
_PIECE = 16 * 2**20
_UINT8 = np.dtype(np.uint8)
_offset = operator.itemgetter(0)

Small = tuple[int, int, LeafHandle]


class Span(NamedTuple):
    """A stretch of the file and the memory it belongs in."""

    offset: int
    target: memoryview
    handle: LeafHandle


def fetch(source: Source, spans: list[Span]) -> None:
    """Reads every span; large amounts in pieces and on several threads.

    Raises:
        CorruptCheckpointError: the file ends early; names the leaf.
        OSError: the system refused.
    """
    pieces = list(_pieces(spans))
    is_little = source.is_near and sum(len(piece.target) for piece in pieces) <= 2 * _PIECE
    if len(pieces) < 2 or is_little:
        for piece in pieces:
            _read_span(source, piece)
        return
    workers = min(source.threads, len(pieces))
    queue = collections.deque(pieces)
    with ThreadPoolExecutor(workers, thread_name_prefix="flax-ckpt-read") as pool:
        futures = [pool.submit(_drain, source, queue) for _ in range(workers)]
        for future in futures:
            future.result()


def _drain(source: Source, queue: collections.deque[Span]) -> None:
    try:
        while queue:
            _read_span(source, queue.popleft())
    except IndexError:
        return  # another thread took the last piece
    except BaseException:
        queue.clear()  # one failure is enough: the others stop too
        raise


def _pieces(spans: list[Span]) -> Iterator[Span]:
    for offset, target, handle in spans:
        for start in range(0, len(target), _PIECE):
            yield Span(offset + start, target[start : start + _PIECE], handle)


def _read_span(source: Source, span: Span) -> None:
    offset, target, handle = span
    while target:
        count = source.read_into(target, offset)
        if not count:
            raise _truncated(source.path, handle, offset)
        offset += count
        target = target[count:]


def _truncated(path: str, handle: LeafHandle, offset: int) -> CorruptCheckpointError:
    leaf = show_path(handle.path)
    message = f"{path}: {leaf}: expected {handle.nbytes} bytes of data, found the end of the file at byte {offset}"
    return CorruptCheckpointError(f"{message}; it was cut since it was opened, restore another", path=path, leaf=leaf)


def fetch_small(source: Source, wanted: list[Small], values: list[Any]) -> None:
    """Reads small arrays, neighbours in one go, and puts them into ``values``.

    Args:
        source: to read from.
        wanted: offset in the file, index in ``values``, and handle of each.
        values: where the arrays go.
    """
    wanted.sort(key=_offset)
    blocks = _blocks(wanted)
    # Of a near source one after the other, which takes less memory; else many requests at once.
    while batch := list(itertools.islice(blocks, 1 if source.is_near else _BLOCKS_AT_ONCE)):
        fetch(source, [span for span, _ in batch])
        for span, leaves in batch:
            _scatter(span.target, leaves, values)


def _blocks(wanted: list[Small]) -> Iterator[tuple[Span, list[Small]]]:
    """Stretches of the file with new memory for each, and the arrays in them."""
    start = 0
    while start < len(wanted):
        stop, end = _block(wanted, start)
        leaves = wanted[start:stop]
        first = leaves[0][0]
        yield Span(first, np.empty(end - first, np.uint8).data, leaves[-1][2]), leaves
        start = stop


def _block(wanted: list[Small], start: int) -> tuple[int, int]:
    """Where the block that begins at ``start`` stops, and its end in the file."""
    first = end = wanted[start][0]
    for stop in range(start, len(wanted)):
        where, _, handle = wanted[stop]
        if where - end > _GAP or where - first > _BLOCK:
            return stop, end
        end = max(end, where + handle.nbytes)
    return len(wanted), end


def _scatter(source: memoryview, leaves: list[Small], values: list[Any]) -> None:
    """Gives every leaf its own aligned part of one new piece of memory."""
    first = leaves[0][0]
    room = sum(handle.nbytes for _, _, handle in leaves) + memory.ALIGNMENT * len(leaves)
    target = memory.empty((room,), _UINT8)
    view = target.data
    at = 0
    for where, index, handle in leaves:
        size = handle.nbytes
        view[at : at + size] = source[where - first : where - first + size]
        values[index] = np.ndarray(handle.shape, handle.dtype, target, at)
        at += size + -size % memory.ALIGNMENT
