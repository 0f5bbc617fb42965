"""Decode manifests and B-tree nodes of OCDBT databases, format version 0, as TensorStore documents them.

We decode them because TensorStore's own ``ocdbt.dump`` leaks every object that it returns (0.1.86, measured).
"""

from __future__ import annotations

import dataclasses
import itertools
import operator

from .codecs import check_crc32c, decompress_zstd
from .ocdbt_columns import Columns
from .stored_values import ByteRange

MANIFEST_MAGIC, NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_VERSION = 0
_PLAIN, _ZSTD = 0, 1
_SINGLE, _NUMBERED = 0, 1
_INLINE, _INDIRECT = 0, 1
_NOWHERE = 2**64 - 1
# Magic, length, version (1 byte), compression (1 byte) and checksum.
_SHORTEST = 18


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRef:
    """A reference to a B-tree node.

    Attributes:
        extent: its bytes.
        base: directory of the paths in the node, with its slash.
        prefix: common prefix of all keys below it.
        height: number of levels below it.
    """

    extent: ByteRange
    base: str
    prefix: bytes
    height: int


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """The settings of a manifest that a reader needs.

    Attributes:
        numbered: whether the versions are in files of their own.
        columns: the rest of the manifest.
    """

    numbered: bool
    columns: Columns


def open_manifest(data: bytes) -> Config:
    """Check and decode the first part of a manifest.

    Raises:
        ValueError: it does not decode.
        UndecodableError: see `decompress_zstd`.
    """
    columns = _body(data, MANIFEST_MAGIC)
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
    return Config(kind == _NUMBERED, columns)


def newest_root(config: Config) -> NodeRef | None:
    """Return the root of the newest version; None where that has no keys."""
    columns = config.columns
    files = _Files(columns, "")
    count = columns.varint()
    if not count:
        raise ValueError("at least one version was expected, found none")
    columns.varints(count)  # generation numbers, in ascending order
    height = columns.take(count)[-1]
    file, offset, length = (columns.varints(count)[-1] for _ in range(3))
    if offset == length == _NOWHERE:
        return None
    return files.node(file, offset, length, b"", height)


def decode_node(data: bytes, node: NodeRef) -> tuple[list[NodeRef], dict[bytes, bytes | ByteRange]]:
    """Decode a B-tree node.

    Args:
        data: the node's bytes.
        node: the reference that led to it.

    Returns:
        The nodes below an inner one; or the keys of a leaf node, each with its value or byte range.

    Raises:
        ValueError: it does not decode.
        UndecodableError: see `decompress_zstd`.
    """
    columns = _body(data, NODE_MAGIC)
    height = columns.byte()
    if height != node.height:
        raise ValueError(f"a node of height {node.height} was expected, found one of height {height}")
    files = _Files(columns, node.base)
    if height:
        return _inner(columns, files, node), {}
    return [], _leaf(columns, files, node.prefix)


def _body(data: bytes, magic: int) -> Columns:
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
    return Columns(decompress_zstd(body) if compression == _ZSTD else body)


class _Files:
    """The file table of a node."""

    def __init__(self, columns: Columns, base: str) -> None:
        count = columns.varint()
        shared, own = columns.name_lengths(count)
        bases = columns.varints(count)
        names = columns.names(shared, own)
        if any(length > len(name) for length, name in zip(bases, names, strict=True)):
            raise ValueError("the part of a file's path was expected to be no longer than the path")
        self._names = [base + _text(name) for name in names]
        self._bases = [base + _text(name[:length]) for length, name in zip(bases, names, strict=True)]

    def extent(self, file: int, offset: int, length: int) -> ByteRange:
        if file >= len(self._names):
            raise ValueError(f"one of {len(self._names)} files was expected, found number {file}")
        return ByteRange(self._names[file], offset, length)

    def node(self, file: int, offset: int, length: int, prefix: bytes, height: int) -> NodeRef:
        return NodeRef(self.extent(file, offset, length), self._bases[file], prefix, height)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _inner(columns: Columns, files: _Files, node: NodeRef) -> list[NodeRef]:
    count = columns.varint()
    shared, own = columns.name_lengths(count)
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


def _leaf(columns: Columns, files: _Files, prefix: bytes) -> dict[bytes, bytes | ByteRange]:
    count = columns.varint()
    keys = _ascending(columns.names(*columns.name_lengths(count)))
    lengths, kinds = columns.varints(count), columns.varints(count)
    if not {_INLINE, _INDIRECT}.issuperset(kinds):
        raise ValueError(f"values of the kinds {_INLINE} and {_INDIRECT} were expected, found {max(kinds)}")
    indirect = sum(kinds)
    numbers, offsets = columns.varints(indirect), columns.varints(indirect)
    sizes = list(itertools.compress(lengths, kinds))
    places = iter([files.extent(*place) for place in zip(numbers, offsets, sizes, strict=True)])
    inline = iter(columns.slices([length for length, kind in zip(lengths, kinds, strict=True) if kind == _INLINE]))
    columns.finish()
    values = [next(places) if kind else next(inline) for kind in kinds]
    return dict(zip([prefix + key for key in keys] if prefix else keys, values, strict=True))


def _ascending(keys: list[bytes]) -> list[bytes]:
    if any(map(operator.ge, keys, keys[1:])):
        raise ValueError("keys in ascending order were expected, found others")
    return keys
