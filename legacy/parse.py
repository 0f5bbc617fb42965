"""Parse a msgpack file into a tree of leaf handles; skip array data without decoding it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import NameCollisionError
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, PathLengths, from_leaves, show_path

from . import format, gda_read
from .format import ArrayHeader, FileRanges
from .read_bytes import Window

_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
# Tag of an extension → bytes of its length field.
_EXT_WIDTHS = {0xC7: 1, 0xC8: 2, 0xC9: 4} | dict.fromkeys(_FIXEXT, 0)
_FLOAT32, _FLOAT64, _FIRST_INT, _LAST_INT = 0xCA, 0xCB, 0xCC, 0xD3
# Tag of a number → bytes with the tag; 1 for all others.
_NUMBER_WIDTHS = dict(zip(range(_FLOAT32, _LAST_INT + 1), (5, 9, 2, 3, 5, 9, 2, 3, 5, 9), strict=True))
# Values that are decoded at once; for fewer, it takes longer than one by one.
_MIN_RUN = 16
# Bytes of a header that key the header cache: tag, length, code, and in short ones the start of the shape.
_PREFIX = 6


# Bytes of a text, at least, that is no reason to decode one by one.
_SHORT_VALUE = 256
# Of an unpacker that fails at the head of a container, so that no value is decoded twice, and behind arrays and bytes.
_VALUES_ONLY = dict.fromkeys(("max_array_len", "max_map_len", "max_bin_len", "max_ext_len"), 0)
_VALUES_ONLY |= {"max_str_len": 2**16, "max_buffer_size": 0, "read_size": 2**10}


def _mapping(pairs: list[Any]) -> dict[str, Any]:
    """Return the dict of names and values by turns; raise ValueError for other keys, or one twice."""
    found = dict(zip(pairs[::2], pairs[1::2], strict=True))
    if len(found) * 2 != len(pairs) or set(map(type, found)) != {str}:
        raise ValueError("a key twice, or one that is not text")
    return found


@dataclasses.dataclass(slots=True)
class _Frame:
    """A map or list whose children are being read."""

    branch: Branch
    remaining: int
    path: Path
    is_map: bool
    in_list: bool
    int_keys: list[str] = dataclasses.field(default_factory=list)


def parse(window: Window, reader: Reader, *, of_orbax: bool = False) -> Node:
    """Parse the whole document; raise CorruptCheckpointError, with the byte offset, if it does not decode.

    Maps become DICT branches, msgpack arrays LIST branches. Int keys become names listed in ``int_keys``. Other keys
    that are not text, and duplicate keys, are errors. Only a file ``of_orbax``, part of a directory, may hold tuples.
    """
    with naming_damage(window):
        return _Parser(window, reader, of_orbax).document()


@contextlib.contextmanager
def naming_damage(window: Window) -> Iterator[None]:
    """Raise CorruptCheckpointError for a file that ends in the middle of a value, or text that is not UTF-8."""
    try:
        yield
    except IndexError as error:
        found = "the end of the file in the middle of a value; it is truncated"
        raise window.corrupt(found, window.size - window.base) from error
    except UnicodeDecodeError as error:
        raise window.corrupt(f"text that is not UTF-8 ({error})") from error


def parse_stream(window: Window, reader: Reader) -> Node:
    """Return the tree of all leaves; raise CorruptCheckpointError, with the byte offset, if it does not decode."""
    with naming_damage(window):
        return _StreamParser(window, reader).stream()


class _Parser:
    """One pass over one document: a loop with an explicit stack, so that depth costs no Python stack."""

    def __init__(self, window: Window, reader: Reader, of_orbax: bool = False):
        self._window = window
        self._reader = reader
        self._of_orbax = of_orbax
        self._stack: list[_Frame] = []
        self._headers: dict[bytes, ArrayHeader] = {}
        self._lengths = PathLengths(window.size)
        self._leaf_of = format.maker_of_values(reader)

    def document(self) -> Node:
        """Parse one document, which is the whole file."""
        window = self._window
        if window.at > window.fresh_until:
            window.refill()
        root = self.value(())
        end = window.base + window.at
        if end != window.size:
            raise window.corrupt(f"{window.size - end} bytes behind the end of the document")
        return root

    def value(self, path: Path) -> Node:
        """Parse the value at the window's position, and all in it."""
        stack = self._stack
        root = self._value(path, False)
        while stack:
            frame = stack[-1]
            if frame.remaining:
                self._fill(frame)
                continue
            stack.pop()
            leaf = self._close(frame)
            if leaf is not None and stack:
                stack[-1].branch.children[frame.path[-1]] = leaf
            elif leaf is not None:
                root = leaf
        return root

    def _fill(self, frame: _Frame) -> None:
        """Read children until one of them is a container or none remain."""
        children, is_map, stack, window = frame.branch.children, frame.is_map, self._stack, self._window
        depth, parent, headers = len(stack), frame.path, self._headers
        while frame.remaining:
            frame.remaining -= 1
            if window.at > window.fresh_until:
                window.refill()
            name = self._key(frame) if is_map else str(len(children))
            path = (*parent, name)
            # Fast path: most arrays of a checkpoint share few headers.
            data, at = window.data, window.at
            header = headers.get(data[at : at + _PREFIX])
            if (
                header is not None
                and data.startswith(header.text, at)
                and window.base + at + len(header.text) + header.nbytes <= window.size
            ):
                children[name] = self._handle(header, at, path)
                continue
            children[name] = self._value(path, frame.in_list)
            if len(stack) != depth:
                return

    def _close(self, frame: _Frame) -> LeafHandle | None:
        """Return the leaf that a complete map encodes, or None."""
        branch = frame.branch
        if frame.int_keys:
            branch.int_keys = frozenset(frame.int_keys)
        # Flax joins chunked arrays inside maps only, never inside msgpack lists.
        if frame.in_list:
            return None
        if branch.children.keys() == format.KEY_KEYS:
            return format.prng_key(branch, frame.path)
        try:
            return format.chunked_array(branch, frame.path) if branch.children.keys() == format.CHUNK_KEYS else None
        except ValueError as error:
            raise self._window.corrupt(f"{error} in {show_path(frame.path)}") from None

    def _key(self, frame: _Frame) -> str:
        window = self._window
        start = window.at
        tag = window.data[start]
        if 0xA0 <= tag <= 0xBF:
            end = start + 1 + (tag & 0x1F)
            name = str(window.data[start + 1 : end], "utf-8")
            window.at = end
        elif 0xD9 <= tag <= 0xDB:
            name = self._text(tag)
        elif tag <= 0x7F or tag >= 0xE0 or _FIRST_INT <= tag <= _LAST_INT:
            name = str(self._scalar(tag))
            frame.int_keys.append(name)
        else:
            raise window.corrupt(f"a map key in {show_path(frame.path)} that is neither text nor int (0x{tag:02x})")
        if name in frame.branch.children:
            raise window.corrupt(f"the key {name!r} twice in {show_path(frame.path)}")
        return name

    def _value(self, path: Path, in_list: bool) -> Node:
        tag = self._window.data[self._window.at]
        if 0x80 <= tag <= 0x9F or 0xDC <= tag <= 0xDF:
            return self._container(tag, path, in_list)
        if tag in _EXT_WIDTHS:
            return self._extension(tag, path, in_list)
        return self._native(tag, path)

    def _extension(self, tag: int, path: Path, in_list: bool) -> Node:
        window = self._window
        data, at = window.data, window.at
        width = _EXT_WIDTHS[tag]
        length = int.from_bytes(data[at + 1 : at + 1 + width]) if width else _FIXEXT[tag]
        code = data[at + 1 + width]
        window.at = at + 2 + width
        if code in (format.EXT_ARRAY, format.EXT_NUMPY_SCALAR):
            return self._array(at, code, length, path)
        if code == format.EXT_COMPLEX:
            payload = window.take(length)
            try:
                return self._leaf(LeafKind.COMPLEX, 16, path, format.parse_complex(payload))
            except format.DECODE_ERRORS as error:
                raise window.corrupt(f"{length} bytes that are not a complex number: {error}") from error
        if code == format.EXT_TUPLE and self._of_orbax:
            return self._tuple(length, path, in_list)
        raise window.corrupt(f"extension code {code}, which no release of Flax writes, in {show_path(path)}")

    def _tuple(self, length: int, path: Path, in_list: bool) -> Branch:
        window = self._window
        window.end_of(length)
        tag = window.data[window.at]
        if not (0x90 <= tag <= 0x9F or tag in (0xDC, 0xDD)):
            raise window.corrupt(f"a tuple in {show_path(path)} that is not a msgpack array (0x{tag:02x})")
        branch = self._container(tag, path, in_list)
        branch.container = Container.TUPLE
        return branch

    def _array(self, start: int, code: int, length: int, path: Path) -> LeafHandle:
        """Parse an array whose extension header starts at ``start``."""
        window = self._window
        window.end_of(length)
        head = window.data[window.at : window.at + min(length, format.MAX_HEADER)]
        try:
            header = format.parse_array_header(code, head, length)
        except format.DECODE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise window.corrupt(f"an array that does not decode in {show_path(path)}: {reason}") from error
        header.text = window.data[start : window.at] + header.text
        self._headers[header.text[:_PREFIX]] = header
        return self._handle(header, start, path)

    def _handle(self, header: ArrayHeader, start: int, path: Path) -> LeafHandle:
        """Return the array whose header starts at ``start``, and move the window past its data."""
        window = self._window
        data_at = start + len(header.text)
        window.at = data_at + header.nbytes
        kind, shape, dtype, nbytes = header.kind, header.shape, header.dtype, header.nbytes
        found = FileRanges(((window.base + data_at, nbytes),))
        return LeafHandle(path, kind, shape, dtype, nbytes, None, self._reader, found)

    def _container(self, tag: int, path: Path, in_list: bool) -> Branch:
        window = self._window
        if tag <= 0x9F:
            count, is_map = tag & 0x0F, tag <= 0x8F
            window.at += 1
        else:
            count, is_map = self._length(2 << (tag & 1)), tag >= 0xDE
        # Every child and every key takes at least one byte, so reject a count that cannot fit into the file.
        if window.base + window.at + count * (1 + is_map) > window.size:
            raise window.corrupt(f"a container of {count} values; the file is too short for them, it is truncated")
        if len(self._stack) >= format.MAX_DEPTH:
            raise window.corrupt(f"more than {format.MAX_DEPTH} nested containers")
        try:
            self._lengths.add(path, count)
        except ValueError as error:
            raise window.corrupt(str(error)) from None
        if count >= _MIN_RUN and not self._of_orbax:
            run = self._run(count, path, is_map)
            if run is not None:
                return run
        branch = Branch({}) if is_map else Branch({}, Container.LIST)
        self._stack.append(_Frame(branch, count, path, is_map, in_list or not is_map))
        return branch

    def _run(self, count: int, path: Path, is_map: bool) -> Branch | None:
        """Decode all children of a container, whose header was read, if they are Python values; else return None."""
        window, values, wanted = self._window, list[Any](), count * (1 + is_map)
        unpacker = msgpack.Unpacker(**_VALUES_ONLY)
        try:
            for piece in window.ahead():
                unpacker.feed(piece)
                found = list(itertools.islice(unpacker, wanted - len(values)))
                values += found
                if len(values) == wanted:
                    branch = format.run_of(_mapping(values) if is_map else values, path, self._leaf_of)
                    if branch is not None:
                        window.skip(unpacker.tell())
                    return branch
                if not found and len(piece) > _SHORT_VALUE:
                    break  # the bytes are a part of an array, or long text
        except format.DECODE_ERRORS:  # `_fill` finds out what is wrong, if anything is
            pass
        return None

    def _native(self, tag: int, path: Path) -> LeafHandle | None:
        window = self._window
        if 0xA0 <= tag <= 0xBF or 0xD9 <= tag <= 0xDB:
            text = self._text(tag)
            if text.startswith(format.PLACEHOLDER):
                return self._reference(text.removeprefix(format.PLACEHOLDER), path)
            return self._leaf(LeafKind.STR, len(text), path, text)
        if 0xC4 <= tag <= 0xC6:
            length = self._length(1 << (tag - 0xC4))
            offset = window.base + window.at
            window.at = window.end_of(length)
            return self._leaf(LeafKind.BYTES, length, path, FileRanges(((offset, length),)))
        if tag == 0xC1:
            raise window.corrupt("the byte 0xc1, which msgpack never uses")
        value = self._scalar(tag)
        return None if value is None else self._leaf(*format.NUMBERS[type(value)], path, value)

    def _reference(self, subpath: str, path: Path) -> LeafHandle:
        array = gda_read.locate(self._reader.location, subpath, path)
        handle = self._leaf(LeafKind.ARRAY, array.nbytes, path, array)
        handle.shape, handle.dtype, handle.in_gda_folder = array.shape, array.dtype, True
        return handle

    def _leaf(self, kind: LeafKind, nbytes: int, path: Path, value: Any) -> LeafHandle:
        return LeafHandle(path, kind, (), None, nbytes, None, self._reader, value)

    def _text(self, tag: int) -> str:
        window = self._window
        if tag <= 0xBF:
            window.at += 1
            return str(window.take(tag & 0x1F), "utf-8")
        return str(window.take(self._length(1 << (tag - 0xD9))), "utf-8")

    def _scalar(self, tag: int) -> Any:
        """Read nil, a bool or a number."""
        if tag <= 0x7F or tag >= 0xE0:
            self._window.at += 1
            return tag if tag <= 0x7F else tag - 0x100
        width = _NUMBER_WIDTHS.get(tag, 1)
        return msgpack.unpackb(self._header_bytes(width))

    def _length(self, width: int) -> int:
        """Read the tag and a length field of ``width`` bytes."""
        return int.from_bytes(self._header_bytes(1 + width)[1:])

    def _header_bytes(self, length: int) -> bytes:
        window = self._window
        found = window.data[window.at : window.at + length]
        if len(found) < length:
            raise IndexError("the file ends")
        window.at += length
        return found


