"""Find the arrays of a msgpack file, and copy all else: a skeleton, in which short references take their places."""

from __future__ import annotations

from flax_ckpt_compat._core.backend import LeafKind

from . import format
from .format import ArrayHeader, FileRanges
from .read_bytes import Window

# Tag of a value that holds no others → its bytes, with the tag; of texts, the short ones only.
_SIZES = dict.fromkeys([*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3], 1)
_SIZES |= {0xA0 + length: 1 + length for length in range(32)}
_SIZES |= dict(zip(range(0xCA, 0xD4), (5, 9, 2, 3, 5, 9, 2, 3, 5, 9), strict=True))
_SIZE_OF = [_SIZES.get(tag, 0) for tag in range(256)]
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
# Tag → bytes of the length field behind it.
_EXT_WIDTHS = {0xC7: 1, 0xC8: 2, 0xC9: 4} | dict.fromkeys(_FIXEXT, 0)
_BIN_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_TEXT_WIDTHS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_CONTAINER_WIDTHS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
# Bytes of a header that key the header cache: tag, length, code, and in short ones the start of the shape.
_PREFIX = 6
TOO_DEEP = f"more than {format.MAX_DEPTH} nested containers"


class Scanner:
    """One pass over the values of a file."""

    def __init__(self, window: Window, *, of_orbax: bool = False):
        self.skeleton = bytearray()  # the values so far, as msgpack
        # What references stand for: the header of an array, or of bytes, and where its data are.
        self.found: list[tuple[ArrayHeader, FileRanges]] = []
        self._window, self._of_orbax = window, of_orbax
        self._headers: dict[bytes, tuple[ArrayHeader, bytes]] = {}  # with the bytes before the data

    def value(self) -> None:
        """Scan the value at the window's position, and all in it."""
        window, skeleton, sizes, left = self._window, self.skeleton, _SIZE_OF, 1
        behind: list[int] = []  # of the containers around the next value, how many values are behind each
        data, start, fresh = window.data, window.at, window.fresh_until
        at = start
        while left or behind:
            if not left:
                left = behind.pop()
                continue
            if at <= fresh and (size := sizes[data[at]]):
                at += size
                left -= 1
                continue
            skeleton += data[start:at]
            window.at = at
            tag = window.tag()
            if not sizes[tag]:
                behind.append(left - 1)
                left = self._other(tag)
                if len(behind) > 2 * format.MAX_DEPTH:  # what is a little too deep, the tree refuses
                    raise window.corrupt(TOO_DEEP)
            data, start, fresh = window.data, window.at, window.fresh_until
            at = start
        skeleton += data[start:at]
        window.at = at
        if window.base + at > window.size:
            raise IndexError("the file ends")

    def _other(self, tag: int) -> int:
        """Scan one value that is none of a fixed size, but for the values in it; return how many these are."""
        window = self._window
        if tag <= 0x9F or tag in _CONTAINER_WIDTHS:
            return self._container(tag)
        if tag in _EXT_WIDTHS:
            return self._extension(tag)
        if tag in _BIN_WIDTHS:
            length = self._length(_BIN_WIDTHS[tag])
            self._refer(ArrayHeader(b"", LeafKind.BYTES, (), None, length))
        elif tag in _TEXT_WIDTHS:
            start = window.data[window.at : window.at + 1 + _TEXT_WIDTHS[tag]]
            self.skeleton += start + window.take(self._length(_TEXT_WIDTHS[tag]))
        else:
            raise window.corrupt("the byte 0xc1, which msgpack never uses")
        return 0

    def _container(self, tag: int) -> int:
        window, start = self._window, self._window.at
        if tag in _CONTAINER_WIDTHS:
            count, is_map = self._length(_CONTAINER_WIDTHS[tag]), tag >= 0xDE
        else:
            count, is_map = tag & 0x0F, tag <= 0x8F
            window.at += 1
        self.skeleton += window.data[start : window.at]
        # Every child and every key takes at least one byte, so reject a count that cannot fit into the file.
        if window.base + window.at + count * (1 + is_map) > window.size:
            raise window.corrupt(f"a container of {count} values; the file is too short for them, it is truncated")
        return count * (1 + is_map)

    def _extension(self, tag: int) -> int:
        window, start = self._window, self._window.at
        known, before = self._headers.get(window.data[start : start + _PREFIX], (None, b""))
        if known is not None and window.data.startswith(before, start):
            window.at += len(before)
            self._refer(known)
            return 0
        width = _EXT_WIDTHS[tag]
        length = self._length(width) if width else _FIXEXT[tag]
        window.at += 1 + (not width)  # the code
        code = window.data[window.at - 1]
        if code in (format.EXT_ARRAY, format.EXT_NUMPY_SCALAR):
            self._array(start, code, length)
        elif code == format.EXT_COMPLEX:
            before = window.data[start : window.at]
            self.skeleton += before + window.take(length)
        elif code == format.EXT_TUPLE and self._of_orbax:
            window.end_of(length)
            self.skeleton += format.BEGIN_TUPLE
            return 1
        else:
            raise window.corrupt(f"extension code {code}, which no release of Flax writes")
        return 0

    def _array(self, start: int, code: int, length: int) -> None:
        """Refer to an array whose extension header starts at ``start``."""
        window = self._window
        window.end_of(length)
        head = window.data[window.at : window.at + min(length, format.MAX_HEADER)]
        try:
            header = format.parse_array_header(code, head, length)
        except format.DECODE_ERRORS as error:
            raise window.corrupt(f"an array that does not decode: {str(error) or type(error).__name__}") from error
        window.at += len(header.text)
        before = window.data[start : window.at]
        self._headers[before[:_PREFIX]] = header, before
        self._refer(header)

    def _refer(self, header: ArrayHeader) -> None:
        """Refer to the data at the window's position, and move it past them."""
        window = self._window
        self.skeleton += b"\xd6" + bytes((format.REFERENCE,)) + len(self.found).to_bytes(4)
        self.found.append((header, FileRanges(((window.base + window.at, header.nbytes),))))
        window.at = window.end_of(header.nbytes)

    def _length(self, width: int) -> int:
        """Read the tag and a length field of ``width`` bytes."""
        window = self._window
        field = window.data[window.at + 1 : window.at + 1 + width]
        if len(field) < width:
            raise IndexError("the file ends")
        window.at += 1 + width
        return int.from_bytes(field)
