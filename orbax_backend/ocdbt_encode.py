"""Encode a new OCDBT database of one version: its manifest and B-tree nodes, format version 0.

The format is TensorStore's, as its documentation and `ocdbt_nodes`, which decodes it, have it. All columns are made by
numpy: a checkpoint of many hosts has millions of entries.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .chunk_codecs import CHECKSUM_NBYTES, ZSTD_LEVEL, compressed, with_checksum
from .files import ByteRange
from .ocdbt_nodes import INDIRECT, INLINE, MANIFEST_MAGIC, NODE_MAGIC, PLAIN, SINGLE, VERSION, ZSTD, Entries

# Values up to this size lie inline in the B-tree, whose nodes have checksums. Orbax 0.12.8 has this limit, and those of
# `_CONFIG`, in its manifests (measured).
INLINE_BYTES = 1024
_CONFIG_NODE_BYTES, _VERSION_TREE_ARITY_LOG2 = 100_000_000, 4
# Decoded bytes of a node: TensorStore's default, of which its caches hold many.
_NODE_BYTES = 8 << 20
# A smaller index is not compressed: it takes a tenth off a restore of 5,000 leaves, for 1 MB of disk.
_COMPRESS_FROM_BYTES = 4 << 20
# Of an entry, besides its key and its inline value: at most its columns of numbers (worked out for files below 4 GiB).
_ENTRY_BYTES = 16
# Keys are padded to the longest one, so many bytes of them at once.
_PADDED_BYTES = 16 << 20
_MAX_PADDING = 4  # times the memory of keys without it, if they take more
# Of keys for each leaf node, to find where it begins: nodes are larger or smaller by up to one part in so many.
_SAMPLES = 4
# Fewer keys are compared with each other, and so are those that begin with more bytes alike.
_MANY_KEYS, _MAX_SORTED_BYTES = 64, 256
_HEADER = 14  # magic, length, version, compression
Append = Callable[[bytes], ByteRange]


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """A node that was written."""

    first: bytes  # its first key, and its last
    last: bytes
    place: ByteRange
    height: int
    statistics: tuple[int, int, int]  # of it and all below it: keys, bytes of nodes, bytes of values in files


class Rows(NamedTuple):
    """Entries of an index in columns, in any order."""

    keys: Any  # array of bytes, padded with zeros or objects
    lengths: Any  # of the values
    numbers: Any  # of their files; -1 for inline values
    offsets: Any  # in their files
    inline: Sequence[bytes]  # the inline values
    files: Sequence[str]  # the files, relative to the checkpoint


def rows_of(entries: Entries) -> Rows:
    """Return entries in columns."""
    files: dict[str, int] = {}
    places = [
        (value.length, files.setdefault(value.file, len(files)), value.offset)
        if isinstance(value, ByteRange)
        else (len(value), -1, 0)
        for value in entries.values()
    ]
    inline = [value for value in entries.values() if not isinstance(value, ByteRange)]
    lengths, numbers, offsets = np.array(places, np.int64).T
    return Rows(array_of([*entries]), lengths, numbers, offsets, inline, [*files])


def array_of(keys: Sequence[bytes]) -> Any:
    """Return keys as an array for `Rows`: padded with zeros, if their lengths are alike."""
    lengths = list(map(len, keys))
    fits = len(keys) * max(lengths) <= max(_PADDED_BYTES, _MAX_PADDING * sum(lengths))
    return np.array(keys, bytes if fits else object)


def write_index(parts: Sequence[Rows], append: Append) -> bytes:
    """Write the B-tree of entries by ``append``, which returns the place of a node; return the manifest.

    The keys of each part ascend, see `in_order`; those of several interleave. The files of values are relative to the
    database. Raise ValueError if two entries have one key."""
    merged = _Parts(parts)
    bounds, is_large = merged.cut(), merged.nbytes >= _COMPRESS_FROM_BYTES
    nodes = list[_Node]()
    for start, stop in itertools.pairwise(bounds):
        rows = in_order(merged.between(start, stop))
        nodes.append(_append_leaf(rows, append, is_root=len(bounds) == 2, compress=is_large))
    while len(nodes) > 1:
        nodes = _append_parents(nodes, append, compress=is_large)
    return _manifest(nodes[0])


class _Parts:
    """Entries of several databases, whose keys interleave; they are sorted a leaf node at a time."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        arrays = (keys if isinstance(keys, np.ndarray) else array_of(keys) for keys in (part.keys for part in parts))
        self._parts = [part._replace(keys=keys) for part, keys in zip(parts, arrays, strict=True)]
        self._sizes = [_nbytes(part) for part in self._parts]
        self.nbytes = sum(self._sizes)
        self._inline_rows = [np.flatnonzero(part.numbers < 0) for part in parts]
        self._files = [name for part in parts for name in part.files]
        self._first_files = np.cumsum([0, *(len(part.files) for part in parts)])[:-1]

    def cut(self) -> Any:
        """Return at which rows of each part leaf nodes begin, and the last ends."""
        bounds = np.array([[0] * len(self._parts), [len(part.keys) for part in self._parts]])
        if self.nbytes <= _NODE_BYTES:
            return bounds
        # Keys of each part, so many bytes apart, are an even sample of all keys.
        step = max(1, _NODE_BYTES // (_SAMPLES * len(self._parts)))
        sampled = [_sampled(part, size, step) for part, size in zip(self._parts, self._sizes, strict=True)]
        every = max(1, _NODE_BYTES // step)
        firsts = np.unique(np.sort(_joined_keys(sampled))[every::every])
        inner = np.array([part.keys.searchsorted(firsts) for part in self._parts], np.int64).T
        bounds = np.concatenate([bounds[:1], inner, bounds[1:]])
        return bounds[np.append(True, np.diff(bounds, axis=0).any(axis=1))]

    def between(self, starts: Any, stops: Any) -> Rows:
        """Return the entries between rows of each part, part after part."""
        some = [
            (self._parts[number], slice(starts[number], stops[number]), self._inline_rows[number])
            for number in np.flatnonzero(stops > starts)
        ]
        inline = [
            value
            for part, rows, inline_rows in some
            if len(inline_rows)
            for value in part.inline[slice(*inline_rows.searchsorted([rows.start, rows.stop]))]
        ]
        numbers = np.concatenate([part.numbers[rows] for part, rows, _ in some])
        return Rows(
            _joined_keys([part.keys[rows] for part, rows, _ in some]),
            np.concatenate([part.lengths[rows] for part, rows, _ in some]),
            np.where(numbers < 0, -1, numbers + np.repeat(self._first_files, stops - starts)),
            np.concatenate([part.offsets[rows] for part, rows, _ in some]),
            inline,
            self._files,
        )


def _nbytes(part: Rows) -> int:
    """Return about how many bytes the entries of a part take in leaf nodes."""
    keys = sum(map(len, part.keys)) if part.keys.dtype == object else np.count_nonzero(part.keys.view(np.uint8))
    return int(keys) + sum(map(len, part.inline)) + len(part.keys) * _ENTRY_BYTES


def _sampled(part: Rows, nbytes: int, step: int) -> Any:
    """Return keys that are ``step`` bytes of entries apart."""
    inline = np.cumsum(np.where(part.numbers < 0, part.lengths, 0), dtype=np.int64)
    count = len(part.keys)
    ends = inline + np.arange(1, count + 1) * ((nbytes - int(inline[-1])) // count)
    return part.keys[ends.searchsorted(np.arange(step, int(ends[-1]) + 1, step))]


def _joined_keys(arrays: Sequence[Any]) -> Any:
    if all(keys.dtype != object for keys in arrays):
        nbytes, count = sum(keys.nbytes for keys in arrays), sum(map(len, arrays))
        if count * max(keys.itemsize for keys in arrays) <= max(_PADDED_BYTES, _MAX_PADDING * nbytes):
            return np.concatenate(arrays)
    return array_of([bytes(key) for keys in arrays for key in keys])


def in_order(rows: Rows) -> Rows:
    """Return entries in the order of their keys."""
    order = _order_of(rows.keys)
    numbers, inline_rows = rows.numbers.take(order), np.flatnonzero(rows.numbers < 0)
    inline = [rows.inline[at] for at in inline_rows.searchsorted(order[numbers < 0]).tolist()]
    return Rows(rows.keys.take(order), rows.lengths.take(order), numbers, rows.offsets.take(order), inline, rows.files)


def _order_of(keys: Any, start: int = 0) -> Any:
    """Return which key comes first, and so on, of keys that begin with the same ``start`` bytes."""
    if keys.dtype == object or len(keys) < _MANY_KEYS or start > _MAX_SORTED_BYTES:
        return np.argsort(keys, kind="stable")
    words = _words(keys, start)
    while start + 8 < keys.itemsize and np.all(words == words[0]):
        start += 8
        words = _words(keys, start)
    n_common = 8 - (int((words ^ words[0]).max()).bit_length() + 7) // 8
    if n_common:
        start += n_common
        words = _words(keys, start)
    order = np.argsort(words)
    words = words.take(order)
    ends = np.append((words[1:] != words[:-1]).nonzero()[0] + 1, len(keys))
    starts = np.append(0, ends[:-1])
    alike = (ends > starts + 1).nonzero()[0].tolist()  # groups that eight bytes do not tell apart
    if len(alike) * _MANY_KEYS > len(keys) or len(ends) == 1:
        return np.argsort(keys, kind="stable")
    for number in alike:
        some = slice(starts[number], ends[number])
        group = order[some]
        order[some] = group.take(_order_of(keys.take(group), start + 8))
    return order


def _words(keys: Any, start: int) -> Any:
    """Return eight bytes of each key as a number, which is in the order of the bytes."""
    rows = keys.view(np.uint8).reshape(len(keys), -1)[:, start : start + 8]
    words = np.zeros((len(keys), 8), np.uint8)
    words[:, : rows.shape[1]] = rows
    return words.view(">u8").ravel().astype(np.uint64)


def _append_leaf(leaf: Rows, append: Append, *, is_root: bool, compress: bool) -> _Node:
    first, last = bytes(leaf.keys[0]), bytes(leaf.keys[-1])
    outside = leaf.numbers >= 0
    numbers = leaf.numbers[outside]
    used = np.flatnonzero(np.bincount(numbers))
    kinds, rank = np.where(outside, INDIRECT, INLINE), np.zeros(len(leaf.files), np.int32)
    rank[used] = np.arange(len(used))
    body = [
        _file_table([leaf.files[number] for number in used.tolist()]),
        varints([len(leaf.keys)]),
        *_front_coded(leaf.keys, 0 if is_root else _n_common(first, last)),
        varints(leaf.lengths),
        varints(kinds),
        varints(rank[numbers]),
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
    length = _HEADER + len(body) + CHECKSUM_NBYTES
    header = magic.to_bytes(4, "big") + length.to_bytes(8, "little") + bytes([VERSION, ZSTD if compress else PLAIN])
    data = header + body
    return with_checksum(data)


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
    """Encode sorted keys without their common prefix: what each shares with the one before, the lengths of the rest,
    and the rest."""
    itemsize = keys.itemsize if keys.dtype != object else max(map(len, keys))
    step = max(1, _PADDED_BYTES // max(itemsize, 1))
    first = bytes(keys[0])
    shared, own, suffixes = [], [np.array([len(first) - prefix])], [first[prefix:]]
    for start in range(0, len(keys) - 1, step):
        some = np.asarray(keys[start : start + step + 1], bytes)
        begin = min(_n_common(bytes(some[0]), bytes(some[-1])), some.itemsize - 1)
        # Only what is not common to all of them.
        rows = np.ascontiguousarray(some.view(np.uint8).reshape(len(some), -1)[:, begin:])
        differs = rows[1:] != rows[:-1]
        common = differs.argmax(1)
        twice = (~differs[np.arange(len(common)), common]).nonzero()[0]
        if len(twice):
            key = bytes(some[twice[0]]).decode("utf-8", "backslashreplace")
            raise ValueError(f"the key {key!r} would be in the index twice")
        lengths = rows.shape[1] - (rows != 0)[:, ::-1].argmax(1)
        lengths[0] = len(bytes(some[0])) - begin
        # Where a key has a zero, the shorter one before it may seem to have it too.
        common = np.minimum(common, np.minimum(lengths[1:], lengths[:-1]))
        places, stops, starts = (column.astype(np.uint16) for column in (np.arange(rows.shape[1]), lengths[1:], common))
        suffixes.append(rows[1:][(places >= starts[:, None]) & (places < stops[:, None])].tobytes())
        shared.append(common + (begin - prefix))
        own.append(lengths[1:] - common)
    return varints(np.concatenate(shared) if shared else []), varints(np.concatenate(own)), b"".join(suffixes)


def varints(numbers: Any) -> bytes:
    """Encode a column of numbers: 7 bits a byte, lowest first."""
    column = np.asarray(numbers)
    longest = int(column.max()) if len(column) else 0
    if longest < 0x80:
        return column.astype(np.uint8).tobytes()
    rest: Any = column.astype(np.uint32 if longest < 1 << 32 else np.uint64)
    n_septets = -(-longest.bit_length() // 7)
    septets, kept = np.empty((len(rest), n_septets), np.uint8), np.ones((len(rest), n_septets), bool)
    for place in range(n_septets):
        more = rest > 0x7F
        septets[:, place] = rest & 0x7F | more.astype(np.uint8) << 7
        kept[:, place + 1 : place + 2] = more[:, None]
        rest >>= 7
    encoded: bytes = (septets if kept.all() else septets[kept]).tobytes()
    return encoded


def _n_common(one: bytes, other: bytes) -> int:
    """Return how many bytes two names begin with alike."""
    shortest = min(len(one), len(other))
    return next((at for at in range(shortest) if one[at] != other[at]), shortest)
