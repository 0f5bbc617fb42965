"""Find the arrays of a msgpack file, and copy all else: a skeleton, in which short references take their places.

A local file, or an object of a store, is read from front to back in windows; both sources read one version of the
checkpoint, even if it is replaced meanwhile.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from flax_ckpt_compat._core.backend import LeafKind
from flax_ckpt_compat._core.byte_reads import HEAD_BYTES, Source
from flax_ckpt_compat._core.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.thread_pools import in_parallel

from . import format
from .format import ArrayHeader, FileRanges

# Bytes that a store is asked for at once, several parts at a time, and a system, which gives at most 2 GiB.
_PART, _FILE_PART = 4 * 2**20, 2**30
_REMEDY = "restore another checkpoint, copy this one again, or check that it is a checkpoint"
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


class WindowSizes(NamedTuple):
    """Sizes of the window over the structure, in bytes."""

    smallest: int  # at the beginning, and after a skip
    largest: int  # limit of growth
    read_over: int  # longest array that is read over, not skipped, because another read takes longer
    growth: int  # factor from one window to the next


OF_FILES = WindowSizes(smallest=4 * 2**10, largest=256 * 2**10, read_over=0, growth=2)
# A request takes as long as reading 1 MiB or more.
_OF_OBJECTS = WindowSizes(smallest=HEAD_BYTES, largest=8 * _PART, read_over=2**20, growth=8)


def open_source(location: Location) -> Source:
    """Open a file or object; raise if nothing is there, or it is empty or no file."""
    path = location.path
    try:
        source = location.open_file()
    except FileNotFoundError as error:
        message = f"{path}: no such checkpoint; list the directory for others"
        raise CheckpointNotFoundError(message, path=path) from error
    except StorageError as error:
        if error.errno != errno.EISDIR:
            raise
        raise CorruptCheckpointError(f"{path}: expected a msgpack file, found no file", path=path) from error
    if not source.size:
        source.close()
        found = "found an empty one: its writer never finished; restore another checkpoint"
        raise CorruptCheckpointError(f"{path}: expected a msgpack file, {found}", path=path)
    return source


def read_parts(source: Source, start: int, stop: int) -> bytes:
    """Read a range, of an object in parts at the same time; fewer bytes at the end."""
    step = _FILE_PART if source.is_local else _PART
    return b"".join(in_parallel(lambda at: source.read(at, min(at + step, stop)), range(start, stop, step)))


class Window:
    """A range of the file in memory, which moves from its beginning to its end; the data of arrays is skipped."""

    def __init__(self, source: Source, data: bytes = b""):
        """Begin with these first bytes of the source."""
        self.source = source
        self._sizes = OF_FILES if source.is_local else _OF_OBJECTS
        self._step = self._sizes.smallest // self._sizes.growth  # the first refill multiplies it
        self.path = source.path
        self.size = source.size
        self.data = data  # bytes of the range, from the offset ``base`` in the file
        self.base = self.at = 0  # the next value starts at ``data[at]``; beyond its end after a skip
        # While ``at`` is not above this, ``data`` holds `format.MAX_HEADER` more bytes, or the rest of the file.
        self.fresh_until = self._fresh()

    def _fresh(self) -> int:
        is_end = self.base + len(self.data) == self.size
        return self.size if is_end else len(self.data) - format.MAX_HEADER

    def refill(self) -> None:
        """Move the window to the current position: small after a skip, growing otherwise."""
        if self.base + self.at > self.size:
            raise IndexError("the file ends")
        skipped, sizes = self.at - len(self.data), self._sizes
        self._step = sizes.smallest if skipped > sizes.read_over else min(self._step * sizes.growth, sizes.largest)
        self.base += self.at
        self.at = 0
        self.data = self._pread(min(self._step, self.size - self.base), self.base)
        self.fresh_until = self._fresh()

    def take(self, length: int) -> bytes:
        """Read the next ``length`` bytes, also beyond the window."""
        end = self.end_of(length)
        piece = self.data[self.at : end] if end <= len(self.data) else self._pread(length, self.base + self.at)
        self.at = end
        return piece

    def tag(self) -> int:
        """Return the first byte of the next value, which the window holds with all before the value's data."""
        if self.at > self.fresh_until:
            self.refill()
        return self.data[self.at]

    def end_of(self, length: int) -> int:
        """Return the position after the next ``length`` bytes; raise if the file has fewer."""
        end = self.at + length
        if self.base + end > self.size:
            left = self.size - self.base - self.at
            raise self.corrupt(f"a value of {length} bytes, but the file has only {max(left, 0)} left; it is truncated")
        return end

    def corrupt(self, found: str, at: int | None = None) -> CorruptCheckpointError:
        """Build the error for unexpected data at position ``at`` (default: the current one)."""
        offset = self.base + (self.at if at is None else at)
        message = f"{self.path}: byte {offset}: expected a Flax msgpack checkpoint, found {found}"
        return CorruptCheckpointError(f"{message}; {_REMEDY}", path=self.path)

    def _pread(self, length: int, offset: int) -> bytes:
        data = read_parts(self.source, offset, offset + length)
        if len(data) != length:
            found = f"the end of the file {len(data)} bytes into a read of {length}; it shrank"
            raise self.corrupt(found, offset - self.base)
        return data


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
