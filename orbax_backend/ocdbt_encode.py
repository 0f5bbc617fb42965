"""Encode a new OCDBT database of one version: its manifest and B-tree nodes, format version 0.

The format is TensorStore's, as its documentation and `ocdbt`, which decodes it, have it. It lets keys share their
beginnings; here each is written whole, and zstd finds what a large index repeats.
"""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import ocdbt
from .chunk_codecs import CHECKSUM_NBYTES, ZSTD_LEVEL, compressed, with_checksum
from .files import ByteRange
from .ocdbt import INDIRECT, INLINE, PLAIN, ZSTD, Entry

# Values up to this size lie inline in the B-tree, whose nodes have checksums. Orbax 0.12.8 has this limit, and those of
# `_CONFIG`, in its manifests (measured).
INLINE_BYTES = 1024
_CONFIG_NODE_BYTES, _VERSION_TREE_ARITY_LOG2 = 100_000_000, 4
# Decoded bytes of a node: TensorStore's default, of which its caches hold many.
_NODE_BYTES = 8 << 20
# A smaller index is not compressed: it takes a tenth off a restore of 5,000 leaves, for 1 MB of disk.
_COMPRESS_FROM_BYTES = 4 << 20
# Of an entry, besides its key and its inline value: its columns of numbers (worked out for files below 4 GiB).
_ENTRY_BYTES = 16


class _Node(NamedTuple):
    """An encoded node."""

    first: bytes  # its first key
    place: ByteRange
    statistics: tuple[int, int, int]  # of it and all below it: keys, bytes of nodes, bytes of values in files


def encode_index(entries: Sequence[Entry], file: str) -> tuple[bytes, bytes]:
    """Return the content of a ``file`` with the B-tree of entries, and the manifest.

    Files are relative to the database. Raise ValueError if two entries have one key."""
    entries = sorted(entries, key=operator.itemgetter(0))
    for (one, _), (other, _) in itertools.pairwise(entries):
        if one == other:
            raise ValueError(f"the key {one.decode('utf-8', 'backslashreplace')!r} would be in the index twice")
    sizes = [len(key) + _ENTRY_BYTES + (type(value) is bytes and len(value)) for key, value in entries]
    compress = sum(sizes) >= _COMPRESS_FROM_BYTES
    content, nodes = bytearray(), list[_Node]()
    for some in _groups(sizes):
        node = _framed(ocdbt.NODE_MAGIC, _leaf(entries[some]), compress=compress)
        outside = [value.length for _, value in entries[some] if type(value) is ByteRange]
        place = ByteRange(file, len(content), len(node))
        nodes.append(_Node(entries[some.start][0], place, (some.stop - some.start, len(node), sum(outside))))
        content += node
    root = nodes[0]
    if len(nodes) > 1:
        node = _framed(ocdbt.NODE_MAGIC, _parent(nodes), compress=compress)
        n_keys, n_bytes, n_outside = map(sum, zip(*(node.statistics for node in nodes), strict=True))
        root = _Node(b"", ByteRange(file, len(content), len(node)), (n_keys, n_bytes + len(node), n_outside))
        content += node
    return bytes(content), _manifest(root, height=int(len(nodes) > 1))


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield the neighbours that fit into one node."""
    start = filled = 0
    for at, size in enumerate(sizes):
        if filled and filled + size > _NODE_BYTES:
            yield slice(start, at)
            start, filled = at, 0
        filled += size
    yield slice(start, len(sizes))


def _leaf(entries: Sequence[Entry]) -> bytes:
    outside = [value for _, value in entries if type(value) is ByteRange]
    names = sorted({value.file for value in outside})
    numbers = {name: number for number, name in enumerate(names)}
    body = [
        b"\0",  # height
        _file_table(names),
        varints([len(entries)]),
        _unshared([key for key, _ in entries]),
        *[key for key, _ in entries],
        varints([value.length if type(value) is ByteRange else len(value) for _, value in entries]),
        varints([INDIRECT if type(value) is ByteRange else INLINE for _, value in entries]),
        varints([numbers[value.file] for value in outside]),
        varints([value.offset for value in outside]),
        *[value for _, value in entries if type(value) is bytes],
    ]
    return b"".join(body)


def _parent(nodes: Sequence[_Node]) -> bytes:
    """Encode the root over leaf nodes, whose keys are whole: they leave out no beginning that all have."""
    body = [
        b"\1",  # height
        _file_table([nodes[0].place.file]),
        varints([len(nodes)]),
        _unshared([node.first for node in nodes]),
        bytes(len(nodes)),  # lengths of the beginnings
        *[node.first for node in nodes],
        bytes(len(nodes)),  # numbers of the file
        varints([node.place.offset for node in nodes]),
        varints([node.place.length for node in nodes]),
        *map(varints, zip(*(node.statistics for node in nodes), strict=True)),
    ]
    return b"".join(body)


def _manifest(root: _Node, height: int) -> bytes:
    body = [
        os.urandom(16),  # the database's own identifier
        varints([ocdbt.SINGLE, INLINE_BYTES, _CONFIG_NODE_BYTES]),
        bytes([_VERSION_TREE_ARITY_LOG2]),
        varints([ZSTD]),
        ZSTD_LEVEL.to_bytes(4, "little"),
        _file_table([root.place.file]),
        varints([1, 1]),  # one version, and its generation number
        bytes([height]),
        varints([0, root.place.offset, root.place.length, *root.statistics]),
        max(time.time_ns(), 0).to_bytes(8, "little"),
        varints([0]),  # no nodes of older versions
    ]
    return _framed(ocdbt.MANIFEST_MAGIC, b"".join(body), compress=False)


def _framed(magic: int, body: bytes, *, compress: bool) -> bytes:
    """Return a node or manifest with its header and checksum."""
    if compress:
        body = compressed(body)
    length = ocdbt.HEADER_NBYTES + len(body) + CHECKSUM_NBYTES
    kind = bytes([ocdbt.VERSION, ZSTD if compress else PLAIN])
    return with_checksum(magic.to_bytes(4, "big") + length.to_bytes(8, "little") + kind + body)


def _file_table(names: Sequence[str]) -> bytes:
    """Encode files, whose names end in a directory and a name; what is before belongs to the database below."""
    paths = [os.fsencode(name) for name in names]
    bases = [path.rfind(b"/", 0, path.rfind(b"/")) + 1 for path in paths]
    return varints([len(paths)]) + _unshared(paths) + varints(bases) + b"".join(paths)


def _unshared(names: Sequence[bytes]) -> bytes:
    """Encode the lengths of names, each of which but the first shares 0 bytes with the one before."""
    return bytes(max(len(names) - 1, 0)) + varints(list(map(len, names)))


def varints(numbers: Sequence[int]) -> bytes:
    """Encode a column of numbers: 7 bits a byte, lowest first."""
    if max(numbers, default=0) < 0x80:
        return bytes(numbers)
    encoded: list[int] = []
    for number in numbers:
        rest = number
        while rest > 0x7F:
            encoded.append(rest & 0x7F | 0x80)
            rest >>= 7
        encoded.append(rest)
    return bytes(encoded)
