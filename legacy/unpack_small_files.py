"""Unpack a small file at once, with the C unpacker of the msgpack library.

It takes half the time of `parse`. Whatever is not plain, damage included, is left to `parse`, which gives every error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]

from flax_ckpt_compat._core.backend import LeafHandle, Reader
from flax_ckpt_compat._core.tree import Branch, Container, Path, PathLengths

from . import format

_TEXT = frozenset({str})
_UNKNOWN = None, b"", 0, -1
_ERRORS = (*format.DECODE_ERRORS, KeyError, MemoryError)


def unpack(data: bytes, reader: Reader) -> Branch | None:
    """Return the tree of handles of a file, whose locators are the arrays' bytes; None if `parse` has to read it."""
    # A hostile file may announce more values than it has: the unpacker allocates space for them, and does not touch it.
    limits = {"max_array_len": len(data), "max_map_len": len(data)}
    try:
        document = msgpack.unpackb(data, ext_hook=_ext_hook(), object_pairs_hook=_unique, **limits)
        return _tree(document, reader, PathLengths(len(data)))
    except _ERRORS:
        return None


def _ext_hook() -> Callable[[int, bytes], Any]:
    """Return a function that decodes arrays to (header, data), and complex numbers."""
    # Code and first bytes → header, its bytes, and how long it and the payload are: most arrays share few headers.
    known: dict[tuple[int, bytes], tuple[format.ArrayHeader, bytes, int, int]] = {}

    def decode(code: int, payload: bytes) -> Any:
        key = code, payload[:12]
        header, text, start, length = known.get(key, _UNKNOWN)
        if length != len(payload) or not payload.startswith(text):
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
    numbers, leaf_of = format.NUMBERS, format.maker_of_values(reader)

    def branch_of(values: Any, path: Path, in_list: bool) -> Branch:
        if len(path) >= format.MAX_DEPTH or (not in_list and values.keys() == format.CHUNK_KEYS):
            raise ValueError("too deep, or an array in chunks")
        if type(values) is dict and not _TEXT.issuperset(map(type, values)):
            raise TypeError("a key that is not text")
        lengths.add(path, len(values))
        branch = format.run_of(values, path, leaf_of)
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
