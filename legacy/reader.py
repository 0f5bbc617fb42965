"""Implement the Reader protocol for msgpack checkpoints: read the bytes of leaves into the memory of arrays."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import array_boxes, backend, memory
from flax_ckpt_compat._core.backend import Format, Inspection, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.byte_reads import HEAD_BYTES, Read, Source
from flax_ckpt_compat._core.errors import StorageError, translated
from flax_ckpt_compat._core.local.local_file import MAPPED_FROM, LocalFile
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat._core.tree import KeyData, Node

from . import gda_read
from .checksummed_file import open_checksums, read_unverified
from .find_arrays import Window, open_source, read_parts
from .format import FileRanges
from .parse import parse, parse_stream

_log = logging.getLogger("flax_ckpt_compat")
# All sizes in bytes. Arrays below this share memory, and neighbours among them are read together.
_SMALL = 32 * 2**10
# A smaller file is read whole when it is opened, and held in memory while it is open.
_WHOLE, _WHOLE_OBJECT = 8 * 2**20, 32 * 2**20
_ARRAY = LeafKind.ARRAY  # Python 3.11 takes as long to look it up in its class as for an if


class MsgpackReader(Reader):
    """An open msgpack checkpoint. Replacing a local file does not affect reads; replacing an object is an error.

    Locators are `FileRanges`, `KeyData` of a leaf, a `FolderArray`, the bytes of an array that were read with the
    structure, or a Python value. Arrays below 32 KiB that are read together share blocks of memory of about 256 KiB,
    each in its own aligned part."""

    format = Format.MSGPACK
    places_on_device, keeps_lists = False, True

    def __init__(self, location: Location, *, of_orbax: bool = False, is_stream: bool = False, verify: bool = False):
        self.location = location.unlisted()
        self._source, self._is_closed = open_source(location), False
        self._has_told = of_orbax  # that nothing is verified
        try:
            with translated(self.path, "read"), memory.pause_gc(enabled=self._source.is_local):
                self._verify, self._sums = verify, open_checksums(self._source) if verify else None
                self.tree: Node = self._parsed(of_orbax, is_stream)
        except BaseException:
            self.close()
            raise

    def _parsed(self, of_orbax: bool, is_stream: bool) -> Node:
        source = self._source
        is_whole = source.size <= (_WHOLE if source.is_local else _WHOLE_OBJECT)
        first_bytes = 0 if source.is_local else HEAD_BYTES
        data = read_parts(source, 0, source.size if is_whole else first_bytes)
        if is_whole and self._sums is not None:
            self._sums.verify_data(data)
        window = Window(source, data)
        return parse_stream(window, self) if is_stream else parse(window, self, of_orbax=of_orbax)

    def chunks_of(self, handle: LeafHandle) -> tuple[tuple[int, ...], bool]:
        """See `flax_ckpt_compat._core.backend.Reader.chunks_of`."""
        array = handle.locator
        return (array.chunks, False) if isinstance(array, gda_read.FolderArray) else (handle.shape, True)

    def inspect(self) -> Inspection:
        """See `flax_ckpt_compat._core.backend.Reader.inspect`."""
        locators = [leaf.locator for leaf in backend.handles_of(self)]
        return Inspection(tuple(gda_read.unreferenced(self.location, locators)))

    def close(self) -> None:
        """Close the file; values that were read stay valid."""
        self._is_closed = True
        self._source.close()

    def read(self, handles: Sequence[LeafHandle], *, mapped: bool = False) -> list[Any]:
        """Read only the bytes of these leaves; see `Reader.read`."""
        source = self._source
        if self._is_closed:
            raise StorageError(f"{self.path}: the checkpoint was closed; open it again", path=self.path)
        if self._verify and self._sums is None and source.is_local and not self._has_told:
            self._has_told = True
            why = "as of files of Flax, and of copies without extended attributes"
            _log.info("%s has no checksums, %s: what is read is not verified", printable(self.path), why)
        if any(one.index is not None and type(one.locator) is not gda_read.FolderArray for one in handles):
            return _read_slices(handles, functools.partial(self.read, mapped=mapped))
        values: list[Any] = [None] * len(handles)
        already_mapped = _map(source, handles, values) if mapped else set()
        in_memory: list[tuple[int, LeafHandle, bytes]] = []
        in_folder: list[tuple[int, LeafHandle]] = []
        reads: list[Read] = []
        unfinished: list[int] = []
        for index, handle in enumerate(handles):
            if index in already_mapped:
                continue
            if handle.dtype is None and type(handle.locator) is not FileRanges:
                values[index] = handle.locator  # a Python value
                continue
            if handle.kind is not _ARRAY:
                unfinished.append(index)
                handle = handle.locator.data if handle.kind is LeafKind.PRNG_KEY else handle
            locator = handle.locator
            if type(locator) is bytes and handle.dtype is not None:
                in_memory.append((index, handle, locator))
            elif type(locator) is gda_read.FolderArray:
                in_folder.append((index, handle))
            elif handle.nbytes < _SMALL and handle.dtype is not None and len(locator.ranges) == 1:
                ((offset, nbytes),) = locator.ranges
                reads.append(Read(source, offset, nbytes, handle.path, None, (index, handle)))
            else:
                values[index] = _begin(source, handle, reads)
        _pack(in_memory, values)
        self._read(reads, values)
        arrays = gda_read.read([handle for _, handle in in_folder], self.meter, verify=self._verify)
        for (index, _), array in zip(in_folder, arrays, strict=True):
            values[index] = array
        for index in unfinished:
            values[index] = _finish(handles[index], values[index])
        return values

    def _read(self, reads: list[Read], values: list[Any]) -> None:
        def deliver(found: list[tuple[Read, memoryview]]) -> None:
            _pack([(*read.content, data) for read, data in found], values)

        with translated(self.path, "read"):
            if not self._verify or self._sums is None or self._sums.is_verified:
                return read_unverified(self._source, reads, deliver, self.meter)
            # Numbers and text are read with the structure, which is verified with all arrays, or where there are none.
            whole = sum({read.offset: read.nbytes for read in reads}.values()) >= self._array_nbytes
            return self._sums.read(reads, deliver, self.meter, whole=whole)

    @functools.cached_property
    def _array_nbytes(self) -> int:
        """Return the size of all arrays in the file, in bytes."""
        return sum([one.nbytes for one in backend.handles_of(self) if one.dtype is not None and not one.in_gda_folder])

    def verify_checksums(self, handle: LeafHandle | None = None) -> bool:
        """Verify the blocks of the file that hold a leaf, or all; see `Reader.verify_checksums`."""
        data: Any = handle.locator.data if handle is not None and handle.kind is LeafKind.PRNG_KEY else handle
        locator = None if data is None else data.locator
        if isinstance(locator, gda_read.FolderArray):
            has_checksums = locator.is_sound is not None
            for part in data.parts() if has_checksums else ():
                self.read([part])
            return has_checksums
        with translated(self.path, "read"):
            sums = self._sums = self._sums or open_checksums(self._source)
            # Numbers and small arrays were read with the structure.
            ranges = locator.ranges if type(locator) is FileRanges else [(0, self._source.size)]
            return sums is not None and all(sums.verify(offset, offset + nbytes) for offset, nbytes in ranges)


def _pack(small: Sequence[tuple[int, LeafHandle, Any]], values: list[Any]) -> None:
    """Copy the bytes of arrays to aligned parts of new memory."""
    alike: dict[Any, tuple[list[int], list[Any]]] = {}
    with memory.pause_gc():
        for index, handle, data in small:
            indices, pieces = alike.setdefault((handle.shape, handle.dtype), ([], []))
            indices.append(index)
            pieces.append(data)
        for (shape, dtype), (indices, pieces) in alike.items():
            flat = shape if len(shape) <= memory.MAX_PACKED_RANK else (math.prod(shape),)
            whole = array_boxes.full_box(flat)
            arrays = memory.pack_chunks(pieces, flat, dtype, flat, [(whole, whole)])
            for index, array in zip(indices, arrays, strict=True):
                values[index] = array if flat is shape else array.reshape(shape)


def _map(source: Source, handles: Sequence[LeafHandle], values: list[Any]) -> set[int]:
    """Map the contiguous arrays of a local file into ``values``, and return their indices.

    Most are not aligned: an array starts where its header ends."""
    if not isinstance(source, LocalFile):
        return set()
    wanted: list[int] = []
    for index, handle in enumerate(handles):
        is_large = handle.kind is _ARRAY and handle.nbytes >= MAPPED_FROM
        if is_large and type(handle.locator) is FileRanges and len(handle.locator.ranges) == 1:
            wanted.append(index)
    views = source.map([handles[index].locator.ranges[0] for index in wanted])
    for index, view in zip(wanted, views, strict=True):
        values[index] = None if view is None else np.ndarray(handles[index].shape, handles[index].dtype, view)
    return {index for index in wanted if values[index] is not None}


def _begin(source: Source, handle: LeafHandle, reads: list[Read]) -> np.ndarray[Any, Any]:
    """Allocate the value and add the reads into it."""
    array = memory.empty((handle.nbytes,) if handle.dtype is None else handle.shape, handle.dtype or np.dtype(np.uint8))
    rest = memory.as_bytes(array)
    for offset, nbytes in handle.locator.ranges:
        reads.append(Read(source, offset, nbytes, handle.path, rest[:nbytes], None, offset))
        rest = rest[nbytes:]
    return array


def _finish(handle: LeafHandle, value: Any) -> Any:
    kind = handle.kind
    if kind is LeafKind.NUMPY_SCALAR:
        return value[()]
    if kind is LeafKind.PRNG_KEY:
        return KeyData(handle.locator.impl, value)
    return value.tobytes() if kind is LeafKind.BYTES and type(value) is not bytes else value


def _read_slices(wanted: Sequence[LeafHandle], read_handles: Callable[[Sequence[LeafHandle]], list[Any]]) -> list[Any]:
    """Read leaves and slices; arrays with slices that are not contiguous are read whole, once, and these copied."""
    direct = list(map(_as_whole_leaf, wanted))
    pairs = list(zip(wanted, direct, strict=True))
    whole = dict.fromkeys([one.whole for one, leaf in pairs if one.whole is not None and leaf is None])
    values = iter(read_handles([*[leaf for leaf in direct if leaf is not None], *whole]))
    found = [None if leaf is None else next(values) for leaf in direct]
    arrays: dict[Any, Any] = dict(zip(whole, values, strict=True))
    return [
        one.cut(arrays[one.whole]) if leaf is None else value for (one, leaf), value in zip(pairs, found, strict=True)
    ]


def _as_whole_leaf(part: LeafHandle) -> LeafHandle | None:
    """Return what to read for a part: a leaf of a slice's bytes if they are contiguous, else None; itself if whole."""
    whole, index, locator, shape = part.whole, part.index, part.locator, part.shape
    if whole is None or index is None or isinstance(locator, gda_read.FolderArray):
        return part
    # Bytes are contiguous if it is one element of each leading axis, a range of the next and all of the others.
    ranged = next((axis for axis, length in enumerate(shape) if length != 1), len(shape))
    is_contiguous = shape[ranged + 1 :] == whole.shape[ranged + 1 :]
    if part.dtype is None or not isinstance(locator, FileRanges) or not is_contiguous:
        return None
    start = array_boxes.offset(whole.shape, index) * part.dtype.itemsize
    return dataclasses.replace(part, index=None, whole=None, locator=locator.part(start, part.nbytes))
