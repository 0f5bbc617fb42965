"""Read bytes of the file into the memory of arrays."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.local import mapping
from flax_ckpt_compat._core.thread_pools import Pool
from flax_ckpt_compat._core.tree import show_path

from .gda_read import FolderArray
from .source import File, Source

# All sizes in bytes. Arrays below this are faster to read together than one by one.
SMALL = 32 * 2**10
# A gap between arrays (mostly keys and headers) that is cheaper to read than to skip.
_GAP = 512
_BLOCK = 256 * 2**10
_BLOCKS_AT_ONCE = 128
_PIECE = 16 * 2**20
# A request to a store takes about as long as reading 1 MiB, so neighbours are read together.
_STORE_GAP = 64 * 2**10
_STORE_RUN = 2 * 2**20
_offset = operator.itemgetter(0)

Small = tuple[int, int, LeafHandle]


class Span(NamedTuple):
    """A range of the file and the memory to read it into."""

    offset: int
    target: memoryview
    handle: LeafHandle


def fetch(source: Source, spans: list[Span]) -> None:
    """Read every span: large ones in pieces on several threads, from a store small neighbours together.

    Raises:
        CorruptCheckpointError: the file ends early; names the leaf.
        OSError: the system refused.
    """
    pieces = list(_pieces(spans))
    if source.is_local and (len(pieces) < 2 or sum(len(piece.target) for piece in pieces) <= 2 * _PIECE):
        for piece in pieces:
            _read_span(source, piece)
        return
    runs = [[piece] for piece in pieces] if source.is_local else _runs(source, pieces)
    workers = min(source.threads, len(runs))
    queue = collections.deque(runs)
    if workers < 2:
        _drain(source, queue)
        return
    with Pool(workers, thread_name_prefix="flax-ckpt-read") as pool:
        futures = [pool.submit(_drain, source, queue) for _ in range(workers)]
        for future in futures:
            future.result()


def _drain(source: Source, queue: collections.deque[list[Span]]) -> None:
    try:
        while queue:
            _read_run(source, queue.popleft())
    except IndexError:
        return  # another thread took the last piece
    except BaseException:
        queue.clear()  # stop the other threads
        raise


def _runs(source: Source, pieces: list[Span]) -> list[list[Span]]:
    """Group neighbours into single reads; copy cached pieces right away."""
    found: list[list[Span]] = []
    end = 0
    for piece in sorted(pieces, key=_offset):
        length = len(piece.target)
        if source.is_cached(piece.offset, length):
            _read_span(source, piece)
            continue
        if found and piece.offset - end <= _STORE_GAP and piece.offset + length - found[-1][0].offset <= _STORE_RUN:
            found[-1].append(piece)
        else:
            found.append([piece])
        end = max(end, piece.offset + length)
    return found


def _read_run(source: Source, run: list[Span]) -> None:
    """Read neighbours in file order with one read; read spans beyond a short read one by one."""
    first = run[0].offset
    if len(run) > 1:
        buffer = np.empty(max(offset + len(target) for offset, target, _ in run) - first, np.uint8).data
        buffer = buffer[: source.read_into(buffer, first)]
    for span in run:
        at = span.offset - first
        if len(run) > 1 and at + len(span.target) <= len(buffer):
            span.target[:] = buffer[at : at + len(span.target)]
        else:
            _read_span(source, span)


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
    message += "; it was truncated while it was open; restore another checkpoint"
    return CorruptCheckpointError(message, path=path, leaf=leaf)


def fetch_small(source: Source, wanted: list[Small], values: list[Any]) -> None:
    """Read small arrays into ``values``, neighbours together.

    Args:
        source: source to read from.
        wanted: offset in the file, index in ``values``, and handle of each array.
        values: list to put the arrays into.
    """
    wanted.sort(key=_offset)
    blocks = _blocks(wanted)
    # One block at a time from a local file, which takes less memory; many requests at once from a store.
    while batch := list(itertools.islice(blocks, 1 if source.is_local else _BLOCKS_AT_ONCE)):
        fetch(source, [span for span, _ in batch])
        with memory.pause_gc():
            for span, leaves in batch:
                _scatter(span.target, leaves, values)


def _blocks(wanted: list[Small]) -> Iterator[tuple[Span, list[Small]]]:
    """Yield ranges of the file, each with new memory, and the arrays in them."""
    start = 0
    while start < len(wanted):
        stop, end = _block(wanted, start)
        leaves = wanted[start:stop]
        first = leaves[0][0]
        yield Span(first, np.empty(end - first, np.uint8).data, leaves[-1][2]), leaves
        start = stop


def _block(wanted: list[Small], start: int) -> tuple[int, int]:
    """Return the stop index of the block that begins at ``start``, and its end in the file."""
    first = end = wanted[start][0]
    for stop in range(start, len(wanted)):
        offset, _, handle = wanted[stop]
        if offset - end > _GAP or offset - first > _BLOCK:
            return stop, end
        end = max(end, offset + handle.nbytes)
    return len(wanted), end


def _scatter(source: memoryview, leaves: list[Small], values: list[Any]) -> None:
    """Copy every leaf to its own aligned part of one new block of memory."""
    first = leaves[0][0]
    wanted: list[Any] = [
        (handle.shape, handle.dtype, source[offset - first : offset - first + handle.nbytes])
        for offset, _, handle in leaves
    ]
    for (_, index, _), array in zip(leaves, memory.pack(wanted), strict=True):
        values[index] = array


def arrays(source: Source, handles: Sequence[LeafHandle]) -> dict[int, Any]:
    """Map the contiguous arrays of a local file; return them by their index among the handles.

    Most are not aligned: an array starts where its header ends.
    """
    if not isinstance(source, File) or source.is_closed:
        return {}
    wanted = [index for index, handle in enumerate(handles) if _is_mappable(handle)]
    views = mapping.map_regions(source.fileno(), [(handles[index].locator, handles[index].nbytes) for index in wanted])
    return {
        index: np.ndarray(handles[index].shape, handles[index].dtype, view)
        for index, view in zip(wanted, views, strict=True)
        if view is not None
    }


def _is_mappable(handle: LeafHandle) -> bool:
    is_large_array = handle.kind is LeafKind.ARRAY and handle.nbytes >= mapping.MIN_BYTES
    return is_large_array and handle.dtype is not None and type(handle.locator) is int


_ReadHandles = Callable[[Sequence[LeafHandle]], list[Any]]


def read(wanted: Sequence[LeafHandle | ArraySlice], read_handles: _ReadHandles) -> list[Any]:
    """Read the values of leaves and slices, in the given order; see `Reader.read`.

    Args:
        wanted: leaves and slices.
        read_handles: function that reads whole leaves.
    """
    if ArraySlice not in set(map(type, wanted)):
        return read_handles(cast(Sequence[LeafHandle], wanted))
    contiguous = [one if isinstance(one, LeafHandle) else _rows(one) for one in wanted]
    pairs = list(zip(wanted, contiguous, strict=True))
    cut = {id(one.handle): one.handle for one, rows in pairs if isinstance(one, ArraySlice) and rows is None}
    values = iter(read_handles([*(handle for handle in contiguous if handle is not None), *cut.values()]))
    found = [None if handle is None else next(values) for handle in contiguous]
    whole = dict(zip(cut, values, strict=True))
    return [
        one.cut(whole[id(one.handle)]) if isinstance(one, ArraySlice) and rows is None else value
        for (one, rows), value in zip(pairs, found, strict=True)
    ]


def _rows(part: ArraySlice) -> LeafHandle | None:
    """Return a handle of the slice alone if its bytes are contiguous, or None."""
    handle, locator = part.handle, part.handle.locator
    if isinstance(locator, FolderArray):
        return dataclasses.replace(handle, locator=dataclasses.replace(locator, index=part.index))
    inner = zip(part.index[1:], handle.shape[1:], strict=True)
    if handle.dtype is None or type(locator) is not int or any(side != slice(0, length) for side, length in inner):
        return None
    row = math.prod(handle.shape[1:]) * handle.dtype.itemsize
    rows = part.index[0].stop - part.index[0].start
    return dataclasses.replace(
        handle, shape=(rows, *handle.shape[1:]), nbytes=rows * row, locator=locator + part.index[0].start * row
    )
