"""Encode a new OCDBT database of one version: its manifest and B-tree nodes, format version 0.

The format is TensorStore's, as its documentation and `ocdbt_nodes`, which decodes it, have it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .chunk_codecs import CHECKSUM_NBYTES, ZSTD_LEVEL, compressed, with_checksum
from .files import ByteRange
from .ocdbt_nodes import (
    HEADER_NBYTES,
    INDIRECT,
    INLINE,
    MANIFEST_MAGIC,
    NODE_MAGIC,
    PLAIN,
    SINGLE,
    VERSION,
    ZSTD,
    Entry,
)

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
Append = Callable[[bytes], ByteRange]
_number_of = functools.partial(int.from_bytes, byteorder="big")


class _Node(NamedTuple):
    """A node that was written."""

    first: bytes  # its first key, and its last
    last: bytes
    place: ByteRange
    height: int
    statistics: tuple[int, int, int]  # of it and all below it: keys, bytes of nodes, bytes of values in files


def write_index(entries: Sequence[Entry], append: Append) -> bytes:
    """Write the B-tree of entries by ``append``, which returns the place of a node; return the manifest.

    The files of values are relative to the database. Raise ValueError if two entries have one key."""
    entries = sorted(entries, key=operator.itemgetter(0))
    for (one, _), (other, _) in itertools.pairwise(entries):
        if one == other:
            raise ValueError(f"the key {one.decode('utf-8', 'backslashreplace')!r} would be in the index twice")
    sizes = [len(key) + _ENTRY_BYTES + (type(value) is bytes and len(value)) for key, value in entries]
    is_large, leaves = sum(sizes) >= _COMPRESS_FROM_BYTES, list(_groups(sizes))
    nodes = [_append_leaf(entries[some], append, is_root=len(leaves) == 1, compress=is_large) for some in leaves]
    while len(nodes) > 1:
        groups = list(_groups([len(node.first) + 2 * _ENTRY_BYTES for node in nodes]))
        if len(groups) == len(nodes):  # names of which a node holds one: a taller tree would never end
            groups = [slice(None)]
        is_root = len(groups) == 1
        nodes = [_append_parent(nodes[some], append, is_root=is_root, compress=is_large) for some in groups]
    return _manifest(nodes[0])


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield the neighbours that fit into one node."""
    start = filled = 0
    for at, size in enumerate(sizes):
        if filled and filled + size > _NODE_BYTES:
            yield slice(start, at)
            start, filled = at, 0
        filled += size
    yield slice(start, len(sizes))


def _append_leaf(entries: Sequence[Entry], append: Append, *, is_root: bool, compress: bool) -> _Node:
    first, last = entries[0][0], entries[-1][0]
    prefix = 0 if is_root else _n_common(first, last)
    inline = [value for _, value in entries if type(value) is bytes]
    outside = [value for _, value in entries if type(value) is ByteRange]
    names = sorted({value.file for value in outside})
    numbers = {name: number for number, name in enumerate(names)}
    body = [
        _file_table(names),
        varints([len(entries)]),
        *_front_coded([key[prefix:] for key, _ in entries]),
        varints([value.length if type(value) is ByteRange else len(value) for _, value in entries]),
        varints([INDIRECT if type(value) is ByteRange else INLINE for _, value in entries]),
        varints([numbers[value.file] for value in outside]),
        varints([value.offset for value in outside]),
        *inline,
    ]
    place = append(_framed(NODE_MAGIC, bytes([0]) + b"".join(body), compress=compress))
    statistics = len(entries), place.length, sum(value.length for value in outside)
    return _Node(first, last, place, 0, statistics)


