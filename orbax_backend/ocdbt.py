"""Read an OCDBT database: its manifest, then its B-tree, level by level; format version 0, as TensorStore documents it.

We decode it ourselves: TensorStore's own ``ocdbt.dump`` leaks every object that it returns (0.1.86, measured), and its
key-value store does not tell where values lie.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import zstandard

from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import MANIFEST
from flax_ckpt_compat._core.thread_pools import in_parallel

from .chunk_codecs import MAX_RATIO, ChunkChecksumError, checked
from .files import AT_ONCE, ByteRange, CheckpointFiles, corrupt

MANIFEST_MAGIC, NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
VERSION = 0
PLAIN, ZSTD = 0, 1  # kinds of compression
SINGLE = 0  # kind of manifest: with the versions in it
INLINE, INDIRECT = 0, 1  # kinds of values
HEADER_NBYTES = 14  # magic, length, version, compression
_NOWHERE = 2**64 - 1
# Nodes of Orbax's databases hold at most 100 MB; a larger claim is hostile.
_MAX_DECODED_BYTES = 1 << 28
_MAX_INDEX_BYTES, _MOST_PER_BYTE = 1 << 31, 1 << 10  # of names and values, of all nodes together
_NO_FILE_BYTES = 1 << 62  # no file is so long
_MAX_NAME, _BYTES_PER_NAME = 65535, 100  # OCDBT's limit of keys and paths; memory besides its bytes

Entry = tuple[bytes, bytes | ByteRange]
Entries = dict[bytes, bytes | ByteRange]


class NodeRef(NamedTuple):
    """A reference to a B-tree node."""

    extent: ByteRange  # its bytes
    base: str  # directory of the paths in the node, with its slash
    prefix: bytes  # common prefix of all keys below it
    height: int  # number of levels below it


def read_entries(location: Location, base: str = "") -> Entries:
    """Return every key of the newest version of a database, with its value or byte range.

    ``base`` is its directory in the checkpoint's, with its slash."""
    files, found, seen = CheckpointFiles(location), Entries(), set[ByteRange]()
    left = _MAX_INDEX_BYTES  # that names and values may take; each byte of a node allows more
    data = files.read(base + MANIFEST, 0, None)
    with _decoding(location / (base + MANIFEST)):
        level = _newest_root(data, base)
    while level:
        below: list[NodeRef] = []
        for node, data in zip(level, _read_nodes(location, files, level, seen), strict=True):
            with _decoding(location / node.extent.file, node.extent.offset):
                if len(data) != node.extent.length:
                    raise ValueError(f"{node.extent.length} bytes were expected, found {len(data)}")
                left += _MOST_PER_BYTE * len(data)
                if node.height:
                    below += (children := _children_of(data, node))
                    left -= sum([_BYTES_PER_NAME + len(child.prefix) for child in children])
                else:
                    found |= (entries := _entries_of(data, node))
                    left -= sum(map(len, entries)) + sum(map(len, entries.values())) + _BYTES_PER_NAME * len(entries)
                if left < 0:
                    raise ValueError(f"at most {_MAX_INDEX_BYTES} bytes of names and values were expected")
        level = below
    for file in {value.file for value in found.values() if type(value) is ByteRange}:
        files.check(file)
    return found


def _read_nodes(location: Location, files: CheckpointFiles, level: list[NodeRef], seen: set[ByteRange]) -> list[bytes]:
    """Return the bytes of the nodes of a level; raise if one is among those ``seen`` on the way, or too long."""
    for node in level:
        with _decoding(location / node.extent.file, node.extent.offset):
            if node.extent in seen:  # forty levels of shared nodes would make a tree of 2**40 keys
                raise ValueError("one parent of the B-tree node was expected, found two")
            if node.extent.length > _MAX_DECODED_BYTES:
                raise ValueError(f"at most {_MAX_DECODED_BYTES} bytes were expected, found {node.extent.length}")
        seen.add(node.extent)
    places = [(file, start, start + length) for file, start, length in (node.extent for node in level)]
    return in_parallel(lambda place: files.read(*place), places, AT_ONCE if location.is_remote else 1)


@contextlib.contextmanager
def _decoding(file: Location, offset: int = 0) -> Iterator[None]:
    """Name the file, and the place in it, of what does not decode."""
    try:
        yield
    except ValueError as error:
        raise corrupt(file, f"the array database does not decode at byte {offset}: {error}") from error


