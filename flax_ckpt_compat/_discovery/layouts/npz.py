"""Read ``.npz`` files, as big_vision and ViT publish them: a zip archive with an ``.npy`` file for each array.

Names with slashes become nested dicts. Arrays of two raw bytes are bfloat16, which numpy writes without its name. An
array of Python objects is refused when it is asked for: to unpickle it would run code.
"""

from __future__ import annotations

import io
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

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
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Node, from_leaves
from flax_ckpt_compat._discovery import foreign
from flax_ckpt_compat._discovery.layouts.layout import ReadOnlyLayout, check_depth, damaged, raise_for_unsupported

SUFFIX, _ARRAY_SUFFIX = ".npz", ".npy"
_PIECE = 16 * 2**20
_BUFFER, _STORE_BUFFER = 64 * 2**10, 8 * 2**20  # each is a request
_LOCAL_HEADER = 30  # bytes before the name, whose length is at 26, and that of what follows it at 28
_HEADERS = 16 * 2**10  # bytes that have both headers of a member
_ENCRYPTED, _UTF_8 = 1, 0x800  # flags
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OverflowError, NotImplementedError)


class NpzReader(Reader):
    """Reader of one file; the locator of an array is its member, and the offset of its bytes if they are plain.

    The first of an unsupported member's is the error for it."""

    format = Format.MSGPACK
    places_on_device, keeps_lists = False, False

    def __init__(self, location: Location):
        """Read the archive's directory, and the header of each array."""
        self.location = location.unlisted()
        self._opened = self.location.open_file()
        with self._naming_damage():
            buffer = _BUFFER if self._opened.is_local else _STORE_BUFFER
            self._one_at_a_time = threading.Lock()
            self._archive = zipfile.ZipFile(io.BufferedReader(_Stream(self._opened), buffer))
            members = self._archive.infolist()
            if len({member.filename for member in members}) < len(members):
                raise ValueError("a name twice")
            leaves = in_parallel(self._leaf, members, in_runs=self._opened.is_local)
        self.tree = _tree(leaves)

    def _leaf(self, member: zipfile.ZipInfo) -> LeafHandle:
        from flax_ckpt_compat._core.dtypes import dtype_from_name, is_storable  # numpy, which look-ups do without
        from flax_ckpt_compat._discovery.layouts import raw_arrays

        name = member.filename.removesuffix(_ARRAY_SUFFIX)
        check_depth(self.location, name.count("/") + 1)
        if name == member.filename or member.flag_bits & _ENCRYPTED:
            return self._refused(name, member, "is no array" if name == member.filename else "is encrypted")
        headers, start = self._headers(member)
        stream = io.BytesIO(headers)
        shape, is_fortran, dtype = raw_arrays.npy_header(stream)
        if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
            dtype = dtype_from_name("bfloat16")
        if dtype.hasobject:
            return self._refused(name, member, "holds Python objects (a pickle), and unpickling runs code")
        if not is_storable(dtype) or not dtype.itemsize:
            return self._refused(name, member, f"is of the dtype {dtype}")
        nbytes, length = raw_arrays.nbytes_of(shape, dtype), stream.tell()
        if length + nbytes != member.file_size:
            raise ValueError(f"{name} has {member.file_size - length} bytes, and needs {nbytes}")
        is_plain = member.compress_type == zipfile.ZIP_STORED and (not is_fortran or len(shape) < 2)
        locator = member, start + length if is_plain else None
        return LeafHandle((name,), LeafKind.ARRAY, shape, dtype, nbytes, name, self, locator)

    def _headers(self, member: zipfile.ZipInfo) -> tuple[bytes, int]:
        """Return the first bytes of a member's content, with numpy's header, and the offset of the content."""
        start = member.header_offset
        found = self._opened.read(start, min(start + _HEADERS, self._opened.size))
        end_of_name = _LOCAL_HEADER + int.from_bytes(found[26:28], "little")
        name = found[_LOCAL_HEADER:end_of_name].decode("utf-8" if member.flag_bits & _UTF_8 else "cp437")
        if found[:4] != b"PK\x03\x04" or name != member.orig_filename:
            raise zipfile.BadZipFile(f"no header of {member.filename!r:.100}")
        begin = end_of_name + int.from_bytes(found[28:30], "little")
        if member.compress_type == zipfile.ZIP_STORED:
            return found[begin : begin + member.file_size], start + begin
        if member.compress_type == zipfile.ZIP_DEFLATED:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(found[begin:], _HEADERS), start + begin
        with self._content(member) as stream:
            return stream.read(_HEADERS), start + begin

    @contextmanager
    def _content(self, member: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
        """Open a member of the archive, which other threads wait for: Python's is not safe for several."""
        with self._one_at_a_time, self._archive.open(member) as stream:
            yield stream

    def _refused(self, name: str, member: zipfile.ZipInfo, what: str) -> LeafHandle:
        """Return a leaf that raises UnsupportedLeafError when it is read."""
        message = f"{self.path}: {name} {what}; save the arrays alone with the program that wrote it"
        error = UnsupportedLeafError(message, path=self.path, leaf=name)
        return LeafHandle((name,), LeafKind.UNSUPPORTED, (), None, member.file_size, name, self, (error, None))

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """See `flax_ckpt_compat._core.backend.Reader.read`."""
        from flax_ckpt_compat._discovery.layouts import raw_arrays

        leaves = list(map(handle_of, handles))
        raise_for_unsupported(leaves)
        offsets = [leaf.locator[1] for leaf in leaves]
        plain = [(self._opened, at, one) for at, one in zip(offsets, handles, strict=True) if at is not None]
        found = iter(raw_arrays.read_all(plain, self.meter))
        return [
            self._decoded(leaf, one) if at is None else next(found)
            for leaf, at, one in zip(leaves, offsets, handles, strict=True)
        ]

    def _decoded(self, leaf: LeafHandle, one: LeafHandle | ArraySlice) -> Any:
        from flax_ckpt_compat._discovery.layouts import raw_arrays

        with self._naming_damage(leaf.name), self._content(leaf.locator[0]) as stream:
            whole = raw_arrays.read_npy(stream, leaf)
        self.meter.add(whole.nbytes, leaf.path)
        return whole if isinstance(one, LeafHandle) else one.cut(whole)

    def boxes(self, handle: LeafHandle, nbytes: int) -> Iterator[tuple[slice, ...]]:
        """Yield the whole of what decodes only as a whole; see `Reader.boxes`."""
        return super().boxes(handle, nbytes) if handle.locator[1] is not None else iter([full_box(handle.shape)])

    def verify_checksums(self, handle: LeafHandle | None = None) -> bool:
        """Check the CRC-32 of the archive's member; see `Reader.verify_checksums`."""
        if handle is not None:
            raise_for_unsupported([handle])
            with self._naming_damage(handle.name, ChecksumError), self._content(handle.locator[0]) as stream:
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
    """One version of a file as a stream that can be searched."""

    def __init__(self, opened: Source):
        self._opened, self._at = opened, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._opened.size}[whence]
        return self._at

    def readinto(self, target: Any) -> int:
        data = self._opened.read(self._at, max(self._at, min(self._at + len(target), self._opened.size)))
        target[: len(data)] = data
        self._at += len(data)
        return len(data)


LAYOUT = ReadOnlyLayout("npz", NpzReader, lambda path, look: look == foreign.ZIP and path.name.endswith(SUFFIX))
