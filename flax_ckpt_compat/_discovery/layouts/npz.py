"""Read ``.npz`` files, as big_vision and ViT publish them: a zip archive with an ``.npy`` file for each array.

Names with slashes become nested dicts. Arrays of two raw bytes are bfloat16, which numpy writes without its name. What
holds Python objects is refused: to unpickle it would run code.
"""

from __future__ import annotations

import bisect
import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from flax_ckpt_compat._core.array_boxes import full_box
from flax_ckpt_compat._core.backend import ArraySlice, Format, LeafHandle, LeafKind, Reader, handle_of
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    ChecksumError,
    CorruptCheckpointError,
    NameCollisionError,
    UnsupportedLeafError,
)
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage import Source
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.tree import Node, from_leaves
from flax_ckpt_compat._discovery import foreign
from flax_ckpt_compat._discovery.layouts.layout import ReadOnlyLayout, check_depth, damaged

SUFFIX, _ARRAY_SUFFIX = ".npz", ".npy"
_PIECE = 16 * 2**20
_BUFFER, _STORE_BUFFER = 64 * 2**10, 8 * 2**20  # each is a request
_LOCAL_HEADER = 30  # bytes before the name, whose length is at 26, and that of what follows it at 28
_DIRECTORY = 64 * 2**10  # bytes at the end that have the archive's directory, but for thousands of arrays
_HEADERS = 512  # bytes behind the name that have both headers, but for the longest shapes
_ENCRYPTED = 1
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OverflowError, NotImplementedError)


class NpzReader(Reader):
    """Reader of one file; the locator of an array is its member, and the offset of its bytes if they are plain."""

    format = Format.MSGPACK
    places_on_device, keeps_lists = False, False

    def __init__(self, location: Location):
        """Read the archive's directory, and the header of each array."""
        self.location = location.unlisted()
        self._opened = self.location.open_file()
        self._stream = _Stream(self._opened)
        with self._naming_damage():
            if not self._opened.is_local:
                self._stream.prefetch([(max(self._opened.size - _DIRECTORY, 0), self._opened.size)])
            buffer = _BUFFER if self._opened.is_local else _STORE_BUFFER
            self._archive = zipfile.ZipFile(io.BufferedReader(self._stream, buffer))
            members = {member.filename: member for member in self._archive.infolist()}
            if len(members) < len(self._archive.infolist()):
                raise ValueError("a name twice")
            if not self._opened.is_local:
                self._stream.prefetch(
                    (one.header_offset, one.header_offset + _LOCAL_HEADER + len(one.orig_filename.encode()) + _HEADERS)
                    for one in members.values()
                )
            leaves = [self._leaf(member) for member in members.values()]
        self.tree = _tree(leaves)

    def _leaf(self, member: zipfile.ZipInfo) -> LeafHandle:
        from flax_ckpt_compat._discovery.layouts import raw_arrays  # numpy, which look-ups do without

        name = member.filename.removesuffix(_ARRAY_SUFFIX)
        if name == member.filename or member.flag_bits & _ENCRYPTED:
            raise self._unsupported(name, "is no array" if name == member.filename else "is encrypted")
        check_depth(self.location, name.count("/") + 1)
        with self._archive.open(member) as stream:
            shape, is_fortran, found = raw_arrays.npy_header(stream)
            length = stream.tell()
        dtype = self._dtype(name, found)
        nbytes = raw_arrays.nbytes_of(shape, dtype)
        if length + nbytes != member.file_size:
            raise ValueError(f"{name} has {member.file_size - length} bytes, and needs {nbytes}")
        is_plain = member.compress_type == zipfile.ZIP_STORED and (not is_fortran or len(shape) < 2)
        offset = self._data_offset(member) + length if is_plain else None
        return LeafHandle((name,), LeafKind.ARRAY, shape, dtype, nbytes, name, self, (member, offset))

    def _dtype(self, name: str, dtype: Any) -> Any:
        from flax_ckpt_compat._core.dtypes import dtype_from_name, is_storable

        if dtype.hasobject:
            raise self._unsupported(name, "holds Python objects (a pickle), which are not opened: unpickling runs code")
        if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
            return dtype_from_name("bfloat16")
        if not is_storable(dtype) or not dtype.itemsize:
            raise self._unsupported(name, f"is of the dtype {dtype}")
        return dtype

    def _data_offset(self, member: zipfile.ZipInfo) -> int:
        start = member.header_offset
        head = self._stream.bytes_at(start, _LOCAL_HEADER)
        if len(head) < _LOCAL_HEADER:
            raise EOFError("the end of the file")
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        return start + _LOCAL_HEADER + lengths

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """See `flax_ckpt_compat._core.backend.Reader.read`."""
        from flax_ckpt_compat._discovery.layouts import raw_arrays

        leaves = list(map(handle_of, handles))
        offsets = [leaf.locator[1] for leaf in leaves]
        plain = [(self._opened, at, one) for at, one in zip(offsets, handles, strict=True) if at is not None]
        found = iter(raw_arrays.read_all(plain, self.meter))
        return [
            self._decoded(leaf, one) if at is None else next(found)
            for leaf, at, one in zip(leaves, offsets, handles, strict=True)
        ]

    def _decoded(self, leaf: LeafHandle, one: LeafHandle | ArraySlice) -> Any:
        from flax_ckpt_compat._discovery.layouts import raw_arrays

        with self._naming_damage(leaf.name), self._archive.open(leaf.locator[0]) as stream:
            whole = raw_arrays.read_npy(stream, leaf)
        self.meter.add(whole.nbytes, leaf.path)
        return whole if isinstance(one, LeafHandle) else one.cut(whole)

    def boxes(self, handle: LeafHandle, nbytes: int) -> Iterator[tuple[slice, ...]]:
        """Yield the whole of what decodes only as a whole; see `Reader.boxes`."""
        return super().boxes(handle, nbytes) if handle.locator[1] is not None else iter([full_box(handle.shape)])

    def verify_checksums(self, handle: LeafHandle | None = None) -> bool:
        """Check the CRC-32 of the archive's member; see `Reader.verify_checksums`."""
        if handle is not None:
            with self._naming_damage(handle.name, ChecksumError), self._archive.open(handle.locator[0]) as stream:
                while stream.read(_PIECE):
                    pass
        return True

    def close(self) -> None:
        """Close the archive."""
        self._archive.close()
        self._opened.close()

    @contextmanager
    def _naming_damage(
        self, leaf: str | None = None, error: type[CorruptCheckpointError] = CorruptCheckpointError
    ) -> Iterator[None]:
        try:
            with translated(self.path):
                yield
        except _DAMAGE as cause:
            if isinstance(cause, CheckpointError):
                raise
            raise damaged(self.location, f"{leaf or 'it'} does not decode ({cause!r:.200})", leaf, error) from cause

    def _unsupported(self, name: str, what: str) -> UnsupportedLeafError:
        return UnsupportedLeafError(
            f"{self.path}: {name} {what}; save the arrays alone with the program that wrote it",
            path=self.path,
            leaf=name,
        )