def _newest_root(manifest: bytes, base: str) -> list[NodeRef]:
    """Return the root of the newest version, none where that has no keys; raise ValueError if it does not decode."""
    columns = _Columns(manifest, MANIFEST_MAGIC)
    columns.take(16)  # the database's own identifier
    kind = columns.varint()
    columns.varints(2)  # sizes of inline values and of nodes, for writers
    columns.take(1)  # arity of the tree of versions
    compression = columns.varint()
    if kind != SINGLE or compression not in (PLAIN, ZSTD):
        raise ValueError(f"its settings are unknown: kind {kind}, compression {compression}")
    columns.take(4 * (compression == ZSTD))  # its level
    names, bases = columns.files(base)
    count = columns.varint()
    if not count:
        raise ValueError("at least one version was expected, found none")
    columns.varints(count)  # generation numbers, in ascending order
    height = columns.take(count)[-1]
    file, offset, length = (columns.varints(count)[-1] for _ in range(3))
    if offset == length == _NOWHERE:
        return []
    return [NodeRef(_ranges(names, [file], [offset], [length])[0], bases[file], b"", height)]


def _children_of(data: bytes, node: NodeRef) -> list[NodeRef]:
    """Return the nodes below an inner node; raise ValueError if it does not decode."""
    columns, (files, bases) = _open(data, node)
    count = columns.varint()
    keys, prefixes = columns.names(count, len(node.prefix), have_beginnings=True)
    numbers, offsets, lengths = (columns.varints(count) for _ in range(3))
    columns.varints(3 * count)  # statistics
    columns.finish(keys)
    extents = _ranges(files, numbers, offsets, lengths)
    return [
        NodeRef(extent, bases[number], node.prefix + prefix, node.height - 1)
        for extent, number, prefix in zip(extents, numbers, prefixes, strict=True)
    ]


def _entries_of(data: bytes, node: NodeRef) -> Entries:
    """Return the keys of a leaf node with their values; raise ValueError if it does not decode."""
    columns, (files, _) = _open(data, node)
    count = columns.varint()
    keys, _ = columns.names(count, len(node.prefix))
    lengths, kinds = columns.varints(count), columns.varints(count)
    if max(kinds, default=0) > INDIRECT:
        raise ValueError(f"values of the kinds {INLINE} and {INDIRECT} were expected, found {max(kinds)}")
    indirect = [row for row, kind in enumerate(kinds) if kind]
    numbers, offsets = columns.varints(len(indirect)), columns.varints(len(indirect))
    ranges = _ranges(files, numbers, offsets, [lengths[row] for row in indirect])
    inline = [0 if kind else length for kind, length in zip(kinds, lengths, strict=True)]
    text = columns.take(sum(inline))
    ends = itertools.pairwise(itertools.accumulate(inline, initial=0))
    values: list[bytes | ByteRange] = [text[start:end] for start, end in ends]
    columns.finish(keys)
    for row, extent in zip(indirect, ranges, strict=True):
        values[row] = extent
    return dict(zip([node.prefix + key for key in keys] if node.prefix else keys, values, strict=True))


def _open(data: bytes, node: NodeRef) -> tuple[_Columns, tuple[list[str], list[str]]]:
    """Return the columns of a node behind its table of files, and that table."""
    columns = _Columns(data, NODE_MAGIC)
    if (height := columns.take(1)[0]) != node.height:
        raise ValueError(f"a node of height {node.height} was expected, found one of height {height}")
    return columns, columns.files(node.base)


def _ranges(files: Sequence[str], numbers: list[int], offsets: list[int], lengths: list[int]) -> list[ByteRange]:
    """Return byte ranges; each file is given by its number in the table."""
    if max(numbers, default=-1) >= len(files):
        raise ValueError(f"one of {len(files)} files was expected, found number {max(numbers)}")
    if max(offsets, default=0) + max(lengths, default=0) >= _NO_FILE_BYTES:
        raise ValueError(f"a place in a file was expected, found the byte {max(offsets)}")
    rows = zip(map(files.__getitem__, numbers), offsets, lengths, strict=True)
    # Without Python code for each: a checkpoint of many hosts has millions.
    return list(map(tuple.__new__, itertools.repeat(ByteRange), rows))


