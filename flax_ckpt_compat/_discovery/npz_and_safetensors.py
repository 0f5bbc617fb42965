"""Read files of other programs: ``.npz`` archives, and safetensors files, alone or in Hugging Face's shards.

Names with slashes in the one, with dots in the other, become nested dicts. In an archive, as big_vision and ViT publish
them, arrays of two raw bytes are bfloat16, which numpy writes without its name; an array of Python objects is refused
when it is asked for: to unpickle it would run code. What `convert` keeps in the free text (``__metadata__``) of a
safetensors file's JSON header is read back: numbers, text, None, empty containers, and names with dots of their own.
"""

from __future__ import annotations

import abc
import io
import json
import math
import struct
import sys
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from flax_ckpt_compat._core import errors, memory
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, Format, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.byte_reads import Read, Source, neighbours, read_runs
from flax_ckpt_compat._core.dtypes import dtype_from_name, is_storable
from flax_ckpt_compat._core.errors import translated
from flax_ckpt_compat._core.local.presence import stays_inside
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, from_leaves, show_path

# The dtypes of safetensors 0.8, by numpy's names.
DTYPE_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
METADATA, OURS, PATHS = "__metadata__", "flax_ckpt_compat", "flax_ckpt_compat.paths"
_LENGTH = 8  # bytes of the header's length
_MAX_HEADER = 100_000_000  # bytes, of the format's own reader
_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"
_ARRAY = ".npy"
_PIECE, _BUFFER = 16 * 2**20, 64 * 2**10
_ENCRYPTED = 1  # a flag
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_BAD_HEADER = (SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError)
_LZMA = [zipfile.lzma.LZMAError] if zipfile.lzma else []  # type: ignore[attr-defined]  # a Python may lack it
# OSErrors without a number are those of bz2: what cannot be read is a StorageError by then.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, *_LZMA, struct.error, OSError, EOFError, ValueError,
    KeyError, TypeError, AttributeError, OverflowError, NotImplementedError, RecursionError,
)  # fmt: skip


