"""Read ``.npz`` files, as big_vision and ViT publish them: a zip archive with an ``.npy`` file for each array.

Names with slashes become nested dicts. Arrays of two raw bytes are bfloat16, which numpy writes without its name. An
array of Python objects is refused when it is asked for: to unpickle it would run code.
"""

from __future__ import annotations

import io
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from flax_ckpt_compat._core import errors, memory
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.byte_reads import Source
from flax_ckpt_compat._core.dtypes import dtype_from_name, is_storable
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Node, from_leaves
from flax_ckpt_compat._discovery.layouts.layout import WholeReader, check_depth, damaged, nbytes_of

_SUFFIX = ".npy"
_PIECE, _BUFFER = 16 * 2**20, 64 * 2**10
_ENCRYPTED = 1  # a flag
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_BAD_HEADER = (SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError)
_Kind = type[errors.CorruptCheckpointError]  # of damage
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OverflowError, NotImplementedError)


class NpzReader(WholeReader):
    """Reader of one file, by Python's zipfile; locators are members."""

    def __init__(self, location: Location):
        """Read the archive's directory, and the header of each array."""
        self.location = location.unlisted()
        self._source = self.location.open_file()
        with self._naming_damage():
            self._archive = _Archive(self._source)
            members = self._archive.zipped.infolist()
            if len({member.filename for member in members}) < len(members):
                raise ValueError("a name twice")
            self._at_once = 1 if self._source.is_local else self._source.threads
            self.tree = _tree(in_parallel(self._leaf, members, self._at_once))

    def _leaf(self, member: zipfile.ZipInfo) -> LeafHandle:
        name = member.filename.removesuffix(_SUFFIX)
        check_depth(self.location, name.count("/") + 1)
        if name == member.filename or member.flag_bits & _ENCRYPTED:
            return self._refused(name, member, "is no array" if name == member.filename else "is encrypted")
        try:
            with self._naming_damage(name), self._archive.zipped.open(member) as stream:
                shape, dtype, _ = _header(stream)
                if dtype.hasobject:
                    return self._refused(name, member, "holds Python objects (a pickle), and unpickling runs code")
                if not is_storable(dtype) or not dtype.itemsize:
                    return self._refused(name, member, f"is of the dtype {dtype}")
                length, nbytes = member.file_size - stream.tell(), nbytes_of(shape, dtype)
                if length != nbytes:
                    raise ValueError(f"{length} bytes instead of {nbytes}")
        except errors.CorruptCheckpointError as error:  # the others may be whole
            return LeafHandle((name,), LeafKind.UNSUPPORTED, (), None, member.file_size, name, self, error)
        return LeafHandle((name,), LeafKind.ARRAY, tuple(map(int, shape)), dtype, nbytes, name, self, member)

    def _refused(self, name: str, member: zipfile.ZipInfo, what: str) -> LeafHandle:
        """Return a leaf that raises UnsupportedLeafError when it is read."""
        message = f"{self.path}: {name} {what}; save the arrays alone with the program that wrote it"
        error = errors.UnsupportedLeafError(message, path=self.path, leaf=name)
        return LeafHandle((name,), LeafKind.UNSUPPORTED, (), None, member.file_size, name, self, error)

    def read_whole(self, leaves: Sequence[LeafHandle]) -> list[Any]:
        """See `WholeReader.read_whole`."""
        return in_parallel(self._array, leaves, self._at_once)

    def _array(self, leaf: LeafHandle) -> np.ndarray[Any, Any]:
        assert leaf.dtype is not None
        with self._content(leaf) as stream:
            is_fortran = _header(stream)[2]
            array = memory.empty(leaf.shape[::-1] if is_fortran else leaf.shape, leaf.dtype)
            missing = memory.as_bytes(array)
            while missing:
                if not (count := stream.readinto(missing[:_PIECE])):  # type: ignore[attr-defined]
                    raise EOFError("it ends within the array")
                missing = missing[count:]
        self.meter.add(array.nbytes, leaf.path)
        return array.T.copy() if is_fortran else array

    def verify_checksums(self, handle: LeafHandle | None = None) -> bool:
        """Check the CRC-32 of the archive's member; see `Reader.verify_checksums`."""
        if handle is not None:
            if handle.kind is LeafKind.UNSUPPORTED:
                raise handle.locator
            with self._content(handle, errors.ChecksumError) as stream:
                while stream.read(_PIECE):
                    pass
        return True

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    @contextmanager
    def _content(self, leaf: LeafHandle, error: _Kind = errors.CorruptCheckpointError) -> Iterator[IO[bytes]]:
        """Open the member of an array."""
        if self._source.is_closed:
            raise errors.StorageError(f"{self.path}: the checkpoint was closed; open it again", path=self.path)
        with self._naming_damage(leaf.name, error), self._archive.zipped.open(leaf.locator) as stream:
            yield stream

    @contextmanager
    def _naming_damage(self, leaf: str | None = None, error: _Kind = errors.CorruptCheckpointError) -> Iterator[None]:
        try:
            with translated(self.path):
                yield
        except _DAMAGE as cause:
            if isinstance(cause, errors.CheckpointError):
                raise
            raise damaged(self.location, f"{leaf or 'it'} does not decode ({cause!r:.200})", leaf, error) from cause


class _Archive(threading.local):
    """An archive as one thread reads it, at a position of its own, which no other thread or process moves."""

    def __init__(self, source: Source):
        self.zipped = zipfile.ZipFile(io.BufferedReader(_Stream(source), _BUFFER))


class _Stream(io.RawIOBase):
    """One version of a file as a stream that can be searched."""

    def __init__(self, source: Source):
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        return self._at

    def readinto(self, target: Any) -> int:
        some = memoryview(target)[: max(self._source.size - self._at, 0)]
        count = self._source.fill(some, self._at) if some else 0
        self._at += count
        return count


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Read shape, dtype and whether the order is Fortran's from the beginning of an ``.npy`` file."""
    if (version := npy.read_magic(stream)) not in _HEADERS:
        raise ValueError(f"the version {version} of the .npy format")
    try:
        shape, is_fortran, dtype = _HEADERS[version](stream)
    except _BAD_HEADER as error:
        raise ValueError("a header that does not decode") from error
    is_raw = dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None
    return shape, dtype_from_name("bfloat16") if is_raw else dtype, is_fortran


def _tree(leaves: Sequence[LeafHandle]) -> Node:
    """Return the tree that names with slashes spell, or a flat one if they are no key paths."""
    for leaf in leaves:
        leaf.path = tuple(leaf.name.split("/"))
    if all("" not in leaf.path for leaf in leaves):
        with suppress(errors.NameCollisionError):
            return from_leaves({leaf.path: leaf for leaf in leaves})
    for leaf in leaves:
        leaf.path = (leaf.name,)
    return from_leaves({leaf.path: leaf for leaf in leaves})