def _tree(leaves: Sequence[LeafHandle]) -> Node:
    """Return the tree that names with slashes spell, or a flat one if they are no key paths."""
    for separator in ("/", None):
        for leaf in leaves:
            leaf.path = tuple(leaf.name.split(separator)) if separator else (leaf.name,)
        if all("" not in leaf.path for leaf in leaves):
            with suppress(NameCollisionError):
                return from_leaves({leaf.path: leaf for leaf in leaves})
    return from_leaves({leaf.path: leaf for leaf in leaves})


class _Stream(io.RawIOBase):
    """One version of a file as a stream that can be searched, parts of which may be in memory."""

    def __init__(self, opened: Source):
        self._opened, self._at = opened, 0
        self._starts: list[int] = []
        self._parts: dict[int, bytes] = {}  # by the offset of each, in order

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._opened.size}[whence]
        return self._at

    def readinto(self, target: Any) -> int:
        data = self.bytes_at(self._at, len(target))
        target[: len(data)] = data
        self._at += len(data)
        return len(data)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read these parts, neighbours together and several at once."""
        from flax_ckpt_compat._core.byte_reads import Read, neighbours, read_runs  # numpy, as above

        reads = [
            Read(self._opened, start, min(stop, self._opened.size) - start, (), content=start)
            for start, stop in ranges
            if 0 <= start < self._opened.size
        ]

        def keep(found: list[tuple[Read, memoryview]]) -> None:
            self._parts.update({read.content: bytes(data) for read, data in found})

        read_runs(neighbours(reads), keep, lambda _: EOFError("the end of the file"))
        self._starts = sorted(self._parts)

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Return bytes at an offset; fewer at the end of the file, or of a part that is in memory."""
        number = bisect.bisect_right(self._starts, offset) - 1
        if number >= 0:
            start = self._starts[number]
            if part := self._parts[start][offset - start : offset - start + length]:
                return part
        return self._opened.read(offset, min(offset + length, self._opened.size))


LAYOUT = ReadOnlyLayout("npz", NpzReader, lambda path, look: look == foreign.ZIP and path.name.endswith(SUFFIX))
