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
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.dtypes import dtype_from_name, is_storable
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    ChecksumError,
    CorruptCheckpointError,
    NameCollisionError,
    StorageError,
    UnsupportedLeafError,
)
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.tree import Node, from_leaves
from flax_ckpt_compat._discovery.layouts.layout import WholeReader, check_depth, damaged, nbytes_of

_SUFFIX = ".npy"
_PIECE = 16 * 2**20
_ENCRYPTED = 1  # a flag
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_BAD_HEADER = (SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError)
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OverflowError, NotImplementedError)


class NpzReader(WholeReader):
    """Reader of one file, by Python's zipfile; in a store, of its bytes in memory. Locators are members."""

    def __init__(self, location: Location):
        """Read the archive's directory, and the header of each array."""
        self.location = location.unlisted()
        self._one_at_a_time = threading.Lock()  # the archive is not safe for several threads
        with self._naming_damage(), ExitStack() as on_failure:
            in_store = io.BytesIO(self.location.read()) if self.location.is_remote else None
            self._file: IO[bytes] = on_failure.enter_context(in_store or open(self.path, "rb"))  # noqa: SIM115
            self._archive = on_failure.enter_context(zipfile.ZipFile(self._file))
            members = self._archive.infolist()
            if len({member.filename for member in members}) < len(members):
                raise ValueError("a name twice")
            self.tree = _tree([self._leaf(member) for member in members])
            on_failure.pop_all()

    def _leaf(self, member: zipfile.ZipInfo) -> LeafHandle:
        name = member.filename.removesuffix(_SUFFIX)
        check_depth(self.location, name.count("/") + 1)
        if name == member.filename or member.flag_bits & _ENCRYPTED:
            return self._refused(name, member, "is no array" if name == member.filename else "is encrypted")
        with self._archive.open(member) as stream:
            if (version := npy.read_magic(stream)) not in _HEADERS:
                raise ValueError(f"the version {version} of the .npy format")
            try:
                shape, _, dtype = _HEADERS[version](stream)
            except _BAD_HEADER as error:
                raise ValueError("a header that does not decode") from error
            length = stream.tell()
        if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
            dtype = dtype_from_name("bfloat16")
        if dtype.hasobject:
            return self._refused(name, member, "holds Python objects (a pickle), and unpickling runs code")
        if not is_storable(dtype) or not dtype.itemsize:
            return self._refused(name, member, f"is of the dtype {dtype}")
        nbytes = nbytes_of(shape, dtype)
        if length + nbytes != member.file_size:
            raise ValueError(f"{name} has {member.file_size - length} bytes, and needs {nbytes}")
        return LeafHandle((name,), LeafKind.ARRAY, tuple(map(int, shape)), dtype, nbytes, name, self, member)

    def _refused(self, name: str, member: zipfile.ZipInfo, what: str) -> LeafHandle:
        """Return a leaf that raises UnsupportedLeafError when it is read."""
        message = f"{self.path}: {name} {what}; save the arrays alone with the program that wrote it"
        error = UnsupportedLeafError(message, path=self.path, leaf=name)
        return LeafHandle((name,), LeafKind.UNSUPPORTED, (), None, member.file_size, name, self, error)

    def read_whole(self, leaves: Sequence[LeafHandle]) -> list[Any]:
        """See `WholeReader.read_whole`."""
        return list(map(self._array, leaves))

    def _array(self, leaf: LeafHandle) -> np.ndarray[Any, Any]:
        assert leaf.dtype is not None
        array = memory.empty(leaf.shape, leaf.dtype)
        with self._content(leaf) as stream:
            array[...] = npy.read_array(stream, allow_pickle=False).view(leaf.dtype)
        self.meter.add(array.nbytes, leaf.path)
        return array

    def verify_checksums(self, handle: LeafHandle | None = None) -> bool:
        """Check the CRC-32 of the archive's member; see `Reader.verify_checksums`."""
        if handle is not None:
            if handle.kind is LeafKind.UNSUPPORTED:
                raise handle.locator
            with self._content(handle, ChecksumError) as stream:
                while stream.read(_PIECE):
                    pass
        return True

    def close(self) -> None:
        """Close the archive."""
        self._archive.close()
        self._file.close()

    @contextmanager
    def _content(
        self, leaf: LeafHandle, error: type[CorruptCheckpointError] = CorruptCheckpointError
    ) -> Iterator[IO[bytes]]:
        """Open the member of an array."""
        with self._naming_damage(leaf.name, error), self._one_at_a_time:
            if self._file.closed:
                raise StorageError(f"{self.path}: the checkpoint was closed; open it again", path=self.path)
            with self._archive.open(leaf.locator) as stream:
                yield stream

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
    for leaf in leaves:
        leaf.path = tuple(leaf.name.split("/"))
    if all("" not in leaf.path for leaf in leaves):
        with suppress(NameCollisionError):
            return from_leaves({leaf.path: leaf for leaf in leaves})
    for leaf in leaves:
        leaf.path = (leaf.name,)
    return from_leaves({leaf.path: leaf for leaf in leaves})
