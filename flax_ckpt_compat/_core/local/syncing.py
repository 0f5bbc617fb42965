"""Make written bytes and names durable, rename without replacing, exchange two names, and delete trees."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import shutil
import sys
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError, translated
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.local.temporaries import create_file
from flax_ckpt_compat._core.thread_pools import run_apart

# Some file systems cannot sync files, or directories; a directory may be writable but not readable.
_CANNOT_SYNC_FILES = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_CANNOT_SYNC = (*_CANNOT_SYNC_FILES, errno.EBADF, errno.EPERM, errno.EACCES)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
# Errors of a rename onto a file, onto a non-empty directory, and of a file onto a directory or the reverse.
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_AT_CWD, _EXCHANGE, _SWAP = -100, 2, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_warned: set[int] = set()  # devices
_log = logging.getLogger("flax_ckpt_compat")


@functools.cache
def function_of_libc(name: str) -> Any:
    """Return a function of the C library that Python does not call itself, or None if this system has none."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None


def sync_directory(path: str) -> None:
    """Sync the names in a directory to disk; warn, once for a file system, where that is impossible."""
    _sync(path or ".", _CANNOT_SYNC)


def _sync(path: str, harmless: tuple[int, ...]) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        _warn(error, path, harmless)


def sync_descriptor(descriptor: int, path: str) -> None:
    """Sync the bytes of an open file to disk; warn, once for a file system, where that is impossible."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        _warn(error, path, _CANNOT_SYNC_FILES)


def _warn(refusal: OSError, path: str, harmless: tuple[int, ...]) -> None:
    if refusal.errno not in harmless:
        raise refusal
    if (device := os.stat(path).st_dev) not in _warned:
        _warned.add(device)
        message = "%s cannot be synced (%s): a power loss may undo the last saves; save to another file system"
        _log.warning(message, path, refusal.strerror)


def make_directory(path: str) -> None:
    """Create a directory and its parents, and sync the new names."""
    with translated(path):
        missing = []
        while path and not presence.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for new in reversed(missing):  # os.makedirs calls itself for each
            if dangling := presence.dangling_link(new):
                raise StorageError(dangling, path=new, errno=errno.ENOENT)
            with suppress(FileExistsError):
                os.mkdir(new)
            sync_directory(os.path.dirname(new))


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
            _sync(os.path.join(folder, name), _CANNOT_SYNC_FILES)
        sync_directory(folder)


def rename_new(path: str, final: str) -> bool:
    """Rename and sync without replacing anything but an empty directory; return False if the name is taken."""
    is_file = not presence.isdir(path) and not presence.islink(path)
    try:
        # A rename fails if a checkpoint, which is never empty, has the name.
        (os.link if is_file else os.rename)(path, final)
    except OSError as error:
        if error.errno in TAKEN or (error.errno in _NO_LINKS and presence.lexists(final)):
            return False
        if error.errno not in _NO_LINKS:
            raise
        os.rename(path, final)  # a file system without hard links
    sync_directory(os.path.dirname(final))
    if is_file:  # only now: a power loss must not take both names
        with suppress(FileNotFoundError):
            os.unlink(path)
    return True


def exchange(first: str, second: str) -> bool:
    """Swap two names atomically; return False if the system cannot."""
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        renamex = function_of_libc("renamex_np")
        return renamex is not None and renamex(*names, _SWAP) == 0
    rename = function_of_libc("renameat2")
    return rename is not None and rename(_AT_CWD, names[0], _AT_CWD, names[1], _EXCHANGE) == 0


def delete_tree(path: str) -> None:
    """Delete a directory and all in it; what another process deletes meanwhile is no error."""
    # Ctrl-C in the middle would have shutil close a descriptor twice, which may be another thread's by then.
    run_apart(functools.partial(_delete_tree, path))


def _delete_tree(path: str) -> None:
    while os.path.lexists(path):
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
            return  # another writer may have the name by now
