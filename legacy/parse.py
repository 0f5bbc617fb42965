"""Bytes of a msgpack file → tree of leaf handles; array data is skipped over, never decoded."""

from __future__ import annotations

import struct
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, show_path

from . import format, gda_read
from .headers import ArrayHeader, as_single_leaf, parse_array_header, parse_complex
from .window import Window

_INTS = {
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_FLOATS = {0xCA: struct.Struct(">f"), 0xCB: struct.Struct(">d")}
_LENGTHS = (struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I"))
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
# Enough of a header to look it up by: tag, length, code, and in short ones the start of the shape.
_PREFIX = 6
_EXT_WIDTHS = {0xC7: 1, 0xC8: 2, 0xC9: 4} | dict.fromkeys(_FIXEXT, 0)


class _Frame:
    """A map or list whose children are being read."""

    __slots__ = ("branch", "home", "in_list", "int_keys", "keyed", "left", "name", "path")

    def __init__(self, branch: Branch, left: int, path: Path, keyed: bool, in_list: bool):
        self.branch = branch
        self.left = left
        self.path = path
        self.keyed = keyed
        self.in_list = in_list
        self.int_keys: list[str] | None = None
        # Where the branch itself hangs; whoever asked for the value sets both.
        self.home: dict[str, Node]
        self.name: str


def parse(window: Window, reader: Reader, *, of_orbax: bool = False) -> Node:
    """The whole document as a tree.

    Maps become DICT branches, msgpack arrays LIST branches. Int keys become names that the branch lists in
    ``int_keys``; all other keys that are not text, and keys that occur twice, are refused.

    Args:
        window: at the start of the file.
        reader: whom the handles belong to.
        of_orbax: the file is part of an Orbax directory, and may hold tuples.

    Raises:
        CorruptCheckpointError: with the byte offset.
    """
    parser = _Parser(window, reader, of_orbax)
    try:
        return parser.document()
    except (IndexError, struct.error) as error:
        found = "the end of the file in the middle of a value; it is truncated"
        raise window.corrupt(found, window.size - window.base) from error
    except UnicodeDecodeError as error:
        raise window.corrupt(f"text that is not UTF-8 ({error})") from error


class _Parser:
    """One pass over one document; a loop with its own stack, so that depth costs no Python stack."""

    def __init__(self, window: Window, reader: Reader, of_orbax: bool):
        self._window = window
        self._reader = reader
        self._of_orbax = of_orbax
        self._stack: list[_Frame] = []
        self._headers: dict[bytes, ArrayHeader] = {}

    def document(self) -> Node:
        window, stack = self._window, self._stack
        window.refill()
        home: dict[str, Node] = {}
        home[""] = self._value((), False)
        if stack:
            stack[0].home, stack[0].name = home, ""
        while stack:
            frame = stack[-1]
            if frame.left:
                self._fill(frame)
            else:
                self._close(stack.pop())
        end = window.base + window.at
        if end != window.size:
            raise window.corrupt(f"{window.size - end} bytes behind the end of the document")
        return home[""]

    def _fill(self, frame: _Frame) -> None:
        """Reads children until one of them is a container, or there are no more."""
        children, keyed, stack, window = frame.branch.children, frame.keyed, self._stack, self._window
        depth, parent, headers = len(stack), frame.path, self._headers
        while frame.left:
            if window.at > window.fresh_until:
                window.refill()
            if keyed:
                self._read_repeated(frame)
                if not frame.left:
                    return
            frame.left -= 1
            if window.at > window.fresh_until:
                window.refill()
            name = self._key(frame) if keyed else str(len(children))
            path = (*parent, name)
            # An array whose header was seen before: most arrays of a checkpoint share few headers.
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
                stack[-1].home, stack[-1].name = children, name
                return

    def _read_repeated(self, frame: _Frame) -> None:
        """Reads arrays with short names and headers that were seen before, until something else comes.

        Most of a checkpoint is such arrays, and this takes half the time of reading them in general.
        """
        window, headers, reader = self._window, self._headers, self._reader
        data, at, base, size, fresh_until = window.data, window.at, window.base, window.size, window.fresh_until
        children, parent, left = frame.branch.children, frame.path, frame.left
        try:
            while left and at <= fresh_until and 0xA0 <= data[at] <= 0xBF:
                start = at + 1 + (data[at] & 0x1F)
                header = headers.get(data[start : start + _PREFIX])
                if header is None or not data.startswith(header.text, start):
                    break
                where = start + len(header.text)
                name, nbytes = str(data[at + 1 : start], "utf-8"), header.nbytes
                if base + where + nbytes > size or name in children:
                    break
                path = (*parent, name)
                children[name] = LeafHandle(
                    path, header.kind, header.shape, header.dtype, nbytes, "/".join(path), reader, base + where
                )
                at, left = where + nbytes, left - 1
        finally:  # an error tells where it was found
            window.at, frame.left = at, left

    def _close(self, frame: _Frame) -> None:
        branch = frame.branch
        if frame.int_keys:
            branch.int_keys = frozenset(frame.int_keys)
        # Flax joins arrays in pieces inside maps only, never inside msgpack lists.
        if not frame.in_list and 2 <= len(branch.children) <= 3:
            special = as_single_leaf(branch, frame.path, self._window)
            if special is not None:
                frame.home[frame.name] = special

    def _key(self, frame: _Frame) -> str:
        window = self._window
        start = window.at
        tag = window.data[start]
        if 0xA0 <= tag <= 0xBF:
            window.at = end = start + 1 + (tag & 0x1F)
            name = str(window.data[start + 1 : end], "utf-8")
        else:
            name = self._rare_key(tag, frame)
        if name in frame.branch.children:
            raise window.corrupt(f"the key {name!r} twice in {show_path(frame.path)}")
        return name

    def _rare_key(self, tag: int, frame: _Frame) -> str:
        if 0xD9 <= tag <= 0xDB:
            return self._text(tag)
        if tag <= 0x7F or tag >= 0xE0 or tag in _INTS:
            name = str(self._int(tag))
            if frame.int_keys is None:
                frame.int_keys = []
            frame.int_keys.append(name)
            return name
        raise self._window.corrupt(f"a map key in {show_path(frame.path)} that is neither text nor int (0x{tag:02x})")

    def _value(self, path: Path, in_list: bool) -> Node:
        window = self._window
        tag = window.data[window.at]
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
            value = parse_complex(window, length)
            return LeafHandle(path, LeafKind.COMPLEX, (), None, 16, "/".join(path), self._reader, value)
        if code == format.EXT_TUPLE and self._of_orbax:
            return self._tuple(length, path, in_list)
        raise window.corrupt(f"extension code {code}, which no release of Flax writes, in {show_path(path)}")

    def _tuple(self, length: int, path: Path, in_list: bool) -> Branch:
        window = self._window
        window.claim(length)
        tag = window.data[window.at]
        if not (0x90 <= tag <= 0x9F or tag in (0xDC, 0xDD)):
            raise window.corrupt(f"a tuple in {show_path(path)} that is no msgpack array (0x{tag:02x})")
        branch = self._container(tag, path, in_list)
        branch.container = Container.TUPLE
        return branch

    def _array(self, start: int, code: int, length: int, path: Path) -> LeafHandle:
        window = self._window
        window.claim(length)
        header = parse_array_header(window, start, code, length, path)
        self._headers[header.text[:_PREFIX]] = header
        return self._handle(header, start, path)

    def _handle(self, header: ArrayHeader, start: int, path: Path) -> LeafHandle:
        """The array whose header begins at ``start``; goes on behind its data."""
        window = self._window
        where = start + len(header.text)
        window.at = where + header.nbytes
        kind, shape, dtype, nbytes = header.kind, header.shape, header.dtype, header.nbytes
        return LeafHandle(path, kind, shape, dtype, nbytes, "/".join(path), self._reader, window.base + where)

    def _container(self, tag: int, path: Path, in_list: bool) -> Branch:
        window = self._window
        if tag <= 0x9F:
            count, keyed = tag & 0x0F, tag <= 0x8F
            window.at += 1
        else:
            count, keyed = self._length(1 + (tag & 1)), tag >= 0xDE
        # Every child has a byte at least, every key too: a count that the file cannot hold ends here.
        if window.base + window.at + count * (1 + keyed) > window.size:
            raise window.corrupt(f"a container of {count} values; the file is too short for them, it is truncated")
        if len(self._stack) >= format.MAX_DEPTH:
            raise window.corrupt(f"more than {format.MAX_DEPTH} nested containers")
        branch = Branch({}) if keyed else Branch({}, Container.LIST)
        self._stack.append(_Frame(branch, count, path, keyed, in_list or not keyed))
        return branch

    def _native(self, tag: int, path: Path) -> LeafHandle | None:
        if 0xA0 <= tag <= 0xBF or 0xD9 <= tag <= 0xDB:
            return self._string(tag, path)
        if tag == 0xC0:
            self._window.at += 1
            return None
        if 0xC4 <= tag <= 0xC6:
            return self._binary(tag, path)
        if tag in (0xC2, 0xC3):
            self._window.at += 1
            return self._plain(LeafKind.BOOL, tag == 0xC3, 1, path)
        if tag in _FLOATS:
            return self._plain(LeafKind.FLOAT, self._number(_FLOATS[tag]), 8, path)
        if tag == 0xC1:
            raise self._window.corrupt("the byte 0xc1, which msgpack never uses")
        return self._plain(LeafKind.INT, self._int(tag), 8, path)

    def _string(self, tag: int, path: Path) -> LeafHandle:
        text = self._text(tag)
        if text.startswith(format.PLACEHOLDER):
            array = gda_read.locate(self._window.path, text[len(format.PLACEHOLDER) :], path)
            handle = self._plain(LeafKind.ARRAY, array, array.nbytes, path)
            handle.shape, handle.dtype, handle.in_gda_folder = array.shape, array.dtype, True
            return handle
        return self._plain(LeafKind.STR, text, len(text), path)

    def _binary(self, tag: int, path: Path) -> LeafHandle:
        length = self._length(tag - 0xC4)
        window = self._window
        where = window.base + window.at
        window.at = window.claim(length)
        return LeafHandle(path, LeafKind.BYTES, (), None, length, "/".join(path), self._reader, where)

    def _plain(self, kind: LeafKind, value: Any, nbytes: int, path: Path) -> LeafHandle:
        return LeafHandle(path, kind, (), None, nbytes, "/".join(path), self._reader, value)

    def _text(self, tag: int) -> str:
        if tag <= 0xBF:
            self._window.at += 1
            return str(self._window.take(tag & 0x1F), "utf-8")
        return str(self._window.take(self._length(tag - 0xD9)), "utf-8")

    def _int(self, tag: int) -> int:
        if tag in _INTS:
            return int(self._number(_INTS[tag]))
        self._window.at += 1
        return tag if tag <= 0x7F else tag - 0x100

    def _number(self, layout: struct.Struct) -> Any:
        window = self._window
        (value,) = layout.unpack_from(window.data, window.at + 1)
        window.at += 1 + layout.size
        return value

    def _length(self, width: int) -> int:
        """A length field; ``width`` is 0, 1 or 2 for one, two or four bytes."""
        return int(self._number(_LENGTHS[width]))
