"""Decode a msgpack file to a tree of leaf handles, with the C unpacker of the msgpack library.

It unpacks small files as they are, and of others the skeleton, in which references stand for arrays.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]

from flax_ckpt_compat._core.backend import KIND_OF_TYPE, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import CheckpointError, NameCollisionError
from flax_ckpt_compat._core.tree import Branch, Container, Node, Numbers, Path, from_leaves, show_path

from . import format, gda_read
from .find_arrays import TOO_DEEP, Scanner, Window
from .format import ArrayHeader, FileRanges

_Array = tuple[ArrayHeader, FileRanges]
_TEXT = frozenset({str})
_NUMBERS = frozenset({*format.NUMBER_NBYTES, type(None)})
_KIND_OF: dict[type, LeafKind] = {**KIND_OF_TYPE, bytes: LeafKind.BYTES}
_TUPLE = object()  # begins a list that stands for a tuple
# Bytes of key paths: as many as any tree may have, per byte of the file, and per name, as text and in a tuple. Paths of
# real trees take up to ten times their file, and a few names near the root can make them far longer.
_LEAST_PATH_BYTES, _PATH_BYTES_RATIO, _BYTES_PER_NAME = 64 * 2**20, 64, 9
_UNKNOWN = None, b"", 0, -1
_ERRORS = (*format.DECODE_ERRORS, KeyError, MemoryError)


def parse(window: Window, reader: Reader, *, of_orbax: bool = False) -> Node:
    """Parse the whole document; raise CorruptCheckpointError if it does not decode.

    Int keys become names listed in ``int_keys``; other keys that are not text, and duplicate keys, are errors. Only a
    file ``of_orbax`` may hold tuples. The arrays of a file that the window holds whole are the bytes in it."""
    if len(window.data) == window.size and not of_orbax:
        with contextlib.suppress(*_ERRORS):  # whatever is wrong, the scanner finds it
            return _Tree(reader, window.size).of(_unpacked(window.data))
    with _naming_damage(window):
        scanner = Scanner(window, of_orbax=of_orbax)
        scanner.value()
        rest = window.size - window.base - window.at
        if rest:
            raise window.corrupt(f"{rest} bytes behind the end of the document")
        return _Tree(reader, window.size).of(_unpacked(scanner.skeleton, scanner.found))


def parse_stream(window: Window, reader: Reader) -> Node:
    """Return the tree of a stream of msgpack objects, each a key path and the bytes of a document; see `parse`."""
    scanner, count = Scanner(window), 0
    with _naming_damage(window):
        while window.base + window.at < window.size:
            if window.tag() != 0x92:  # at once: all that follows would be scanned
                raise window.corrupt("an object that is no pair of a key path and bytes")
            scanner.value()
            count += 1
        pairs = _unpacked(msgpack.Packer().pack_array_header(count) + scanner.skeleton, scanner.found)
        tree, leaves = _Tree(reader, window.size), dict[Path, Any]()
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2 or type(pair[1]) is not tuple:
                raise ValueError("an object that is no pair of a key path and bytes")
            path = tuple(pair[0]) if type(pair[0]) is list else (pair[0],)
            if not _TEXT.issuperset(map(type, path)):
                raise ValueError("a name in a key path that is not text")
            if len(path) > format.MAX_DEPTH:
                raise ValueError(f"a key path of more than {format.MAX_DEPTH} names")
            if path in leaves:
                raise ValueError(f"{show_path(path)} twice")
            tree.add(leaves, path, path, _inner_value(window, pair[1]))
        tree.finish()
        return from_leaves(leaves)


def _inner_value(window: Window, document: _Array) -> Any:
    """Return the value of the document that some bytes of a file are."""
    header, where = document
    inner = Window(window.source)
    ((inner.at, nbytes),) = where.ranges
    scanner, end = Scanner(inner), inner.at + nbytes
    scanner.value()
    if header.kind is not LeafKind.BYTES or inner.base + inner.at != end:
        raise ValueError(f"a leaf that is not bytes, or a value in it that ends at another byte than {end}")
    return _unpacked(scanner.skeleton, scanner.found)


@contextlib.contextmanager
def _naming_damage(window: Window) -> Iterator[None]:
    """Raise CorruptCheckpointError for what does not decode."""
    try:
        yield
    except IndexError as error:
        found = "the end of the file in the middle of a value; it is truncated"
        raise window.corrupt(found, window.size - window.base) from error
    except (NameCollisionError, ValueError) as error:
        if isinstance(error, CheckpointError) and not isinstance(error, NameCollisionError):
            raise
        raise window.corrupt(TOO_DEEP if isinstance(error, msgpack.StackError) else str(error)) from error


def _unpacked(data: bytes | bytearray, found: Sequence[_Array] | None = None) -> Any:
    """Unpack a document, or a skeleton; its arrays become pairs of a header, and of bytes or of where they are."""
    # Code and first bytes → header, its bytes, and how long it and the payload are: most arrays share few headers.
    known: dict[tuple[int, bytes], tuple[ArrayHeader | None, bytes, int, int]] = {}

    def decode(code: int, payload: bytes) -> Any:
        if found is not None and code == format.REFERENCE:
            return found[int.from_bytes(payload)] if payload != format.NO_INDEX else _TUPLE
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

    return msgpack.unpackb(data, ext_hook=decode, object_pairs_hook=_unique, strict_map_key=False)


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    try:
        found = dict(pairs)
    except TypeError as error:
        raise ValueError(f"a map key that is neither text nor int ({error})") from error
    if len(found) != len(pairs):
        ((name, _),) = collections.Counter([name for name, _ in pairs]).most_common(1)
        raise ValueError(f"the key {name!r} twice")
    return found


class _Tree:
    """Replaces unpacked values by handles, and dicts and lists by branches, in place."""

    def __init__(self, reader: Reader, size: int):
        self._reader, self._path_bytes_left = reader, max(_LEAST_PATH_BYTES, _PATH_BYTES_RATIO * size)
        # Branches whose children are still values, with their key paths and whether they are in a list: there, parts of
        # arrays and of keys stay dicts.
        self._stack: list[tuple[Path, Branch, bool]] = []
        self._parts: list[tuple[dict[Any, Any], Any, Path]] = []  # where maps are that hold these parts

    def of(self, document: Any) -> Node:
        """Return the tree of a document."""
        root: dict[Any, Any] = {}
        self.add(root, "", (), document)
        self.finish()
        return root[""]

    def add(self, parent: dict[Any, Any], key: Any, path: Path, value: Any, in_list: bool = False) -> None:
        """Put the node of a value into its parent; `finish` completes it."""
        kind = type(value)
        if kind is tuple:
            header, data = value
            parent[key] = LeafHandle(
                path, header.kind, header.shape, header.dtype, header.nbytes, None, self._reader, data
            )
        elif kind is dict or kind is list:
            if not in_list and kind is dict and value.keys() in (format.KEY_KEYS, format.CHUNK_KEYS):
                self._parts.append((parent, key, path))
            parent[key] = self._branch(path, value, in_list)
        elif kind is str and value.startswith(format.PLACEHOLDER):
            array = gda_read.locate(self._reader.location, value.removeprefix(format.PLACEHOLDER), path)
            about = LeafKind.ARRAY, array.shape, array.dtype, array.nbytes, None, self._reader, array
            parent[key] = LeafHandle(path, *about, in_gda_folder=True)
        elif value is not None:
            nbytes = format.NUMBER_NBYTES.get(kind) or len(value)
            parent[key] = LeafHandle(path, _KIND_OF[kind], (), None, nbytes, None, self._reader, value)
        else:
            parent[key] = None

    def finish(self) -> None:
        """Complete all branches that were added."""
        while self._stack:
            parent, branch, in_list = self._stack.pop()
            for key, value in branch.children.items():
                if value is not None:
                    self.add(branch.children, key, (*parent, key), value, in_list)
        for holder, key, path in reversed(self._parts):
            branch = holder[key]
            is_key = branch.children.keys() == format.KEY_KEYS
            try:
                leaf = (format.prng_key if is_key else format.chunked_array)(branch, path)
            except ValueError as error:
                raise ValueError(f"{error} in {show_path(path)}") from None
            holder[key] = branch if leaf is None else leaf

    def _branch(self, path: Path, values: Any, in_list: bool) -> Branch:
        if len(path) >= format.MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        container, int_keys = Container.DICT, frozenset[str]()
        if type(values) is list:
            container, in_list = Container.LIST, True
            if values and values[0] is _TUPLE:
                container, values = Container.TUPLE, values[1]
                if type(values) is not list:
                    raise ValueError(f"a tuple in {show_path(path)} that is not a msgpack array")
        elif not _TEXT.issuperset(map(type, values)):
            values, int_keys = _named(values, path)
        self._path_bytes_left -= len(values) * (sum(map(len, path)) + _BYTES_PER_NAME * len(path))
        if self._path_bytes_left < 0:
            raise ValueError(f"key paths far longer than the file, for {len(values)} values in {show_path(path):.100}")
        found = values if type(values) is list else values.values()
        if found and _NUMBERS.issuperset(map(type, found)) and container is not Container.TUPLE and not int_keys:
            return Numbers(container, values, functools.partial(self._leaves, path, values))
        if type(values) is list:
            values = dict(zip(map(str, range(len(values))), values, strict=True))
        branch = Branch(values, container, int_keys)
        self._stack.append((path, branch, in_list))
        return branch

    def _leaves(self, path: Path, values: dict[str, Any] | list[Any]) -> dict[str, Node]:
        leaves = dict[str, Node]()
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            self.add(leaves, str(name), (*path, str(name)), value)
        return leaves


def _named(values: dict[Any, Any], path: Path) -> tuple[dict[str, Any], frozenset[str]]:
    """Return a dict with names for its keys, and which of them were ints."""
    for key in values:
        if type(key) not in (str, int):
            raise ValueError(f"a map key in {show_path(path)} that is neither text nor int ({key!r:.40})")
    named = {str(key): value for key, value in values.items()}
    int_keys = frozenset([str(key) for key in values if type(key) is int])
    if len(named) != len(values):
        raise ValueError(f"the key {next(name for name in values if name in int_keys)!r} twice in {show_path(path)}")
    return named, int_keys