class _Columns:
    """A sequential reader of the columns in a manifest or node; its methods raise ValueError for what cannot be."""

    def __init__(self, data: bytes, magic: int) -> None:
        self._data, self._at = _body(data, magic), 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start, left = self._at, len(self._data) - self._at
        if count > left:
            raise ValueError(f"{count} bytes were expected at byte {start}, found {left}")
        self._at += count
        return self._data[start : self._at]

    def varint(self) -> int:
        """Return the next number: 7 bits a byte, lowest first."""
        number = 0
        for count, byte in enumerate(self._data[self._at : self._at + 10]):
            number |= (byte & 0x7F) << 7 * count
            if byte < 0x80 and number < 1 << 64:
                self._at += count + 1
                return number
        raise ValueError(f"a number of 64 bits was expected at byte {self._at}, found a longer one or the end")

    def varints(self, count: int) -> list[int]:
        """Return a column of numbers."""
        alike = self.take(count)  # of one byte each, as most are
        if max(alike, default=0) < 0x80:
            return list(alike)
        self._at -= count
        return [self.varint() for _ in range(count)]

    def names(self, count: int, prefix: int = 0, *, have_beginnings: bool = False) -> tuple[list[bytes], list[bytes]]:
        """Return names, of which each shares its beginning with the one before, and a beginning of each, if there are.

        The caller puts a prefix of so many bytes before each."""
        shared, own = [0, *self.varints(count - 1)] if count else [], self.varints(count)
        ends = self.varints(count) if have_beginnings else []
        lengths = list(map(operator.add, shared, own))
        if max(lengths, default=0) > _MAX_NAME:
            raise ValueError(f"names of up to {_MAX_NAME} bytes were expected, found one of {max(lengths)}")
        if any(map(operator.gt, shared[1:], lengths)) or any(map(operator.gt, ends, lengths)):
            raise ValueError("a name was expected to share no more bytes than it, and the one before, have")
        # Few bytes can encode very many names, because these share their beginnings.
        if count * (_BYTES_PER_NAME + prefix) + sum(lengths) > _MAX_DECODED_BYTES:
            raise ValueError("names that fit into a node were expected, found far longer ones")
        names, before, at = list[bytes](), b"", 0
        text = self.take(sum(own))
        for n_shared, n_own in zip(shared, own, strict=True):
            before = before[:n_shared] + text[at : at + n_own]
            at += n_own
            names.append(before)
        return names, [name[:end] for name, end in zip(names, ends, strict=False)]

    def files(self, base: str) -> tuple[list[str], list[str]]:
        """Return the paths of the table of files, and what of each is the directory of the paths in nodes there."""
        found = self.names(self.varint(), 2 * len(base), have_beginnings=True)
        paths, folders = ([base + name.decode("utf-8", "surrogateescape") for name in names] for names in found)
        return paths, folders

    def finish(self, keys: list[bytes]) -> None:
        """Raise ValueError if bytes are left, or the keys are not in order."""
        if self._at != len(self._data):
            raise ValueError(f"the end was expected at byte {self._at}, found {len(self._data) - self._at} more bytes")
        if any(map(operator.ge, keys, keys[1:])):
            raise ValueError("keys in ascending order were expected, found others")


def _body(data: bytes, magic: int) -> bytes:
    """Return what a manifest or node holds between its header and its checksum, decompressed."""
    if len(data) < HEADER_NBYTES + 4:
        raise ValueError(f"at least {HEADER_NBYTES + 4} bytes were expected, found {len(data)}")
    found, length = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:12], "little")
    if (found, length) != (magic, len(data)):
        raise ValueError(f"{magic:#010x} and {len(data)} bytes were expected, found {found:#010x} and {length}")
    try:
        body = bytes(checked(memoryview(data))[HEADER_NBYTES:])
    except ChunkChecksumError as error:
        raise ValueError(f"it {error}") from error
    version, compression = data[12:HEADER_NBYTES]
    if version != VERSION or compression not in (PLAIN, ZSTD):
        raise ValueError(
            f"version {VERSION} was expected, found {version} with compression {compression}, of a newer one"
        )
    return _decompressed(body) if compression == ZSTD else body


def _decompressed(frame: bytes) -> bytes:
    """Decompress a frame, of a length that its header may lack."""
    limit = min(_MAX_DECODED_BYTES, len(frame) * MAX_RATIO)
    try:
        data = zstandard.ZstdDecompressor().stream_reader(frame).read(limit + 1)
    except zstandard.ZstdError as error:
        raise ValueError(f"a Zstandard frame does not decompress: {error}") from error
    if len(data) > limit:
        raise ValueError(f"at most {limit} decompressed bytes were expected, found more")
    return data
