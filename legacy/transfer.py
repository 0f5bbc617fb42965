"""Moving bytes from the file into the arrays' own memory."""

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

# Arrays below this are better read together than each on its own.
SMALL = 32 * 2**10
# A gap of unwanted bytes (keys and headers, mostly) that is cheaper to read than to skip.
_GAP = 512
_BLOCK = 256 * 2**10
_BLOCKS_AT_ONCE = 128
_PIECE = 16 * 2**20
# Where one read costs about as much as 1 MiB does, neighbours are read together.
_FAR_GAP = 64 * 2**10
_FAR_RUN = 2 * 2**20
_offset = operator.itemgetter(0)

Small = tuple[int, int, LeafHandle]


class Span(NamedTuple):
    """A stretch of the file and the memory it belongs in."""

    offset: int
    target: memoryview
    handle: LeafHandle


def fetch(source: Source, spans: list[Span]) -> None:
    """Reads every span; large amounts in pieces and on several threads, and small neighbours of far sources together.

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
        queue.clear()  # one failure is enough: the others stop too
        raise


def _runs(source: Source, pieces: list[Span]) -> list[list[Span]]:
    """Puts neighbours together that one read takes, and reads what is in memory already."""
    found: list[list[Span]] = []
    end = 0
    for piece in sorted(pieces, key=_offset):
        length = len(piece.target)
        if source.holds(piece.offset, length):
            _read_span(source, piece)
            continue
        near = found and piece.offset - end <= _FAR_GAP and piece.offset + length - found[-1][0].offset <= _FAR_RUN
        if near:
            found[-1].append(piece)
        else:
            found.append([piece])
        end = max(end, piece.offset + length)
    return found


def _read_run(source: Source, run: list[Span]) -> None:
    """Reads neighbours in file order with one read; what that one lacks is read, or missed, on its own."""
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
    while batch := list(itertools.islice(blocks, 1 if source.is_local else _BLOCKS_AT_ONCE)):
        fetch(source, [span for span, _ in batch])
        with memory.pause_gc():
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
    wanted: list[Any] = [
        (handle.shape, handle.dtype, source[where - first : where - first + handle.nbytes])
        for where, _, handle in leaves
    ]
    for (_, index, _), array in zip(leaves, memory.pack(wanted), strict=True):
        values[index] = array


def arrays(source: Source, handles: Sequence[LeafHandle]) -> dict[int, Any]:
    """Those arrays that lie in one piece in a local file, by their index among the handles.

    Wherever the keys and headers before it happen to end, there an array begins: most are not aligned.
    """
    if not isinstance(source, File) or source.is_closed:
        return {}
    wanted = [index for index, handle in enumerate(handles) if _is_one_piece(handle)]
    views = mapping.map_regions(source.fileno(), [(handles[index].locator, handles[index].nbytes) for index in wanted])
    return {
        index: np.ndarray(handles[index].shape, handles[index].dtype, view)
        for index, view in zip(wanted, views, strict=True)
        if view is not None
    }


def _is_one_piece(handle: LeafHandle) -> bool:
    is_large_array = handle.kind is LeafKind.ARRAY and handle.nbytes >= mapping.MIN_BYTES
    return is_large_array and handle.dtype is not None and type(handle.locator) is int


_ReadHandles = Callable[[Sequence[LeafHandle]], list[Any]]


def read(wanted: Sequence[LeafHandle | ArraySlice], read_handles: _ReadHandles) -> list[Any]:
    """The values of handles and parts, in their order; see `Reader.read`.

    Args:
        read_handles: reads whole leaves.
    """
    if ArraySlice not in set(map(type, wanted)):
        return read_handles(cast(Sequence[LeafHandle], wanted))
    asked = [one if isinstance(one, LeafHandle) else _rows(one) for one in wanted]
    pairs = list(zip(wanted, asked, strict=True))
    cut = {id(one.handle): one.handle for one, rows in pairs if isinstance(one, ArraySlice) and rows is None}
    values = iter(read_handles([*(handle for handle in asked if handle is not None), *cut.values()]))
    found = [None if handle is None else next(values) for handle in asked]
    whole = dict(zip(cut, values, strict=True))
    return [
        one.cut(whole[id(one.handle)]) if isinstance(one, ArraySlice) and rows is None else value
        for (one, rows), value in zip(pairs, found, strict=True)
    ]


def _rows(part: ArraySlice) -> LeafHandle | None:
    """A handle of the part alone, where its bytes lie in one piece."""
    handle, where = part.handle, part.handle.locator
    if isinstance(where, FolderArray):
        return dataclasses.replace(handle, locator=dataclasses.replace(where, index=part.index))
    inner = zip(part.index[1:], handle.shape[1:], strict=True)
    if handle.dtype is None or type(where) is not int or any(side != slice(0, length) for side, length in inner):
        return None
    row = math.prod(handle.shape[1:]) * handle.dtype.itemsize
    rows = part.index[0].stop - part.index[0].start
    return dataclasses.replace(
        handle, shape=(rows, *handle.shape[1:]), nbytes=rows * row, locator=where + part.index[0].start * row
    )
