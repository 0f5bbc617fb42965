"""Decode the manifest and the B-tree nodes of an OCDBT database, format version 0 as TensorStore documents it."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence

import zstandard

from .chunk_codecs import MAX_RATIO, ChunkChecksumError, checked
from .files import ByteRange

MANIFEST_MAGIC, NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
VERSION = 0
PLAIN, ZSTD = 0, 1
SINGLE, _NUMBERED = 0, 1
_NOWHERE = 2**64 - 1
INLINE, INDIRECT = 0, 1  # kinds of values
# Magic, length, version (1 byte), compression (1 byte) and checksum.
_SHORTEST = 18
# Nodes of Orbax's databases hold at most 100 MB; a larger claim is hostile.
MAX_DECODED_BYTES = 1 << 28
_PART_BYTES = 1 << 20
_MAX_NAME = 65535  # OCDBT's limit of keys and paths
# Names share prefixes, and nodes are compressed, so few bytes can encode very many. All may take this much, and so
# much more for each byte of the nodes.
_LEAST_BYTES, _BYTES_RATIO, _BYTES_PER_NAME = 1 << 27, 1 << 11, 100

Entry = tuple[bytes, bytes | ByteRange]
Entries = dict[bytes, bytes | ByteRange]


class NumberedError(Exception):
    """The versions of a database are in numbered manifests."""


class MemoryBudget:
    """Bounds the memory of all names of a database."""

    def __init__(self) -> None:
        self._left = _LEAST_BYTES

    def grow(self, nbytes: int) -> None:
        """Allow for so many more bytes of nodes."""
        self._left += nbytes * _BYTES_RATIO

    def take(self, nbytes: int) -> None:
        """Use memory; raise ValueError if there is too little."""
        self._left -= nbytes
        if self._left < 0:
            raise ValueError("names in proportion to the size of the nodes were expected, found far longer ones")


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRef:
    """A reference to a B-tree node."""

    extent: ByteRange  # its bytes
    base: str  # directory of the paths in the node, with its slash
    prefix: bytes  # common prefix of all keys below it
    height: int  # number of levels below it


class Columns:
    """A sequential reader of columns; its methods raise ValueError if too few bytes are left."""

    def __init__(self, data: bytes, budget: MemoryBudget) -> None:
        self._data, self._budget, self._at = data, budget, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start, left = self._at, len(self._data) - self._at
        if count > left:
            raise ValueError(f"{count} bytes were expected at byte {start}, found {left}")
        self._at += count
        return self._data[start : self._at]

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def varint(self) -> int:
        """Return the next number: 7 bits a byte, lowest first."""
        number = shift = 0
        while True:
            byte = self.byte()
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80 and number < 1 << 64:
                return number
            if shift >= 70:
                raise ValueError(f"a number of 64 bits was expected before byte {self._at}, found a longer one")

    def varints(self, count: int) -> list[int]:
        """Return a column of numbers."""
        if count > len(self._data) - self._at:
            raise ValueError(f"{count} numbers were expected at byte {self._at}, found {len(self._data) - self._at}")
        alike = self._data[self._at : self._at + count]
        if max(alike, default=0) < 0x80:  # of one byte each, as most are
            self._at += count
            return list(alike)
        return [self.varint() for _ in range(count)]

    def name_lengths(self, count: int, prefix: int = 0) -> tuple[list[int], list[int]]:
        """Return two columns for `names`: lengths of the prefix shared with the name before, and of the rest.

        The caller puts a prefix of so many bytes before each."""
        shared, own = [0, *self.varints(count - 1)] if count else [], self.varints(count)
        lengths = list(map(operator.add, shared, own))
        if max(lengths, default=0) > _MAX_NAME:
            raise ValueError(f"names of up to {_MAX_NAME} bytes were expected, found one of {max(lengths)}")
        if any(map(operator.gt, shared[1:], lengths)):
            raise ValueError("a name was expected to share no more bytes than the one before has")
        self._budget.take(count * (_BYTES_PER_NAME + prefix) + sum(lengths))
        return shared, own

    def names(self, shared: Sequence[int], own: Sequence[int]) -> list[bytes]:
        """Return the names of which these are the lengths."""
        names, before, at = list[bytes](), b"", 0
        text = self.take(sum(own))
        for count, more in zip(shared, own, strict=True):
            before = before[:count] + text[at : at + more]
            at += more
            names.append(before)
        return names

    def slices(self, lengths: Sequence[int]) -> list[bytes]:
        """Return the next byte strings, of these lengths."""
        data = self.take(sum(lengths))
        return [data[start:end] for start, end in itertools.pairwise(itertools.accumulate(lengths, initial=0))]

    def finish(self) -> None:
        """Raise ValueError if bytes are left."""
        if self._at != len(self._data):
            raise ValueError(f"the end was expected at byte {self._at}, found {len(self._data) - self._at} more bytes")


def _decompressed(frame: bytes) -> bytes:
    """Decompress exactly one frame of up to `MAX_DECODED_BYTES`; raise ValueError if it is damaged."""
    decompressor = zstandard.ZstdDecompressor()
    try:
        length = zstandard.frame_content_size(frame)
        if length >= 0:
            if length > min(MAX_DECODED_BYTES, len(frame) * MAX_RATIO):
                raise ValueError(f"at most {MAX_DECODED_BYTES} decompressed bytes were expected, found {length}")
            return decompressor.decompress(frame, allow_extra_data=False)
        reader, parts = decompressor.stream_reader(frame), list[bytes]()
        while part := reader.read(_PART_BYTES):  # a frame that was written as a stream does not say its length
            parts.append(part)
            if len(parts) * _PART_BYTES > MAX_DECODED_BYTES:
                raise ValueError(f"at most {MAX_DECODED_BYTES} decompressed bytes were expected, found more")
        return b"".join(parts)
    except zstandard.ZstdError as error:
        raise ValueError(f"a Zstandard frame does not decompress: {error}") from error


def newest_root(manifest: bytes, base: str, budget: MemoryBudget) -> NodeRef | None:
    """Return the root of the newest version; None where that has no keys.

    Raise NumberedError for a manifest that has only the settings of a database."""
    columns = _body(manifest, MANIFEST_MAGIC, budget)
    columns.take(16)  # the database's own identifier
    kind = columns.varint()
    if kind not in (SINGLE, _NUMBERED):
        raise ValueError(f"a manifest of kind {SINGLE} or {_NUMBERED} was expected, found {kind}")
    columns.varints(2)  # sizes of inline values and of nodes, for writers
    columns.byte()  # arity of the tree of versions
    compression = columns.varint()
    if compression == ZSTD:
        columns.take(4)  # its level
    elif compression != PLAIN:
        raise ValueError(f"the compression {PLAIN} or {ZSTD} was expected in the settings, found {compression}")
    if kind == _NUMBERED:
        raise NumberedError
    files = FileTable(columns, base)
    count = columns.varint()
    if not count:
        raise ValueError("at least one version was expected, found none")
    columns.varints(count)  # generation numbers, in ascending order
    height = columns.take(count)[-1]
    file, offset, length = (columns.varints(count)[-1] for _ in range(3))
    return None if offset == length == _NOWHERE else files.node(file, offset, length, b"", height)


def open_node(data: bytes, node: NodeRef, budget: MemoryBudget) -> tuple[Columns, FileTable]:
    """Return the columns of a node, of which height and files are read."""
    columns = _body(data, NODE_MAGIC, budget)
    height = columns.byte()
    if height != node.height:
        raise ValueError(f"a node of height {node.height} was expected, found one of height {height}")
    return columns, FileTable(columns, node.base)


def _body(data: bytes, magic: int, budget: MemoryBudget) -> Columns:
    if len(data) < _SHORTEST:
        raise ValueError(f"at least {_SHORTEST} bytes were expected, found {len(data)}")
    found = int.from_bytes(data[:4], "big")
    if found != magic:
        raise ValueError(f"the magic number {magic:#010x} was expected, found {found:#010x}")
    length = int.from_bytes(data[4:12], "little")
    if length != len(data):
        raise ValueError(f"{length} bytes were expected by its header, found {len(data)}")
    try:
        checked(memoryview(data))
    except ChunkChecksumError as error:
        raise ValueError(f"it {error}") from error
    version, compression = data[12], data[13]
    if version != VERSION:
        raise ValueError(f"the format version {VERSION} was expected, found {version} of a newer TensorStore")
    if compression not in (PLAIN, ZSTD):
        raise ValueError(f"the compression {PLAIN} or {ZSTD} was expected, found {compression}")
    if compression == ZSTD:
        return Columns(_decompressed(data[14:-4]), budget)
    return Columns(data[14:-4], budget)


class FileTable:
    """The file table of a node."""

    def __init__(self, columns: Columns, base: str) -> None:
        count = columns.varint()
        shared, own = columns.name_lengths(count, 2 * len(base))
        bases = columns.varints(count)
        names = columns.names(shared, own)
        if any(length > len(name) for length, name in zip(bases, names, strict=True)):
            raise ValueError("the part of a file's path was expected to be no longer than the path")
        self.names = [base + _text(name) for name in names]
        self._bases = [base + _text(name[:length]) for length, name in zip(bases, names, strict=True)]

    def extents(self, numbers: list[int], offsets: list[int], lengths: list[int]) -> list[ByteRange]:
        """Return the byte ranges of values; each file is given by its number in the table."""
        names = self.names
        if max(numbers, default=-1) >= len(names):
            raise ValueError(f"one of {len(names)} files was expected, found number {max(numbers)}")
        rows = zip(map(names.__getitem__, numbers), offsets, lengths, strict=True)
        # Without Python code for each: a checkpoint of many hosts has millions.
        return list(map(tuple.__new__, itertools.repeat(ByteRange), rows))

    def node(self, file: int, offset: int, length: int, prefix: bytes, height: int) -> NodeRef:
        """Return a reference to a node in a file of the table."""
        (extent,) = self.extents([file], [offset], [length])
        return NodeRef(extent, self._bases[file], prefix, height)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def children_of(columns: Columns, files: FileTable, node: NodeRef) -> list[NodeRef]:
    """Return the nodes below an inner node."""
    count = columns.varint()
    shared, own = columns.name_lengths(count, len(node.prefix))
    common = columns.varints(count)
    keys = _ascending(columns.names(shared, own))
    if any(length > len(key) for length, key in zip(common, keys, strict=True)):
        raise ValueError("the common beginning of keys was expected to be no longer than the first of them")
    numbers, offsets, lengths = (columns.varints(count) for _ in range(3))
    columns.varints(3 * count)  # statistics
    columns.finish()
    places = zip(numbers, offsets, lengths, strict=True)
    prefixes = [node.prefix + key[:length] for key, length in zip(keys, common, strict=True)]
    return [files.node(*place, prefix, node.height - 1) for place, prefix in zip(places, prefixes, strict=True)]


def entries_of(columns: Columns, files: FileTable, prefix: bytes) -> Entries:
    """Return the keys of a leaf node with their values."""
    count = columns.varint()
    keys = _ascending(columns.names(*columns.name_lengths(count, len(prefix))))
    lengths, kinds = columns.varints(count), columns.varints(count)
    if max(kinds, default=0) > INDIRECT:
        raise ValueError(f"values of the kinds {INLINE} and {INDIRECT} were expected, found {max(kinds)}")
    indirect = [row for row, kind in enumerate(kinds) if kind]
    numbers, offsets = columns.varints(len(indirect)), columns.varints(len(indirect))
    ranges = files.extents(numbers, offsets, [lengths[row] for row in indirect])
    for row in indirect:
        lengths[row] = 0
    values: list[bytes | ByteRange] = [*columns.slices(lengths)]
    columns.finish()
    for row, extent in zip(indirect, ranges, strict=True):
        values[row] = extent
    return dict(zip([prefix + key for key in keys] if prefix else keys, values, strict=True))


def _ascending(keys: list[bytes]) -> list[bytes]:
    """Return keys; raise ValueError if they do not ascend."""
    if any(map(operator.ge, keys, keys[1:])):
        raise ValueError("keys in ascending order were expected, found others")
    return keys
