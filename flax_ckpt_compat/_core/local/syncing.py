"""Make written bytes and names durable."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Any


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Ask the kernel to start writing a range of a file to disk, without waiting; a hint, so ignore errors."""
    function = _sync_file_range()
    if function is not None and length:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), 2)  # SYNC_FILE_RANGE_WRITE


@functools.cache
def _sync_file_range() -> Any:
    try:
        return ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None


def sync_directory(path: str) -> None:
    """Sync the names in a directory to disk."""
    try:
        descriptor = os.open(path or ".", os.O_RDONLY)
    except PermissionError:  # a directory may be writable but not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot sync directories
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