def _append_parent(nodes: Sequence[_Node], append: Append, *, is_root: bool, compress: bool) -> _Node:
    first, last, height = nodes[0].first, nodes[-1].last, nodes[0].height + 1
    prefix = 0 if is_root else _n_common(first, last)
    shared, own, suffixes = _front_coded([node.first[prefix:] for node in nodes])
    names = sorted({node.place.file for node in nodes})
    columns = list(zip(*(node.statistics for node in nodes), strict=True))
    body = [
        _file_table(names),
        varints([len(nodes)]),
        shared,
        own,
        varints([_n_common(node.first, node.last) - prefix for node in nodes]),
        suffixes,
        varints([names.index(node.place.file) for node in nodes]),
        varints([node.place.offset for node in nodes]),
        varints([node.place.length for node in nodes]),
        *map(varints, columns),
    ]
    place = append(_framed(NODE_MAGIC, bytes([height]) + b"".join(body), compress=compress))
    n_keys, n_bytes, n_outside = map(sum, columns)
    return _Node(first, last, place, height, (n_keys, n_bytes + place.length, n_outside))


def _manifest(root: _Node) -> bytes:
    body = [
        os.urandom(16),  # the database's own identifier
        varints([SINGLE, INLINE_BYTES, _CONFIG_NODE_BYTES]),
        bytes([_VERSION_TREE_ARITY_LOG2]),
        varints([ZSTD]),
        ZSTD_LEVEL.to_bytes(4, "little"),
        _file_table([root.place.file]),
        varints([1, 1]),  # one version, and its generation number
        bytes([root.height]),
        varints([0, root.place.offset, root.place.length, *root.statistics]),
        max(time.time_ns(), 0).to_bytes(8, "little"),
        varints([0]),  # no nodes of older versions
    ]
    return _framed(MANIFEST_MAGIC, b"".join(body), compress=False)


def _framed(magic: int, body: bytes, *, compress: bool) -> bytes:
    """Return a node or manifest with its header and checksum."""
    if compress:
        body = compressed(body)
    length = HEADER_NBYTES + len(body) + CHECKSUM_NBYTES
    header = magic.to_bytes(4, "big") + length.to_bytes(8, "little") + bytes([VERSION, ZSTD if compress else PLAIN])
    return with_checksum(header + body)


def _file_table(names: Sequence[str]) -> bytes:
    """Encode files, whose names end in a directory and a name; what is before belongs to the database below."""
    paths = [os.fsencode(name) for name in names]
    bases = [path[: path.rfind(b"/", 0, path.rfind(b"/")) + 1] for path in paths]
    shared = [0] if paths else []
    for at in range(1, len(paths)):
        common = _n_common(paths[at - 1], paths[at])
        # What is shared may not go beyond a base, unless both have the same.
        shared.append(common if bases[at] == bases[at - 1] else min(common, len(bases[at]), len(bases[at - 1])))
    suffixes = [path[start:] for path, start in zip(paths, shared, strict=True)]
    columns = [[len(paths)], shared[1:], list(map(len, suffixes)), list(map(len, bases))]
    return b"".join([*map(varints, columns), *suffixes])


def _front_coded(keys: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Encode keys: how many bytes each shares with the one before, the lengths of the rest, and the rest."""
    shared = [0, *_all_common(keys, keys[1:])]
    suffixes = [key[start:] for key, start in zip(keys, shared, strict=True)]
    return varints(shared[1:]), varints(list(map(len, suffixes))), b"".join(suffixes)


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


def _n_common(one: bytes, other: bytes) -> int:
    """Return how many bytes two names begin with alike."""
    return _all_common([one], [other])[0]


def _all_common(ones: Sequence[bytes], others: Sequence[bytes]) -> list[int]:
    """Return `_n_common` of pairs of names, without Python code for each; there may be one more of ``ones``."""
    lengths = list(map(min, map(len, ones), map(len, others)))
    first, second = (map(_number_of, map(operator.getitem, names, map(slice, lengths))) for names in (ones, others))
    n_bits = map(int.bit_length, map(operator.xor, first, second))
    return [length - (differ + 7) // 8 for length, differ in zip(lengths, n_bits, strict=True)]
