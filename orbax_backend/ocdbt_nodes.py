"""Decode the manifest and the B-tree nodes of an OCDBT database, format version 0 as TensorStore documents it.

The keys of leaf nodes come in a dict or, of the millions of many hosts of which a process looks up few, in arrays.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .files import ByteRange
from .ocdbt_encoding import Columns, MemoryBudget, UndecodableError, check_crc32c, decompress_zstd

MANIFEST_MAGIC, NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
VERSION = 0
PLAIN, ZSTD = 0, 1
SINGLE, _NUMBERED = 0, 1
_NOWHERE = 2**64 - 1
INLINE, INDIRECT = 0, 1  # kinds of values
# Magic, length, version (1 byte), compression (1 byte) and checksum.
_SHORTEST = 18
_Keys = TypeVar("_Keys", bound=Any)


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
    check_crc32c(data)
    version, compression = data[12], data[13]
    if version != VERSION:
        raise ValueError(f"the format version {VERSION} was expected, found {version} of a newer TensorStore")
    if compression not in (PLAIN, ZSTD):
        raise ValueError(f"the compression {PLAIN} or {ZSTD} was expected, found {compression}")
    if compression == ZSTD:
        return Columns(decompress_zstd(data[14:-4]), budget)
    return Columns(data, budget, 14, len(data) - 4)


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


def entries_of(leaf: LeafNode) -> dict[bytes, bytes | ByteRange]:
    """Return the keys of a leaf node with their values."""
    columns, files, prefix, count = leaf.columns, leaf.files, leaf.node.prefix, leaf.count
    keys = _ascending(columns.keys_with(count, len(prefix)))
    names: list[bytes] = keys.tolist() if isinstance(keys, np.ndarray) else keys
    lengths, kinds = columns.varints(count), columns.numbers(count)
    if np.any(kinds > INDIRECT):
        raise ValueError(f"values of the kinds {INLINE} and {INDIRECT} were expected, found {int(kinds.max())}")
    indirect = np.flatnonzero(kinds).tolist()
    numbers, offsets = columns.varints(len(indirect)), columns.varints(len(indirect))
    ranges = files.extents(numbers, offsets, [lengths[row] for row in indirect])
    for row in indirect:
        lengths[row] = 0
    values: list[Any] = columns.slices(lengths)
    columns.finish()
    for row, extent in zip(indirect, ranges, strict=True):
        values[row] = extent
    return dict(zip([prefix + name for name in names] if prefix else names, values, strict=True))


def _ascending(keys: _Keys) -> _Keys:
    """Return keys; raise ValueError if they do not ascend."""
    if np.any(keys[1:] <= keys[:-1]) if isinstance(keys, np.ndarray) else any(map(operator.ge, keys, keys[1:])):
        raise ValueError("keys in ascending order were expected, found others")
    return keys


class Rows(NamedTuple):
    """Entries of an index in columns, in any order."""

    keys: Any  # array of bytes, padded with zeros or objects
    lengths: Any  # of the values
    numbers: Any  # of their files; -1 for inline values
    offsets: Any  # in their files
    inline: Sequence[bytes]  # the inline values
    files: Sequence[str]  # the files, relative to the checkpoint


class _Places(NamedTuple):
    """Places of those values of a leaf node that lie in files."""

    numbers: Any  # of the files
    offsets: Any
    lengths: Any


class LeafRows:
    """The keys and values of a leaf node; where values lie in files is decoded on first use.

    ``decoding`` is the context that translates the errors of that."""

    def __init__(self, leaf: LeafNode, decoding: Callable[[], AbstractContextManager[None]]) -> None:
        columns, count, self.files = leaf.columns, leaf.count, leaf.files.names
        self._prefix, self._decoding = leaf.node.prefix, decoding
        # All keys without the prefix, as an array padded with zeros if their lengths are alike.
        self.keys: Any = _ascending(columns.keys(count))
        self.first = self._prefix + self.keys[0]  # the first key
        self._lengths, kinds = columns.numbers(count), columns.numbers(count)
        if int(kinds.max()) > INDIRECT:
            raise ValueError(f"values of the kinds {INLINE} and {INDIRECT} were expected, found {int(kinds.max())}")
        self._is_outside = kinds.astype(bool)
        self._inline = np.flatnonzero(kinds == INLINE)  # the rows of inline values
        self._values = columns.last_slices(self._lengths[self._inline].tolist())
        self._rest: Columns | _Places = columns
        if len(self._inline) == count:
            self._places()

    def _places(self) -> _Places:
        places = self._rest
        if isinstance(places, Columns):
            columns, outside = copy.copy(places), len(self.keys) - len(self._inline)  # of each thread its own
            with self._decoding():
                numbers, offsets = columns.numbers(outside), columns.numbers(outside)
                if outside and int(numbers.max()) >= len(self.files):
                    raise ValueError(f"one of {len(self.files)} files was expected, found number {int(numbers.max())}")
                columns.finish()
            # An overlong number makes the column one of 64 bits, with which numpy does not count.
            self._rest = places = _Places(numbers.astype(np.int32), offsets, self._lengths[self._is_outside])
        return places

    def find(self, key: bytes) -> bytes | ByteRange | None:
        """Return the value of a key, its byte range, or None if the key is absent."""
        if not key.startswith(self._prefix):
            return None
        row = self.row(key)
        if row == len(self.keys) or self.keys[row] != key[len(self._prefix) :]:
            return None
        n_inline = int(self._inline.searchsorted(row))
        if n_inline < len(self._inline) and self._inline[n_inline] == row:
            return self._values[n_inline]
        places, at = self._places(), row - n_inline
        return ByteRange(self.files[places.numbers[at]], int(places.offsets[at]), int(places.lengths[at]))

    def row(self, key: bytes) -> int:
        """Return the number of keys before one that begins with the prefix."""
        return bisect.bisect_left(self.keys, key[len(self._prefix) :])

    def holds(self, prefix: bytes, names: Any) -> int:
        """Return how many of some ascending keys are here; 0 if others are between, or keys differ much in length.

        ``names`` is an array of what follows the prefix, padded with zeros."""
        start, begin = self.row(prefix + names[0]), len(prefix) - len(self._prefix)
        if not prefix.startswith(self._prefix) or not isinstance(self.keys, np.ndarray) or start == len(self.keys):
            return 0
        keys = self.keys[start : start + len(names)]
        if not all(key.startswith(prefix[len(self._prefix) :]) for key in (keys[0], keys[-1])):
            return 0
        found, wanted = (rows.view(np.uint8).reshape(len(keys), -1) for rows in (keys, names[: len(keys)]))
        width = min(found.shape[1] - begin, wanted.shape[1])
        same = np.array_equal(found[:, begin : begin + width], wanted[:, :width])
        return len(keys) if same and not (found[:, begin + width :].any() or wanted[:, width:].any()) else 0

    def rows(self) -> Rows:
        """Return all entries, with their whole keys."""
        keys = self.keys
        if self._prefix:
            # numpy takes zeros at the end of the prefix for padding.
            is_array = isinstance(keys, np.ndarray) and not self._prefix.endswith(b"\0")
            keys = np.char.add(self._prefix, keys) if is_array else [self._prefix + key for key in keys]
        places, outside = self._places(), self._is_outside
        numbers, offsets = np.full(len(keys), -1, np.int32), np.zeros(len(keys), places.offsets.dtype)
        numbers[outside], offsets[outside] = places.numbers, places.offsets
        return Rows(keys, self._lengths, numbers, offsets, self._values, self.files)

    def ends(self) -> Iterator[tuple[str, int]]:
        """Yield files and the ends of the last values in them."""
        places, ends = self._places(), np.zeros(len(self.files), np.uint64)
        np.maximum.at(ends, places.numbers, places.offsets + places.lengths.astype(np.uint64))
        used = np.flatnonzero(np.bincount(places.numbers, minlength=len(self.files)))
        return ((self.files[number], int(ends[number])) for number in used)

    def __iter__(self) -> Iterator[bytes]:
        return (self._prefix + key for key in self.keys)


class RowEntries(Mapping[bytes, bytes | ByteRange]):
    """The keys and values of all leaf nodes, in their order."""

    def __init__(self, leaves: Sequence[LeafRows]) -> None:
        self.leaves, self._firsts = leaves, _ascending([leaf.first for leaf in leaves])

    def __getitem__(self, key: bytes) -> bytes | ByteRange:
        value: bytes | ByteRange | None = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def get(self, key: bytes, default: Any = None) -> Any:
        """Return the value of a key, its byte range, or a default."""
        at = bisect.bisect_right(self._firsts, key)
        value = self.leaves[at - 1].find(key) if at else None
        return default if value is None else value

    def __iter__(self) -> Iterator[bytes]:
        return (key for leaf in self.leaves for key in leaf)

    def __len__(self) -> int:
        return sum(len(leaf.keys) for leaf in self.leaves)

    def holds(self, prefix: bytes, names: Any) -> bool:
        """Return whether all of some keys are here, as `LeafRows.holds` finds them."""
        at = bisect.bisect_right(self._firsts, prefix + names[0]) - 1
        while len(names) and 0 <= at < len(self.leaves):
            count = self.leaves[at].holds(prefix, names)
            if not count:
                return False
            names, at = names[count:], at + 1
        return not len(names)

    def files(self) -> set[str]:
        """Return the files that values may be in."""
        return {file for leaf in self.leaves for file in leaf.files}

    def ends(self) -> Iterator[tuple[str, int]]:
        """Yield files and the ends of values in them; the last of a leaf node for each."""
        return (one for leaf in self.leaves for one in leaf.ends())


Entries = dict[bytes, bytes | ByteRange] | RowEntries


def files_of(entries: Entries) -> set[str]:
    """Return the files that values are in, of many entries those that they may be in."""
    if isinstance(entries, RowEntries):
        return entries.files()
    return {value.file for value in entries.values() if type(value) is ByteRange}


def ends_of(entries: Entries) -> dict[str, int]:
    """Return file → end of the last value in it."""
    if isinstance(entries, RowEntries):
        ends = entries.ends()
    else:
        ends = ((value.file, value.offset + value.length) for value in entries.values() if type(value) is ByteRange)
    found: dict[str, int] = {}
    for file, end in ends:
        if end > found.get(file, -1):
            found[file] = end
    return found
