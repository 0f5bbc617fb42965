"""Decode the manifest and the B-tree nodes of an OCDBT database, format version 0 as TensorStore documents it."""

from __future__ import annotations

import dataclasses
import itertools

from .files import ByteRange
from .ocdbt_encoding import Columns, MemoryBudget, UndecodableError, check_crc32c, decompress_zstd
from .ocdbt_keys import INDIRECT, INLINE, check_ascending

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_VERSION = 0
_PLAIN, _ZSTD = 0, 1
_SINGLE, _NUMBERED = 0, 1
_NOWHERE = 2**64 - 1
# Magic, length, version (1 byte), compression (1 byte) and checksum.
_SHORTEST = 18


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRef:
    """A reference to a B-tree node."""

    extent: ByteRange  # its bytes
    base: str  # directory of the paths in the node, with its slash
    prefix: bytes  # common prefix of all keys below it
    height: int  # number of levels below it


@dataclasses.dataclass(frozen=True, slots=True)
class LeafNode:
    """A leaf node of which the table of files and the number of keys are decoded."""

    node: NodeRef
    columns: Columns
    files: FileTable
    count: int


def newest_root(manifest: bytes, base: str, budget: MemoryBudget) -> NodeRef | None:
    """Return the root of the newest version; None where that has no keys."""
    columns = _body(manifest, _MANIFEST_MAGIC, budget)
    columns.take(16)  # the database's own identifier
    kind = columns.varint()
    if kind not in (_SINGLE, _NUMBERED):
        raise ValueError(f"a manifest of kind {_SINGLE} or {_NUMBERED} was expected, found {kind}")
    columns.varints(2)  # sizes of inline values and of nodes, for writers
    columns.byte()  # arity of the tree of versions
    compression = columns.varint()
    if compression == _ZSTD:
        columns.take(4)  # its level
    elif compression != _PLAIN:
        raise ValueError(f"the compression {_PLAIN} or {_ZSTD} was expected in the settings, found {compression}")
    if kind == _NUMBERED:
        raise UndecodableError("its versions are in files of their own")
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
    columns = _body(data, _NODE_MAGIC, budget)
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
    check_crc32c(data)
    version, compression = data[12], data[13]
    if version != _VERSION:
        raise ValueError(f"the format version {_VERSION} was expected, found {version} of a newer TensorStore")
    if compression not in (_PLAIN, _ZSTD):
        raise ValueError(f"the compression {_PLAIN} or {_ZSTD} was expected, found {compression}")
    body = data[14:-4]
    return Columns(decompress_zstd(body) if compression == _ZSTD else body, budget)


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
    keys = check_ascending(columns.names(shared, own))
    if any(length > len(key) for length, key in zip(common, keys, strict=True)):
        raise ValueError("the common beginning of keys was expected to be no longer than the first of them")
    numbers, offsets, lengths = (columns.varints(count) for _ in range(3))
    columns.varints(3 * count)  # statistics
    columns.finish()
    places = zip(numbers, offsets, lengths, strict=True)
    prefixes = [node.prefix + key[:length] for key, length in zip(keys, common, strict=True)]
    return [files.node(*place, prefix, node.height - 1) for place, prefix in zip(places, prefixes, strict=True)]


def entries_of(leaf: LeafNode) -> dict[bytes, bytes | ByteRange]:
    """Return the keys of a leaf node with their values."""
    columns, files, prefix, count = leaf.columns, leaf.files, leaf.node.prefix, leaf.count
    keys = check_ascending(columns.names(*columns.name_lengths(count, len(prefix))))
    lengths, kinds = columns.varints(count), columns.varints(count)
    if not {INLINE, INDIRECT}.issuperset(kinds):
        raise ValueError(f"values of the kinds {INLINE} and {INDIRECT} were expected, found {max(kinds)}")
    indirect = sum(kinds)
    numbers, offsets = columns.varints(indirect), columns.varints(indirect)
    ranges = files.extents(numbers, offsets, list(itertools.compress(lengths, kinds)))
    inline = [0 if kind else length for length, kind in zip(lengths, kinds, strict=True)] if indirect else lengths
    values: list[bytes | ByteRange] = [*columns.slices(inline)]
    columns.finish()
    for number, extent in zip(itertools.compress(itertools.count(), kinds), ranges, strict=False):
        values[number] = extent
    return dict(zip([prefix + key for key in keys] if prefix else keys, values, strict=True))
