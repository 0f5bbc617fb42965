"""Read the keys of an OCDBT database: its manifest, then its B-tree, level by level.

We decode format version 0 ourselves, as TensorStore documents it: TensorStore's own ``ocdbt.dump`` leaks every object
that it returns (0.1.86, measured), and its key-value store does not tell where values lie.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.orbax_layout import MANIFEST
from flax_ckpt_compat._core.thread_pools import in_parallel

from .files import ByteRange, CheckpointFiles, sizes_of
from .leaf_rows import INDIRECT, INLINE, Entries, LeafRows, RowEntries, check_ascending, files_of
from .ocdbt_encoding import MAX_DECODED_BYTES, Columns, MemoryBudget, UndecodableError, check_crc32c, decompress_zstd

MANIFEST_MAGIC, NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_VERSION = 0
_PLAIN, _ZSTD = 0, 1
_SINGLE, _NUMBERED = 0, 1
_NOWHERE = 2**64 - 1
# Magic, length, version (1 byte), compression (1 byte) and checksum.
_SHORTEST = 18
# Manifests list at most a few hundred versions.
_MAX_MANIFEST_BYTES = 64 << 20
# A dict of all keys costs as much for a key as some look-ups in arrays of so many.
_ROWS_FROM, _ROWS_PER_LOOKUP = 20_000, 8


@dataclasses.dataclass(frozen=True, slots=True)
class _NodeRef:
    """A reference to a B-tree node."""

    extent: ByteRange  # its bytes
    base: str  # directory of the paths in the node, with its slash
    prefix: bytes  # common prefix of all keys below it
    height: int  # number of levels below it


def read_entries(path: str, base: str = "", locate: Callable[[str], str] | None = None, lookups: int = 0) -> Entries:
    """Return every key of the newest version of a database, with its value or byte range.

    ``base`` is its directory in the checkpoint's, with its slash. Of files that are not in ``path``, ``locate`` returns
    the full path by the name. About so many ``lookups`` are expected. Raise UndecodableError if only TensorStore reads
    it."""
    database = _Database(path, base, locate)
    leaves = database.leaves()
    many = sum(leaf.count for leaf in leaves) >= max(_ROWS_FROM, _ROWS_PER_LOOKUP * lookups)
    entries = database.rows(leaves) if many else database.entries(leaves)
    database.check_files(entries)
    return entries


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf node of which the table of files and the number of keys are decoded."""

    node: _NodeRef
    columns: Columns
    files: _Files
    count: int