# The header of an object in a stream, and those of bytes.
_PAIR = 0x92
_BINS = range(0xC4, 0xC7)


class _StreamParser(_Parser):
    """One pass over a stream of msgpack objects, each a key path and the bytes of a document, as EasyLM writes it."""

    def stream(self) -> Node:
        window, leaves, lengths = self._window, dict[Path, Node](), PathLengths(self._window.size)
        while window.base + window.at < window.size:
            if window.at > window.fresh_until:
                window.refill()
            path, end = self._key_path(), self._end()
            if path in leaves:
                raise window.corrupt(f"{show_path(path)} twice")
            try:
                lengths.add(path, 1)
            except ValueError as error:
                raise window.corrupt(str(error)) from None
            leaves[path] = self.value(path)
            if window.base + window.at != end:
                raise window.corrupt(f"a value of {show_path(path)} that ends at another byte than {end}")
        try:
            return from_leaves(leaves)
        except NameCollisionError as error:
            raise window.corrupt(str(error)) from None

    def _key_path(self) -> Path:
        """Read the beginning of an object, and its key path: a list of names, or one name."""
        window = self._window
        if window.data[window.at] != _PAIR:
            raise window.corrupt("an object that is no pair of a key path and bytes")
        window.at += 1
        tag = window.data[window.at]
        if 0x90 <= tag <= 0x9F:
            window.at += 1
            count = tag & 0x0F
        elif tag == 0xDC:
            count = self._length(2)
        else:
            return (self._name(),)
        if count > format.MAX_DEPTH:
            raise window.corrupt(f"a key path of more than {format.MAX_DEPTH} names")
        return tuple([self._name() for _ in range(count)])

    def _name(self) -> str:
        window = self._window
        tag = window.data[window.at]
        if not (0xA0 <= tag <= 0xBF or 0xD9 <= tag <= 0xDB):
            raise window.corrupt(f"a name in a key path that is not text (0x{tag:02x})")
        return self._text(tag)

    def _end(self) -> int:
        """Read the header of the bytes of a leaf; return where they end in the file."""
        window = self._window
        tag = window.data[window.at]
        if tag not in _BINS:
            raise window.corrupt(f"a leaf that is not bytes (0x{tag:02x})")
        length = self._length(1 << (tag - _BINS.start))
        if window.at > window.fresh_until:
            window.refill()
        return window.base + window.end_of(length)
