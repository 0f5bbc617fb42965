"""Write a new file, through the page cache or past it.

Past the cache (O_DIRECT) the disk takes pages from the memory that the bytes are in, and the cache keeps what a program
has in it. Memory and place in the file have to begin at the same byte of a page: large pieces that do are written from
where they are, all others are copied to a buffer first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from contextlib import suppress

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.local.syncing import function_of_libc, sync_descriptor
from flax_ckpt_compat._core.local.temporaries import create_file

# Of a smaller piece a copy is cheaper than an entry of its own in a system call. In bytes, as all sizes here.
_UNCOPIED_FROM = 64 << 10
_BUFFER = 4 << 20
_WRITEBACK_FROM = 8 << 20
_MAX_PIECES = 512  # for one system call; below every system's limit (IOV_MAX, 1024 on Linux)
_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Errors of a file system, or for the memory of a driver, for which direct writes do not work after all.
_REFUSALS = (errno.EINVAL, errno.EFAULT, errno.ENOTSUP)
_AT_EMPTY_PATH, _STATX_DIOALIGN, _RANGE_WRITE = 0x1000, 0x2000, 2  # Linux, statx(2) and sync_file_range(2)


def create(path: str, *, past_cache: bool = False) -> NewFile:
    """Create a file that does not exist; it is written ``past_cache`` if its file system can."""
    descriptor = create_file(path)
    is_direct = past_cache and _pass_cache(descriptor)
    return _FileOfPages(path, descriptor) if is_direct else NewFile(path, descriptor)


class NewFile:
    """A file that is written from its beginning to its end, by one thread at a time, through the page cache."""

    is_past_cache = False

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self.descriptor = path, descriptor
        self._written = self._handed_over = 0

    def write(self, pieces: list[memoryview]) -> None:
        """Write pieces, one after the other, and take them out of the list."""
        while pieces:  # one system call may write less than it is given (2 GiB at most on Linux)
            written = os.writev(self.descriptor, pieces[:_MAX_PIECES])
            if not written:
                raise OSError("the file system accepted no bytes")
            self._written += written
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if written:
                pieces[0] = pieces[0][written:]
        length, start_writing = self._written - self._handed_over, function_of_libc("sync_file_range")
        if length >= _WRITEBACK_FROM and start_writing is not None:
            # The disk writes while the next bytes are prepared, so the final sync is short. Errors do not count.
            start_writing(self.descriptor, ctypes.c_int64(self._handed_over), ctypes.c_int64(length), _RANGE_WRITE)
            self._handed_over = self._written

    def write_rest(self) -> None:
        """Write what `write` has kept back; the file is as long as all pieces then, and nothing may follow."""

    def close(self) -> None:
        """Write the rest, sync all, and close the file."""
        try:
            self.write_rest()
            sync_descriptor(self.descriptor, self._path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file as it is."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _FileOfPages(NewFile):
    """A file that is written page by page, past the page cache."""

    is_past_cache = True

    def __init__(self, path: str, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self._is_direct = True
        self._buffer = memory.empty((_BUFFER,), np.dtype(np.uint8), memory.PAGE)
        self._filled = 0

    def write(self, pieces: list[memoryview]) -> None:
        for piece in pieces:
            head = -self._filled % memory.PAGE
            if len(piece) < _UNCOPIED_FROM or (np.frombuffer(piece, np.uint8).ctypes.data + head) % memory.PAGE:
                self._copy(piece)
                continue
            end = head + (len(piece) - head) // memory.PAGE * memory.PAGE
            self._copy(piece[:head])
            self._write_pages([piece[head:end]])
            self._copy(piece[end:])
        pieces.clear()

    def write_rest(self) -> None:
        end = self._filled // memory.PAGE * memory.PAGE
        rest = bytes(self._buffer[end : self._filled])
        self._filled = end
        self._write_pages([])
        self._end_direct()
        super().write([memoryview(rest)] if rest else [])

    def _copy(self, piece: memoryview) -> None:
        while piece:
            part = piece[: _BUFFER - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = np.frombuffer(part, np.uint8)
            self._filled += len(part)
            piece = piece[len(part) :]
            if self._filled == _BUFFER:
                self._write_pages([])

    def _write_pages(self, more: list[memoryview]) -> None:
        """Write the pages in the buffer, and those that come after them."""
        pages = [piece for piece in (self._buffer[: self._filled].data, *more) if piece]
        self._filled = 0
        try:
            super().write(pages)
        except OSError as error:
            if error.errno not in _REFUSALS or not self._is_direct:
                raise
            self._end_direct()
            super().write(pages)  # what is left of it

    def _end_direct(self) -> None:
        """Write through the cache from now on."""
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & ~_DIRECT)
        self._is_direct = False


def _pass_cache(descriptor: int) -> bool:
    """Begin to write past the page cache; return False if the kernel does not say, since Linux 6.1, that pages can."""
    function, answer = function_of_libc("statx"), (ctypes.c_uint32 * 64)()
    if not _DIRECT or function is None or function(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return False
    # Which fields of the answer are filled in, and those at byte 0x98: the alignments in memory and in the file.
    if answer[0] & _STATX_DIOALIGN and all(one and memory.PAGE % one == 0 for one in answer[38:40]):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | _DIRECT)
            return True
    return False
