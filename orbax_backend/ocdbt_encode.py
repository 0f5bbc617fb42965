"""Encode a new OCDBT database of one version: its manifest and B-tree nodes, format version 0.

The format is TensorStore's, as its documentation and `ocdbt_nodes`, which decodes it, have it. All columns are made by
numpy: a checkpoint of many hosts has millions of entries.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.tensorstore_codecs import Encoder, crc32c

from .files import ByteRange
from .ocdbt_nodes import INDIRECT, INLINE, MANIFEST_MAGIC, NODE_MAGIC, PLAIN, SINGLE, VERSION, ZSTD, Rows

# Values up to this size lie inline in the B-tree, whose nodes have checksums. Orbax 0.12.8 has this limit, and those of
# `_CONFIG`, in its manifests (measured).
INLINE_BYTES = 1024
_CONFIG_NODE_BYTES, _VERSION_TREE_ARITY_LOG2, _ZSTD_LEVEL = 100_000_000, 4, 1
# Decoded bytes of a node: TensorStore's default, of which its caches hold many.
_NODE_BYTES = 8 << 20
# A smaller index is not compressed: it takes a tenth off a restore of 5,000 leaves, for 1 MB of disk.
_COMPRESS_FROM_BYTES = 4 << 20
# Of an entry, besides its key and its inline value: at most its columns of numbers (worked out for files below 4 GiB).
_ENTRY_BYTES = 16
# Keys are padded to the longest one, so many bytes of them at once.
_PADDED_BYTES = 16 << 20
_MAX_PADDING = 4  # times the memory of keys without it, if they take more
_HEADER = 14  # magic, length, version, compression
_CHECKSUM = 4
Append = Callable[[bytes], ByteRange]


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """A node that was written."""

    first: bytes  # its first key, and its last
    last: bytes
    place: ByteRange
    height: int
    statistics: tuple[int, int, int]  # of it and all below it: keys, bytes of nodes, bytes of values in files


def array_of(keys: Sequence[bytes]) -> Any:
    """Return keys as an array for `Rows`: padded with zeros, if their lengths are alike."""
    lengths = list(map(len, keys))
    fits = len(keys) * max(lengths) <= max(_PADDED_BYTES, _MAX_PADDING * sum(lengths))
    return np.array(keys, bytes if fits else object)


def joined(parts: Sequence[Rows]) -> Rows:
    """Return all entries of several databases, whose files have different names."""
    starts = np.cumsum([0, *(len(part.files) for part in parts)]).tolist()
    return Rows(
        _joined_keys([part.keys for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate(
            [np.where(part.numbers < 0, -1, part.numbers + start) for part, start in zip(parts, starts, strict=False)]
        ),
        np.concatenate([part.offsets for part in parts]),
        [value for part in parts for value in part.inline],
        [name for part in parts for name in part.files],
    )


def _joined_keys(arrays: Sequence[Any]) -> Any:
    if all(isinstance(keys, np.ndarray) and keys.dtype != object for keys in arrays):
        nbytes, count = sum(keys.nbytes for keys in arrays), sum(map(len, arrays))
        if count * max(keys.itemsize for keys in arrays) <= max(_PADDED_BYTES, _MAX_PADDING * nbytes):
            return np.concatenate(arrays)
    return array_of([bytes(key) for keys in arrays for key in keys])


def write_index(rows: Rows, append: Append) -> bytes:
    """Write the B-tree of entries by ``append``, which returns the place of a node; return the manifest.

    The files of values are relative to the database. Raise ValueError if two entries have one key."""
    order = np.argsort(rows.keys, kind="stable")
    starts, is_large = _cut(rows, order)
    rank = np.cumsum(rows.numbers < 0) - 1  # row → number of its inline value
    nodes = list[_Node]()
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        some = order[start:stop]
        keys, numbers = rows.keys[some], rows.numbers[some]
        _check_ascending(keys, nodes)
        inline = [rows.inline[at] for at in rank[some[numbers < 0]].tolist()]
        leaf = Rows(keys, rows.lengths[some], numbers, rows.offsets[some], inline, rows.files)
        nodes.append(_append_leaf(leaf, append, is_root=len(starts) == 1, compress=is_large))
    while len(nodes) > 1:
        nodes = _append_parents(nodes, append, compress=is_large)
    return _manifest(nodes[0])


def _cut(rows: Rows, order: Any) -> tuple[list[int], bool]:
    """Return where leaf nodes begin in the order of the keys, and whether the index is large."""
    kept = np.where(rows.numbers < 0, rows.lengths, 0)
    ends = np.cumsum((_lengths_of(rows.keys) + kept + _ENTRY_BYTES)[order])
    number = (ends - 1) // _NODE_BYTES
    starts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist()]
    return starts, int(ends[-1]) >= _COMPRESS_FROM_BYTES


def _check_ascending(keys: Any, before: Sequence[_Node]) -> None:
    twice = keys[1:][keys[1:] == keys[:-1]]
    if len(twice) or (before and before[-1].last == keys[0]):
        key = bytes(twice[0] if len(twice) else keys[0]).decode("utf-8", "backslashreplace")
        raise ValueError(f"the key {key!r} would be in the index twice")


def _append_leaf(leaf: Rows, append: Append, *, is_root: bool, compress: bool) -> _Node:
    first, last = bytes(leaf.keys[0]), bytes(leaf.keys[-1])
    outside = leaf.numbers >= 0
    used, numbers = np.unique(leaf.numbers[outside], return_inverse=True)
    kinds = np.where(outside, INDIRECT, INLINE)
    body = [
        _file_table([leaf.files[number] for number in used.tolist()]),
        varints([len(leaf.keys)]),
        *_front_coded(leaf.keys, 0 if is_root else _n_common(first, last)),
        varints(leaf.lengths),
        varints(kinds),
        varints(numbers),
        varints(leaf.offsets[outside]),
        *leaf.inline,
    ]
    place = append(_framed(NODE_MAGIC, bytes([0]) + b"".join(body), compress=compress))
    statistics = len(leaf.keys), place.length, int(leaf.lengths[outside].sum())
    return _Node(first, last, place, 0, statistics)


def _append_parents(nodes: list[_Node], append: Append, *, compress: bool) -> list[_Node]:
    """Write the nodes above others; return them."""
    sizes = np.cumsum([len(node.first) + len(node.place.file) + 8 * _ENTRY_BYTES for node in nodes])
    starts = [0, *(np.flatnonzero(np.diff(sizes // _NODE_BYTES)) + 1).tolist()]
    groups = [nodes[start:stop] for start, stop in zip(starts, [*starts[1:], len(nodes)], strict=True)]
    if len(groups) == len(nodes):  # names of which a node holds one: a taller tree would never end
        groups = [nodes]
    return [_append_parent(group, append, is_root=len(groups) == 1, compress=compress) for group in groups]


def _append_parent(nodes: list[_Node], append: Append, *, is_root: bool, compress: bool) -> _Node:
    first, last, height = nodes[0].first, nodes[-1].last, nodes[0].height + 1
    prefix = 0 if is_root else _n_common(first, last)
    shared, own, suffixes = _front_coded(array_of([node.first for node in nodes]), prefix)
    names = sorted({node.place.file for node in nodes})
    statistics = np.array([node.statistics for node in nodes])
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
        *map(varints, statistics.T),
    ]
    place = append(_framed(NODE_MAGIC, bytes([height]) + b"".join(body), compress=compress))
    n_keys, n_bytes, n_outside = (int(column.sum()) for column in statistics.T)
    return _Node(first, last, place, height, (n_keys, n_bytes + place.length, n_outside))


def _manifest(root: _Node) -> bytes:
    body = [
        os.urandom(16),  # the database's own identifier
        varints([SINGLE, INLINE_BYTES, _CONFIG_NODE_BYTES]),
        bytes([_VERSION_TREE_ARITY_LOG2]),
        varints([ZSTD]),
        _ZSTD_LEVEL.to_bytes(4, "little"),
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
        codec = {"name": "zstd", "configuration": {"level": _ZSTD_LEVEL, "checksum": False}}
        body = Encoder([codec]).encode(np.frombuffer(body, np.uint8))
    length = _HEADER + len(body) + _CHECKSUM
    header = magic.to_bytes(4, "big") + length.to_bytes(8, "little") + bytes([VERSION, ZSTD if compress else PLAIN])
    data = header + body
    return data + crc32c(data).to_bytes(_CHECKSUM, "little")


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


def _front_coded(keys: Any, prefix: int) -> tuple[bytes, bytes, bytes]:
    """Encode ascending keys without their common prefix: what each shares with the one before, the lengths of the rest,
    and the rest."""
    width = max(int(_lengths_of(keys).max()), 1)
    step = max(1, _PADDED_BYTES // width)
    shared, own, suffixes = [], [], []
    for start in range(0, len(keys), step):
        before = max(start - 1, 0)
        some = np.array(keys[before : start + step], bytes)
        rows = some.view(np.uint8).reshape(len(some), -1)
        lengths = _lengths_of(some)
        differs = rows[1:] != rows[:-1]
        # Where a key has a zero, the shorter one before it may seem to have it too.
        common = np.minimum(differs.argmax(1), np.minimum(lengths[1:], lengths[:-1]))
        if not start:
            common = np.concatenate([[prefix], common])
        else:
            rows, lengths = rows[1:], lengths[1:]
        places = np.arange(rows.shape[1])
        suffixes.append(rows[(places >= common[:, None]) & (places < lengths[:, None])].tobytes())
        shared.append(common)
        own.append(lengths - common)
    common = np.concatenate(shared) - prefix
    return varints(common[1:]), varints(np.concatenate(own)), b"".join(suffixes)


def _lengths_of(keys: Any) -> Any:
    """Return the lengths of keys, none of which ends in a zero."""
    if keys.dtype == object:
        return np.fromiter(map(len, keys), np.int64, len(keys))
    rows = keys.view(np.uint8).reshape(len(keys), -1)[:, ::-1]
    return rows.shape[1] - (rows != 0).argmax(1)


def varints(numbers: Any) -> bytes:
    """Encode a column of numbers: 7 bits a byte, lowest first."""
    column = np.asarray(numbers, np.uint64)
    longest = int(column.max()) if len(column) else 0
    if longest < 0x80:
        return column.astype(np.uint8).tobytes()
    shifts = np.arange(0, longest.bit_length(), 7).astype(np.uint64)
    rests = column[:, None] >> shifts
    kept = rests > 0
    kept[:, 0] = True
    septets = (rests & np.uint64(0x7F)).astype(np.uint8)
    septets[:, :-1] |= kept[:, 1:].astype(np.uint8) << 7
    encoded: bytes = septets[kept].tobytes()
    return encoded


def _n_common(one: bytes, other: bytes) -> int:
    """Return how many bytes two names begin with alike."""
    shortest = min(len(one), len(other))
    return next((at for at in range(shortest) if one[at] != other[at]), shortest)
