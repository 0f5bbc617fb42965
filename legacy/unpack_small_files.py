"""Unpack a small local file of many small arrays or values at once, with the C unpacker of the msgpack library.

It takes half the time of `parse`. Whatever is not plain, damage included, is left to `parse`, which gives every error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]

from flax_ckpt_compat._core.backend import LeafHandle, Reader
from flax_ckpt_compat._core.local import memory_map
from flax_ckpt_compat._core.tree import Branch, Container, Path, PathLengths

from . import format, value_runs
from .checksummed_file import ChecksummedFile
from .read_bytes import File, MsgpackSource

# Bytes. The whole file is held in memory while the checkpoint is open.
_MAX_SIZE = 32 * 2**20
# A file with so many arrays in its first bytes, and no large one, is read whole; of others most bytes are skipped.
_SAMPLE, _MIN_ARRAYS = 16 * 2**10, 16
_SAMPLED = 16  # one byte in so many, of larger files
_HEADER = 128  # bytes around an array: names, shape, dtype; more than most have
_STR8 = 0xD9
# Tag of a value → bytes behind the tag: nil, booleans and numbers, and the lengths of maps and lists.
_BYTES_AFTER = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2}
_BYTES_AFTER |= {0xD2: 4, 0xD3: 8, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
# So many keys and values in so few bytes, as numbers are: read whole, too.
_MIN_VALUES = 1000
# A hostile file may announce more values than it has: the unpacker allocates space for them, and does not touch it.
_MOST_VALUES = 2**22
_TEXT = frozenset({str})
_UNKNOWN = None, b"", 0, -1
_ERRORS = (*format.DECODE_ERRORS, KeyError, MemoryError)


def unpack(source: MsgpackSource, reader: Reader, sums: ChecksummedFile | None = None) -> Branch | None:
    """Return the tree of handles, whose locators are the arrays' bytes; None if `parse` has to read the file."""
    if not isinstance(source, File) or source.size > _MAX_SIZE:
        return None
    samples = (source.look(size, 0) for size in (_SAMPLE, source.size // _SAMPLED) if size >= _SAMPLE)
    if not all(_has_many_values(sample[:_SAMPLE]) or _is_dense(sample) for sample in samples):
        return None
    data = source.look(source.size, 0)
    if sums is not None and not sums.is_verified:
        sums.verify_data(data)
    try:
        most = min(source.size, _MOST_VALUES)
        limits = {"max_array_len": most, "max_map_len": most}
        document = msgpack.unpackb(data, ext_hook=_ext_hook(), object_pairs_hook=_unique, **limits)
        return _tree(document, reader, PathLengths(source.size))
    except _ERRORS:
        return None


def _is_dense(head: bytes) -> bool:
    sizes: list[int] = []
    with contextlib.suppress(*_ERRORS):  # it ends in the middle of a value
        msgpack.unpackb(head, ext_hook=lambda _, payload: sizes.append(len(payload)), max_array_len=0)
    # Headers and keys, and what the bytes have of the last array.
    rest = len(head) - sum(sizes) - _HEADER * len(sizes)
    return len(sizes) >= _MIN_ARRAYS and max([*sizes, rest]) < memory_map.MIN_BYTES


def _has_many_values(head: bytes) -> bool:
    """Return whether the first bytes of a file are keys and values of a few bytes each."""
    at = count = 0
    while at < len(head):
        tag = head[at]
        if tag in _BYTES_AFTER:
            at += _BYTES_AFTER[tag]
        elif 0xA0 <= tag <= 0xBF:
            at += tag & 0x1F
        elif tag == _STR8:
            at += 1 + int.from_bytes(head[at + 1 : at + 2])
        elif not (tag <= 0x9F or tag >= 0xE0):
            break  # an array, bytes, or long text
        at += 1
        count += 1
    return count >= _MIN_VALUES


def _ext_hook() -> Callable[[int, bytes], Any]:
    """Return a function that decodes arrays to (header, data), and complex numbers."""
    # Code and first bytes → header, its bytes, and how long it and the payload are: most arrays share few headers.
    known: dict[tuple[int, bytes], tuple[format.ArrayHeader, bytes, int, int]] = {}

    def decode(code: int, payload: bytes) -> Any:
        key = code, payload[:12]
        header, text, start, length = known.get(key, _UNKNOWN)
        if length != len(payload) or not payload.startswith(text):
            if len(payload) >= memory_map.MIN_BYTES:
                raise ValueError("a large array, to read into place or to map")
            if code == format.EXT_COMPLEX:
                return format.parse_complex(payload)
            if code not in (format.EXT_ARRAY, format.EXT_NUMPY_SCALAR):
                raise ValueError(code)
            header = format.parse_array_header(code, payload, len(payload))
            start = len(header.text)
            known[key] = header, header.text, start, len(payload)
        return header, payload[start:]

    return decode


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _tree(document: Any, reader: Reader, lengths: PathLengths) -> Branch:
    """Replace the unpacked values by handles, and the dicts and lists by branches, in place."""
    if type(document) is not dict or document.keys() in (format.CHUNK_KEYS, format.KEY_KEYS):
        raise ValueError("no tree")
    # Key path, branch, and whether it is in a list: there, parts of arrays and of keys stay dicts.
    stack: list[tuple[Path, Branch, bool]] = []
    keys: list[tuple[dict[str, Any], Path]] = []  # maps of PRNG keys
    numbers, leaf_of = format.NUMBERS, value_runs.leaf_of(reader)

    def branch_of(values: Any, path: Path, in_list: bool) -> Branch:
        if len(path) >= format.MAX_DEPTH or (not in_list and values.keys() == format.CHUNK_KEYS):
            raise ValueError("too deep, or an array in chunks")
        if type(values) is dict and not _TEXT.issuperset(map(type, values)):
            raise TypeError("a key that is not text")
        lengths.add(path, len(values))
        branch = value_runs.branch_of(values, path, leaf_of)
        if branch is None:
            is_list = type(values) is list
            children = dict(zip(map(str, range(len(values))), values, strict=True)) if is_list else values
            branch = Branch(children, Container.LIST if is_list else Container.DICT)
            stack.append((path, branch, in_list or is_list))
        return branch

    root = branch_of(document, (), False)
    while stack:
        parent, branch, in_list = stack.pop()
        children = branch.children
        for key, value in children.items():
            path = (*parent, key)
            kind = type(value)
            if kind is tuple:
                header, data = value
                children[key] = LeafHandle(
                    path, header.kind, header.shape, header.dtype, header.nbytes, None, reader, data
                )
            elif (number := numbers.get(kind)) is not None:
                children[key] = LeafHandle(path, number[0], (), None, number[1], None, reader, value)
            elif kind is dict or kind is list:
                if kind is dict and not in_list and value.keys() == format.KEY_KEYS:
                    keys.append((children, path))
                children[key] = branch_of(value, path, in_list or kind is list)
            elif value is not None:
                children[key] = leaf_of(path, value)
    for children, path in keys:
        branch = children[path[-1]]
        children[path[-1]] = format.prng_key(branch, path) or branch
    return root
