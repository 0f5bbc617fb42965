"""Implement the Reader protocol for msgpack checkpoints: read the bytes of leaves into the memory of arrays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError, CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.local import mapping
from flax_ckpt_compat._core.thread_pools import Pool
from flax_ckpt_compat._core.tree import KeyData, Node, show_path

from . import gda_read
from .parse import parse
from .source import File, Source, open_source, storage_error
from .unpack import unpack
from .window import Window

# All sizes in bytes. Arrays below this are faster to read together than one by one.
_SMALL = 32 * 2**10
# A gap between arrays (mostly keys and headers) that is cheaper to read than to skip.
_GAP = 512
_BLOCK = 256 * 2**10
_BLOCKS_AT_ONCE = 128
_PIECE = 16 * 2**20
# A request to a store takes about as long as reading 1 MiB, so neighbours are read together.
_STORE_GAP = 64 * 2**10
_STORE_RUN = 2 * 2**20
_offset = operator.itemgetter(0)

# Locator (offset in the file, or bytes), index in the result, and handle.
_Small = tuple[Any, int, LeafHandle]


class _Span(NamedTuple):
    """A range of the file and the memory to read it into."""

    offset: int
    target: memoryview
    handle: LeafHandle


class MsgpackReader:
    """An open msgpack checkpoint. Replacing a local file does not affect reads; replacing an object is an error.

    Locators are the offset of a value in the file, its bytes (see `unpack`), the offset and size of each piece of an
    array, a `FolderArray`, the parts of a PRNG key, or a Python value. Arrays below 32 KiB that are read together
    share blocks of memory of about 256 KiB, each in its own aligned part.
    """

    format = Format.MSGPACK

    def __init__(self, path: str, *, of_orbax: bool = False):
        self.path = path
        self._source = open_source(path)
        try:
            with memory.pause_gc(enabled=self._source.is_local):
                unpacked = None if of_orbax else unpack(self._source, self)
                self.tree: Node = unpacked or parse(Window(self._source), self, of_orbax=of_orbax)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                raise storage_error(path, error) from error
            raise

    def close(self) -> None:
        """Close the file; values that were read stay valid."""
        self._source.close()

    def sharding_of(self, name: str) -> None:  # noqa: ARG002  (the format keeps none)
        """Return None: the format stores no sharding. See `Reader.sharding_of`."""
        return

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:
        """Read only the bytes of these leaves; see `Reader.read`."""
        wanted, source = cast(Sequence[LeafHandle], handles), self._source
        if source.is_closed:
            raise StorageError(f"{self.path}: the checkpoint was closed; open it again", path=self.path)
        if ArraySlice in set(map(type, handles)):
            return _read_slices(handles, functools.partial(self.read, mapped=mapped))
        values: list[Any] = [None] * len(handles)
        is_read = _map(source, wanted, values) if mapped else set()
        small: list[_Small] = []
        spans: list[_Span] = []
        unfinished: list[int] = []
        folders = gda_read.BatchedReads()
        for index, handle in enumerate(wanted):
            kind = type(handle.locator)
            if index in is_read:
                continue
            if handle.nbytes < _SMALL and (kind is int or kind is bytes) and handle.dtype is not None:
                small.append((handle.locator, index, handle))
            else:
                values[index] = _begin(handle, spans, folders)
            if handle.kind is not LeafKind.ARRAY:
                unfinished.append(index)
        try:
            blocks = _blocks(small)
            # One block at a time from a local file, which takes less memory; many requests at once from a store.
            while batch := list(itertools.islice(blocks, 1 if source.is_local else _BLOCKS_AT_ONCE)):
                _fetch(source, [span for span, _ in batch if span is not None])
                for span, leaves in batch:
                    _scatter(span, leaves, values)
            _fetch(source, spans)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise storage_error(self.path, error) from error
        folders.finish()
        for index in unfinished:
            values[index] = _finish(wanted[index], values[index])
        return values


def _map(source: Source, handles: Sequence[LeafHandle], values: list[Any]) -> set[int]:
    """Map the contiguous arrays of a local file into ``values``, and return their indices.

    Most are not aligned: an array starts where its header ends.
    """
    if not isinstance(source, File):
        return set()
    wanted = [index for index, handle in enumerate(handles) if _is_mappable(handle)]
    views = mapping.map_regions(source.fileno(), [(handles[index].locator, handles[index].nbytes) for index in wanted])
    found = {index: view for index, view in zip(wanted, views, strict=True) if view is not None}
    for index, view in found.items():
        values[index] = np.ndarray(handles[index].shape, handles[index].dtype, view)
    return set(found)


def _is_mappable(handle: LeafHandle) -> bool:
    is_large_array = handle.kind is LeafKind.ARRAY and handle.nbytes >= mapping.MIN_BYTES
    return is_large_array and handle.dtype is not None and type(handle.locator) is int


def _begin(handle: LeafHandle, spans: list[_Span], folders: gda_read.BatchedReads) -> Any:
    """Allocate the value and add the spans to read into it; return Python values as they are."""
    locator = handle.locator
    if handle.kind is LeafKind.PRNG_KEY:
        return _begin(locator[1], spans, folders)
    if isinstance(locator, gda_read.FolderArray):
        return folders.begin(locator, handle.path)
    if handle.dtype is None and (handle.kind is not LeafKind.BYTES or type(locator) is bytes):
        return locator
    array = memory.empty((handle.nbytes,) if handle.dtype is None else handle.shape, handle.dtype or np.dtype(np.uint8))
    rest = memory.as_bytes(array)
    if type(locator) is bytes:
        rest[:] = locator
        return array
    for offset, nbytes in locator if isinstance(locator, tuple) else ((locator, handle.nbytes),):
        spans.append(_Span(offset, rest[:nbytes], handle))
        rest = rest[nbytes:]
    return array


def _finish(handle: LeafHandle, value: Any) -> Any:
    kind = handle.kind
    if kind is LeafKind.NUMPY_SCALAR:
        return value[()]
    if kind is LeafKind.PRNG_KEY:
        return KeyData(handle.locator[0], value)
    return value.tobytes() if kind is LeafKind.BYTES and type(value) is not bytes else value


def _fetch(source: Source, spans: list[_Span]) -> None:
    """Fill every span: large ones in pieces on several threads, from a store small neighbours together.

    Raises:
        CorruptCheckpointError: the file ends early; names the leaf.
        OSError: the system refused.
    """
    if source.is_local and sum([len(span.target) for span in spans]) <= 2 * _PIECE:
        for span in spans:
            if source.read_into(span.target, span.offset) < len(span.target):
                raise _truncated(source, span)
        return
    pieces = [
        _Span(offset + start, target[start : start + _PIECE], handle)
        for offset, target, handle in spans
        for start in range(0, len(target), _PIECE)
    ]
    runs = [[piece] for piece in pieces] if source.is_local else _runs(source, pieces)
    if len(runs) > 1:
        with Pool(min(source.threads, len(runs)), thread_name_prefix="flax-ckpt-read") as pool:
            for _ in pool.map(functools.partial(_read_run, source), runs):
                pass
    elif runs:
        _read_run(source, runs[0])


def _runs(source: Source, pieces: list[_Span]) -> list[list[_Span]]:
    """Group neighbours into single reads; copy cached pieces right away."""
    found: list[list[_Span]] = []
    end = 0
    for piece in sorted(pieces, key=_offset):
        length = len(piece.target)
        if source.is_cached(piece.offset, length):
            source.read_into(piece.target, piece.offset)
            continue
        if found and piece.offset - end <= _STORE_GAP and piece.offset + length - found[-1][0].offset <= _STORE_RUN:
            found[-1].append(piece)
        else:
            found.append([piece])
        end = max(end, piece.offset + length)
    return found


def _read_run(source: Source, run: list[_Span]) -> None:
    """Read neighbours in file order with one read."""
    first = run[0].offset
    if len(run) == 1:
        buffer = run[0].target
    else:
        buffer = np.empty(max(offset + len(target) for offset, target, _ in run) - first, np.uint8).data
    count = source.read_into(buffer, first)
    for span in run:
        at, length = span.offset - first, len(span.target)
        if at + length > count:
            raise _truncated(source, span)
        if len(run) > 1:
            span.target[:] = buffer[at : at + length]


def _truncated(source: Source, span: _Span) -> CorruptCheckpointError:
    leaf = show_path(span.handle.path)
    message = f"{source.path}: {leaf}: expected {span.handle.nbytes} bytes of data from byte {span.offset}, found the "
    message += "end of the file; it was truncated while it was open; restore another checkpoint"
    return CorruptCheckpointError(message, path=source.path, leaf=leaf)


def _blocks(small: list[_Small]) -> Iterator[tuple[_Span | None, list[_Small]]]:
    """Yield small arrays with the range of the file that holds them, and new memory; None if they are in memory."""
    if small and type(small[0][0]) is bytes:
        yield None, small
        return
    small.sort(key=_offset)
    start = 0
    while start < len(small):
        first = end = small[start][0]
        stop = start
        while stop < len(small) and small[stop][0] - end <= _GAP and small[stop][0] - first <= _BLOCK:
            end = max(end, small[stop][0] + small[stop][2].nbytes)
            stop += 1
        yield _Span(first, np.empty(end - first, np.uint8).data, small[stop - 1][2]), small[start:stop]
        start = stop


def _scatter(span: _Span | None, leaves: list[_Small], values: list[Any]) -> None:
    """Copy every leaf to an aligned part of new memory."""
    with memory.pause_gc():
        if span is None:
            wanted: list[Any] = [(handle.shape, handle.dtype, data) for data, _, handle in leaves]
        else:
            first, block, _ = span
            wanted = [
                (handle.shape, handle.dtype, block[offset - first : offset - first + handle.nbytes])
                for offset, _, handle in leaves
            ]
        for (_, index, _), array in zip(leaves, memory.pack(wanted), strict=True):
            values[index] = array


def _read_slices(
    wanted: Sequence[LeafHandle | ArraySlice], read_handles: Callable[[Sequence[LeafHandle]], list[Any]]
) -> list[Any]:
    """Read leaves and slices; arrays with slices that are not contiguous are read whole, once."""
    direct = [one if isinstance(one, LeafHandle) else _rows(one) for one in wanted]
    pairs = list(zip(wanted, direct, strict=True))
    cut = {id(one.handle): one.handle for one, rows in pairs if isinstance(one, ArraySlice) and rows is None}
    values = iter(read_handles([*(handle for handle in direct if handle is not None), *cut.values()]))
    found = [None if handle is None else next(values) for handle in direct]
    whole = dict(zip(cut, values, strict=True))
    return [
        one.cut(whole[id(one.handle)]) if isinstance(one, ArraySlice) and rows is None else value
        for (one, rows), value in zip(pairs, found, strict=True)
    ]


def _rows(part: ArraySlice) -> LeafHandle | None:
    """Return a handle of the slice alone if its bytes are contiguous, or None."""
    handle, locator = part.handle, part.handle.locator
    if isinstance(locator, gda_read.FolderArray):
        return dataclasses.replace(handle, locator=dataclasses.replace(locator, index=part.index))
    inner = zip(part.index[1:], handle.shape[1:], strict=True)
    if handle.dtype is None or type(locator) is not int or any(side != slice(0, length) for side, length in inner):
        return None
    row = math.prod(handle.shape[1:]) * handle.dtype.itemsize
    rows = part.index[0].stop - part.index[0].start
    return dataclasses.replace(
        handle, shape=(rows, *handle.shape[1:]), nbytes=rows * row, locator=locator + part.index[0].start * row
    )
