"""Unpack a small local file of many small arrays at once, with the C unpacker of the msgpack library.

It takes half the time of `parse`. Whatever is not plain, damage included, is left to `parse`, which gives every error.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack  # type: ignore[import-untyped]

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.local import memory_map
from flax_ckpt_compat._core.tree import Branch, Path, PathLengths

from . import format
from .checksummed_file import ChecksummedFile
from .read_bytes import File, Source

# Bytes. The whole file is held in memory while the checkpoint is open.
_MAX_SIZE = 32 * 2**20
# A file with so many arrays in its first bytes, and no large one, is read whole; of others most bytes are skipped.
_SAMPLE, _MIN_ARRAYS = 16 * 2**10, 16
_SAMPLED = 16  # one byte in so many, of larger files
_HEADER = 128  # bytes around an array: names, shape, dtype; more than most have
# A hostile file may announce more values than it has, and the unpacker allocates space for them.
_LIMITS = {"max_array_len": 0, "max_map_len": 2**16}
_ERRORS = (*format.DECODE_ERRORS, KeyError, MemoryError)


def unpack(source: Source, reader: Reader, sums: ChecksummedFile | None = None) -> Branch | None:
    """Return the tree of handles, whose locators are the arrays' bytes; None if `parse` has to read the file."""
    if not isinstance(source, File) or source.size > _MAX_SIZE:
        return None
    if not all(_is_dense(source.read(size, 0)) for size in (_SAMPLE, source.size // _SAMPLED) if size >= _SAMPLE):
        return None
    data = source.read(source.size, 0)
    if sums is not None and not sums.is_verified:
        sums.verify_data(data)
    try:
        document = msgpack.unpackb(data, ext_hook=_ExtHook(), object_pairs_hook=_unique, **_LIMITS)
        return _tree(document, reader, PathLengths(source.size))
    except _ERRORS:
        return None


def _is_dense(head: bytes) -> bool:
    sizes: list[int] = []
    with contextlib.suppress(*_ERRORS):  # it ends in the middle of a value
        msgpack.unpackb(head, ext_hook=lambda _, payload: sizes.append(len(payload)), **_LIMITS)
    # Headers and keys, and what the bytes have of the last array.
    rest = len(head) - sum(sizes) - _HEADER * len(sizes)
    return len(sizes) >= _MIN_ARRAYS and max([*sizes, rest]) < memory_map.MIN_BYTES


class _ExtHook:
    """Decode arrays to (header, data), and complex numbers."""

    def __init__(self) -> None:
        self._headers: dict[tuple[int, bytes], format.ArrayHeader] = {}

    def __call__(self, code: int, payload: bytes) -> Any:
        if len(payload) >= memory_map.MIN_BYTES:
            raise ValueError("a large array, to read into place or to map")
        key = code, payload[:12]  # most arrays of a checkpoint share few headers
        header = self._headers.get(key)
        if header is None or not payload.startswith(header.text) or len(payload) != len(header.text) + header.nbytes:
            if code == format.EXT_COMPLEX:
                return format.parse_complex(payload)
            if code not in (format.EXT_ARRAY, format.EXT_NUMPY_SCALAR):
                raise ValueError(code)
            header = self._headers[key] = format.parse_array_header(code, payload, len(payload))
        return header, payload[len(header.text) :]


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _tree(document: Any, reader: Reader, lengths: PathLengths) -> Branch:
    """Replace the unpacked values by handles, and the dicts by branches, in place."""
    if type(document) is not dict or document.keys() in (format.CHUNK_KEYS, format.KEY_KEYS):
        raise ValueError("no tree")
    stack: list[tuple[Path, dict[str, Any]]] = [((), document)]
    keys = []  # maps of PRNG keys
    while stack:
        parent, children = stack.pop()
        lengths.add(parent, len(children))
        for key, value in children.items():
            if type(key) is not str:
                raise TypeError("a key that is not text")
            path = (*parent, key)
            kind = type(value)
            if kind is tuple:
                header, data = value
                children[key] = LeafHandle(
                    path, header.kind, header.shape, header.dtype, header.nbytes, None, reader, data
                )
            elif kind is dict:
                if len(path) >= format.MAX_DEPTH or value.keys() == format.CHUNK_KEYS:
                    raise ValueError("too deep, or an array in chunks")
                if value.keys() == format.KEY_KEYS:
                    keys.append((children, path))
                children[key] = Branch(value)
                stack.append((path, value))
            elif value is not None:
                children[key] = _leaf(value, path, reader)
    for children, path in keys:
        branch = children[path[-1]]
        children[path[-1]] = format.prng_key(branch, path) or branch
    return Branch(document)


def _leaf(value: Any, path: Path, reader: Reader) -> LeafHandle:
    if type(value) is str and not value.startswith(format.PLACEHOLDER):
        kind, nbytes = LeafKind.STR, len(value)
    elif type(value) is bytes:
        kind, nbytes = LeafKind.BYTES, len(value)
    else:
        kind, nbytes = format.NUMBERS[type(value)]
    return LeafHandle(path, kind, (), None, nbytes, None, reader, value)
