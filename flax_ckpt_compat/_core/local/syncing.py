"""Make written bytes and names durable, and delete trees."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import shutil
from typing import Any

from flax_ckpt_compat._core.local.temporaries import create_file

# Some file systems cannot sync files, or directories, and a directory may be writable but not readable.
_CANNOT_SYNC_FILES = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_CANNOT_SYNC = (*_CANNOT_SYNC_FILES, errno.EBADF, errno.EPERM, errno.EACCES)
_warned: set[int] = set()  # devices
_log = logging.getLogger("flax_ckpt_compat")


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Ask the kernel to start writing a range of a file to disk, without waiting; a hint, so ignore errors."""
    function = function_of_libc("sync_file_range")
    if function is not None and length:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), 2)  # SYNC_FILE_RANGE_WRITE


@functools.cache
def function_of_libc(name: str) -> Any:
    """Return a function of the C library that Python does not call itself, or None if this system has none."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None


def sync_directory(path: str) -> None:
    """Sync the names in a directory to disk; warn, once for a file system, where that is impossible."""
    path = path or "."
    if (refusal := _refusal(path)) is not None:
        _warn(path, os.stat(path).st_dev, refusal)


def sync_descriptor(descriptor: int, path: str) -> None:
    """Sync the bytes of an open file to disk; warn, once for a file system, where that is impossible."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FILES:
            raise
        _warn(path, os.fstat(descriptor).st_dev, error)


def _warn(path: str, device: int, refusal: OSError) -> None:
    if device not in _warned:
        _warned.add(device)
        _log.warning(
            "%s cannot be synced (%s): checkpoints on its file system are safe from crashes of a program, but a "
            "power loss may undo the last saves; save to another file system to be safe from that, too",
            path, refusal.strerror,
        )  # fmt: skip


def _refusal(path: str) -> OSError | None:
    """Sync a directory; return the error if that is impossible there."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
        return error
    return None


def sync_file(path: str) -> None:
    """Sync the bytes of a file; see `sync_descriptor`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def write_file(path: str, data: bytes, *, new: bool = True) -> None:
    """Write and sync a file; one that is ``new`` must not exist."""
    with open(create_file(path) if new else path, "wb") as file:
        file.write(data)
        file.flush()
        sync_descriptor(file.fileno(), path)


def sync_tree(path: str) -> None:
    """Sync all files and directories below a directory, and itself."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_file(os.path.join(folder, name))
        sync_directory(folder)


def delete_tree(path: str) -> None:
    """Delete a directory and all in it; what another process deletes meanwhile is no error."""
    while True:
        try:
            return shutil.rmtree(path)
        except FileNotFoundError:
            if not os.path.lexists(path):
                return None