class _Database:
    def __init__(self, path: str, base: str, locate: Callable[[str], str] | None) -> None:
        self._path, self._base = path, base
        self._locate = locate or (lambda file: os.path.join(path, file))
        self._files, self._budget = CheckpointFiles(path), MemoryBudget()
        self._seen: set[ByteRange] = set()

    def leaves(self) -> list[_Leaf]:
        """Read all nodes, and return the leaf nodes."""
        leaves: list[_Leaf] = []
        level = self._roots()
        while level:
            below: list[_NodeRef] = []
            for node, data in zip(level, self._read(level), strict=True):
                with self._decoding(node):
                    self._budget.grow(len(data))
                    columns, files = _open_node(data, node, self._budget)
                    if node.height:
                        below += _inner(columns, files, node)
                    else:
                        leaves.append(_Leaf(node, columns, files, columns.varint()))
            level = below
        return leaves

    def entries(self, leaves: list[_Leaf]) -> Entries:
        """Return the keys of leaf nodes in a dict."""
        found: dict[bytes, bytes | ByteRange] = {}
        for leaf in leaves:
            with self._decoding(leaf.node):
                found |= _leaf(leaf)
        return found

    def rows(self, leaves: list[_Leaf]) -> RowEntries:
        """Return the keys of leaf nodes, which are many, without an object for each."""
        found = []
        for leaf in leaves:
            with self._decoding(leaf.node):
                if leaf.count:
                    found.append(LeafRows(leaf.columns, leaf.files.names, leaf.node.prefix, leaf.count))
        with self._decoding(leaves[0].node):
            return RowEntries(found)

    def check_files(self, entries: Entries) -> None:
        """Check that values are in regular files of the checkpoint."""
        for file in files_of(entries):
            self._files.check(file)

    @contextlib.contextmanager
    def _decoding(self, node: _NodeRef) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise self._corrupt_node(node, error) from error

    def _roots(self) -> list[_NodeRef]:
        name = self._base + MANIFEST
        file = self._locate(name)
        self._files.check(name)
        data = paths.read(file, 0, None if paths.is_url(file) else _MAX_MANIFEST_BYTES)
        try:
            root = _newest_root(data, self._base, self._budget)
        except ValueError as error:
            raise self._corrupt(name, "", error) from error
        return [] if root is None else [root]

    def _read(self, nodes: list[_NodeRef]) -> list[bytes]:
        """Read the nodes of one level, concurrently from a store."""
        for node in nodes:
            self._files.check(node.extent.file)
            if node.extent in self._seen:
                # Forty levels of shared nodes would make a tree of 2**40 keys.
                raise self._corrupt_node(node, ValueError("one parent of the B-tree node was expected, found two"))
            self._seen.add(node.extent)
        self._check_lengths(nodes)
        found: dict[int, bytes] = {}

        def read(number: int) -> None:
            found[number] = self._read_one(nodes[number])

        if paths.is_url(self._path):
            in_parallel(read, range(len(nodes)))
        else:
            for number in range(len(nodes)):
                read(number)
        return [found[number] for number in range(len(nodes))]

    def _check_lengths(self, nodes: list[_NodeRef]) -> None:
        """Check that local files contain the nodes, before memory is allocated."""
        files = {node.extent.file: self._locate(node.extent.file) for node in nodes}
        sizes = sizes_of([full for full in files.values() if not paths.is_url(full)])
        for node in nodes:
            file, offset, length = node.extent
            size = sizes.get(files[file])
            if length > MAX_DECODED_BYTES:
                problem = f"at most {MAX_DECODED_BYTES} bytes were expected, found {length}"
                raise self._corrupt_node(node, ValueError(problem))
            if isinstance(size, int) and offset + length > size:
                problem = f"a file of at least {offset + length} bytes was expected, found one of {size}"
                raise self._corrupt_node(node, ValueError(problem))

    def _read_one(self, node: _NodeRef) -> bytes:
        file = self._locate(node.extent.file)
        _, offset, length = node.extent
        try:
            data = paths.read(file, offset, offset + length)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"{file}: this file of the array database is missing; restore it from a copy", path=file
            ) from error
        if len(data) != length:
            raise self._corrupt_node(node, ValueError(f"{length} bytes were expected, found {len(data)}"))
        return data

    def _corrupt_node(self, node: _NodeRef, error: ValueError) -> CorruptCheckpointError:
        return self._corrupt(node.extent.file, f" at byte {node.extent.offset}", error)

    def _corrupt(self, file: str, at: str, error: ValueError) -> CorruptCheckpointError:
        full = self._locate(file)
        return CorruptCheckpointError(
            f"{full}: the array database does not decode{at}: {error}; restore the files from a copy", path=full
        )


def _newest_root(manifest: bytes, base: str, budget: MemoryBudget) -> _NodeRef | None:
    """Return the root of the newest version; None where that has no keys."""
    columns = _body(manifest, MANIFEST_MAGIC, budget)
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
    files = _Files(columns, base)
    count = columns.varint()
    if not count:
        raise ValueError("at least one version was expected, found none")
    columns.varints(count)  # generation numbers, in ascending order
    height = columns.take(count)[-1]
    file, offset, length = (columns.varints(count)[-1] for _ in range(3))
    return None if offset == length == _NOWHERE else files.node(file, offset, length, b"", height)


def _open_node(data: bytes, node: _NodeRef, budget: MemoryBudget) -> tuple[Columns, _Files]:
    """Return the columns of a node, of which height and files are read."""
    columns = _body(data, NODE_MAGIC, budget)
    height = columns.byte()
    if height != node.height:
        raise ValueError(f"a node of height {node.height} was expected, found one of height {height}")
    return columns, _Files(columns, node.base)


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


class _Files:
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
        names = self.names
        if max(numbers, default=-1) >= len(names):
            raise ValueError(f"one of {len(names)} files was expected, found number {max(numbers)}")
        rows = zip(map(names.__getitem__, numbers), offsets, lengths, strict=True)
        # Without Python code for each: a checkpoint of many hosts has millions.
        return list(map(tuple.__new__, itertools.repeat(ByteRange), rows))

    def node(self, file: int, offset: int, length: int, prefix: bytes, height: int) -> _NodeRef:
        (extent,) = self.extents([file], [offset], [length])
        return _NodeRef(extent, self._bases[file], prefix, height)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _inner(columns: Columns, files: _Files, node: _NodeRef) -> list[_NodeRef]:
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


def _leaf(leaf: _Leaf) -> dict[bytes, bytes | ByteRange]:
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
