"""Parse a stream of msgpack objects, each a key path and the bytes of a document, as EasyLM writes it."""

from __future__ import annotations

from flax_ckpt_compat._core.backend import Reader
from flax_ckpt_compat._core.errors import NameCollisionError
from flax_ckpt_compat._core.tree import Node, Path, PathLengths, from_leaves, show_path

from . import format
from .parse import Parser, naming_damage
from .read_bytes import Window

_PAIR = 0x92
_BINS = range(0xC4, 0xC7)


def parse_stream(window: Window, reader: Reader) -> Node:
    """Return the tree of all leaves; raise CorruptCheckpointError, with the byte offset, if it does not decode."""
    with naming_damage(window):
        return _StreamParser(window, reader).stream()


class _StreamParser(Parser):
    """One pass over one stream."""

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