class _WholeReader(Reader):
    """Reader of arrays that are read whole, from which slices are cut."""

    format = Format.MSGPACK  # by whose rules its leaves are restored
    places_on_device, keeps_lists = False, False

    def __init__(self, location: Location):
        self.location = location.unlisted()
        self._sources: list[Source] = []

    @abc.abstractmethod
    def read_whole(self, leaves: Sequence[LeafHandle]) -> list[Any]:
        """Read leaves."""

    def read(self, handles: Sequence[LeafHandle], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """Read leaves, and once those that slices are cut from; see `Reader.read`."""
        keys = [one.whole or number for number, one in enumerate(handles)]
        leaves = {key: one.whole or one for key, one in zip(keys, handles, strict=True)}
        values = dict(zip(leaves, self.read_whole(list(leaves.values())), strict=True))
        return [one.cut(values[key]) for key, one in zip(keys, handles, strict=True)]

    def close(self) -> None:
        """Close the files."""
        for source in self._sources:
            source.close()


class NpzReader(_WholeReader):
    """Reader of one archive, by Python's zipfile; locators are members, or the errors of those that are not read."""

    def __init__(self, location: Location):
        """Read the archive's directory, and the header of each array."""
        super().__init__(location)
        source = self.location.open_file()
        self._sources.append(source)
        with _naming_damage(self.location, "it does not decode"):
            self._archive = _Archive(source)
            members = self._archive.zipped.infolist()
            if len({member.filename for member in members}) < len(members):
                raise ValueError("a name twice")
            self._at_once = 1 if source.is_local else source.threads
            leaves = {leaf.path: leaf for leaf in in_parallel(self._leaf, members, self._at_once)}
            self.tree = _tree(self.location, leaves, "/", is_flat=any("" in path for path in leaves))

    def _leaf(self, member: zipfile.ZipInfo) -> LeafHandle:
        name = member.filename.removesuffix(_ARRAY)
        _check_depth(self.location, name.count("/") + 1)
        if name == member.filename or member.flag_bits & _ENCRYPTED:
            return self._refused(name, member, "is no array" if name == member.filename else "is encrypted")
        try:
            with self._opened(member, name) as stream:
                shape, dtype, _ = _header(stream)
                if dtype.hasobject:
                    return self._refused(name, member, "holds Python objects (a pickle), and unpickling runs code")
                if not is_storable(dtype) or not dtype.itemsize:
                    return self._refused(name, member, f"is of the dtype {dtype}")
                length, nbytes = member.file_size - stream.tell(), _nbytes_of(shape, dtype)
                if length != nbytes:
                    raise ValueError(f"{length} bytes instead of {nbytes}")
        except errors.CorruptCheckpointError as error:  # the others may be whole
            return self._unread(name, member, error)
        path = tuple(name.split("/"))
        return LeafHandle(path, LeafKind.ARRAY, tuple(map(int, shape)), dtype, nbytes, name, self, member)

    def _refused(self, name: str, member: zipfile.ZipInfo, what: str) -> LeafHandle:
        """Return a leaf that raises UnsupportedLeafError when it is read."""
        message = f"{self.path}: {name} {what}; save the arrays alone with the program that wrote it"
        return self._unread(name, member, errors.UnsupportedLeafError(message, path=self.path, leaf=name))

    def _unread(self, name: str, member: zipfile.ZipInfo, error: errors.CheckpointError) -> LeafHandle:
        path = tuple(name.split("/"))
        return LeafHandle(path, LeafKind.UNSUPPORTED, (), None, member.file_size, name, self, error)

    def read_whole(self, leaves: Sequence[LeafHandle]) -> list[Any]:
        """See `_WholeReader.read_whole`."""
        return in_parallel(self._array, leaves, self._at_once)

    def _array(self, leaf: LeafHandle) -> np.ndarray[Any, Any]:
        with self._opened(leaf.locator, leaf.name) as stream:
            assert leaf.dtype is not None
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
            with self._opened(handle.locator, handle.name) as stream:
                while stream.read(_PIECE):
                    pass
        return True

    @contextmanager
    def _opened(self, member: zipfile.ZipInfo | errors.CheckpointError, name: str) -> Iterator[IO[bytes]]:
        """Open the member of an array; raise the error in its place."""
        if isinstance(member, errors.CheckpointError):
            raise member
        _check_open(self._sources[0])
        with (
            _naming_damage(self.location, f"{name} does not decode", name),
            self._archive.zipped.open(member) as stream,
        ):
            yield stream


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
        with translated(self._source.path):
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


class SafetensorsReader(_WholeReader):
    """Reader of a file, or of the index of shards; the locator of an array is its file and the offset of its bytes."""

    def __init__(self, location: Location):
        """Read the headers; raise CorruptCheckpointError if one contradicts its file."""
        super().__init__(location)
        leaves: dict[Path, Any] = {}
        files = _files_of(self.location) if location.name.endswith(_INDEX) else [self.location]
        for file, source, header in in_parallel(self._open, files):
            with _naming_damage(file, "its header does not decode"):
                for path, leaf in self._leaves(file, source, header):
                    if path in leaves:
                        raise _damaged(file, f"{'.'.join(path)} is in another shard, too", show_path(path))
                    leaves[path] = leaf
        self.tree: Node = _tree(self.location, leaves, ".")

    def _open(self, file: Location) -> tuple[Location, Source, bytes]:
        """Return a file, open, and the text of its header."""
        source = file.open_file()
        self._sources.append(source)
        length = int.from_bytes((head := source.read(0, _LENGTH)), "little")
        if len(head) < _LENGTH or length > min(_MAX_HEADER, source.size - _LENGTH):
            raise _damaged(file, f"a header of {length} bytes, in a file of {source.size}")
        with translated(file.path, "read"):
            return file, source, source.read(_LENGTH, _LENGTH + length)

    def _leaves(self, file: Location, source: Source, text: bytes) -> Iterator[tuple[Path, Any]]:
        header = json.loads(text)
        kept = header.pop(METADATA, None) or {}
        paths = {name: _key_path(file, names) for name, names in json.loads(kept.get(PATHS, "{}")).items()}
        for names, value in json.loads(kept.get(OURS, "[]")):
            path = _key_path(file, names)
            yield path, self._value(path, value)
        for name in header.keys() - paths:
            _check_depth(file, name.count(".") + 1)
        data = end = _LENGTH + len(text)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            leaf = self._array(file, source, paths.get(name, tuple(name.split("."))), name, entry, data, end)
            end += leaf.nbytes
            yield leaf.path, leaf
        if end != source.size:
            raise _damaged(file, f"{source.size - end} bytes behind the last tensor")

    def _value(self, path: Path, value: Any) -> Any:
        if isinstance(value, dict):
            return Branch({}, Container(value["empty"]))
        return None if value is None else LeafHandle(path, KIND_OF_TYPE[type(value)], (), None, 0, None, self, value)

    def _array(
        self, file: Location, source: Source, path: Path, name: str, entry: Any, data: int, begin: int
    ) -> LeafHandle:
        """Return a tensor, whose bytes begin where those before it end."""
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        if not isinstance(shape, list) or any(type(one) is not int for one in (*shape, start, stop)):
            raise ValueError(f"the shape {shape!r:.100} of {name}, or offsets, that are no integers")
        known = _DTYPES.get(entry["dtype"])
        dtype = dtype_from_name(known) if known else None
        nbytes = stop - start if dtype is None else _nbytes_of(shape, dtype)
        if stop > source.size - data or stop - start != nbytes or nbytes < 0 or data + start != begin:
            found = f"{start} to {stop} of {source.size - data}, and needs {nbytes} from {begin - data}"
            raise _damaged(file, f"{printable(name, one_line=True)} has bytes {found}", show_path(path))
        if dtype is None:
            unread = (file, entry["dtype"])
            return LeafHandle(path, LeafKind.UNSUPPORTED, tuple(shape), None, nbytes, name, self, unread)
        return LeafHandle(path, LeafKind.ARRAY, tuple(shape), dtype, nbytes, name, self, (source, begin))

    def read_whole(self, leaves: Sequence[LeafHandle]) -> list[Any]:
        """See `_WholeReader.read_whole`."""
        found, reads = list[Any](), list[Read]()
        for leaf in leaves:
            if leaf.kind is LeafKind.UNSUPPORTED:
                (file, dtype), shown = leaf.locator, show_path(leaf.path)
                what = f"{file}: {shown} is of the dtype {dtype!r:.40}, which numpy does not have; cast it elsewhere"
                raise errors.UnsupportedLeafError(what, path=file.path, leaf=shown)
            found.append(leaf.locator)
            if leaf.dtype is not None:
                source, offset = leaf.locator
                _check_open(source)
                found[-1] = array = memory.empty(leaf.shape, leaf.dtype)
                if array.nbytes:
                    reads.append(Read(source, offset, array.nbytes, leaf.path, memory.as_bytes(array)))
        read_runs(neighbours(reads), lambda _: None, self.meter)
        return found


def _files_of(index: Location) -> list[Location]:
    """Return the files that an index of Hugging Face names; raise if one is missing."""
    with _naming_damage(index, f"it is not an index of {_SUFFIX} files"):
        names = sorted(set(json.loads(index.read(0, _MAX_HEADER))["weight_map"].values()))
        bad = [name for name in names if not name.endswith(_SUFFIX) or not stays_inside(name)]
    if bad:
        raise _damaged(index, f"it names {bad[0]!r:.100}, which is not a {_SUFFIX} file beside it")
    files = [index.parent / name for name in names]
    if lost := [file.name for file in files if not file.isfile()]:
        what = f"{index}: {len(lost)} of {len(files)} shards are missing, such as {lost[0]}"
        raise errors.IncompleteCheckpointError(f"{what}; copy them beside it, or download them again", path=index.path)
    return files


def _key_path(file: Location, names: Any) -> Path:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the key path {names!r:.100}, which is no list of text")
    _check_depth(file, len(names))
    return tuple(names)


def _tree(file: Location, leaves: Mapping[Path, Any], separator: str, *, is_flat: bool = False) -> Node:
    """Return the tree of leaves by key path; one of whole names if they are no key paths, such as "a" and "a.b"."""
    if not is_flat:
        with suppress(errors.NameCollisionError):
            return from_leaves(leaves)
    flat: dict[Path, Any] = {(separator.join(path),): leaf for path, leaf in leaves.items()}
    if len(flat) < len(leaves):
        raise _damaged(file, "two of its key paths are one name")
    for path, leaf in flat.items():
        if isinstance(leaf, LeafHandle):
            leaf.path = path
    return from_leaves(flat)


def _check_open(source: Source) -> None:
    if source.is_closed:
        raise errors.StorageError(f"{source.path}: the checkpoint was closed; open it again", path=source.path)


def _damaged(file: Location, what: str, leaf: str | None = None) -> errors.CorruptCheckpointError:
    """Return the error for a file of another program that is damaged; ``what`` says how."""
    message = f"{file}: {what}; restore the file from a backup, or download it again"
    return errors.CorruptCheckpointError(message, path=file.path, leaf=leaf)


@contextmanager
def _naming_damage(file: Location, what: str, leaf: str | None = None) -> Iterator[None]:
    """Raise `_damaged` for what does not decode."""
    with translated(file.path):
        try:
            yield
        except _DAMAGE as cause:
            is_of_system = isinstance(cause, errors.CheckpointError) or getattr(cause, "errno", None)
            if is_of_system or errors.is_of_handler(cause):
                raise
            if isinstance(cause.__context__, errors.StorageError):  # of which zipfile says that it is no archive
                raise cause.__context__ from cause.__context__.__cause__
            raise _damaged(file, f"{what} ({cause!r:.200})", leaf) from cause


def _check_depth(file: Location, levels: int) -> None:
    """Raise DepthError for a key path that no restore can follow, before time is spent on its many names."""
    if levels > sys.getrecursionlimit():
        what = f"{file}: a name of {levels} levels is nested too deeply for Python's recursion limit"
        raise errors.DepthError(f"{what}; raise the limit with sys.setrecursionlimit", path=file.path)


def _nbytes_of(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the bytes of an array; raise ValueError if numpy has none of this shape."""
    np.empty((1,) * len(shape), np.uint8)
    if min(shape, default=0) < 0 or math.prod(side or 1 for side in shape) * dtype.itemsize > sys.maxsize:
        raise ValueError(f"the shape {tuple(shape)!r:.100}")
    return math.prod(shape) * dtype.itemsize
