"""Publish a finished checkpoint without replacing one that another process saved meanwhile."""

from __future__ import annotations

import errno
import os

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local.temporaries import GONE, temporary_path

# Errors of a rename onto a file, onto a non-empty directory, and of a file onto a directory or the reverse.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_TRIES = 3


def rename_new(path: str, final: str) -> bool:
    """Rename without replacing anything but an empty directory; return False if the name is taken."""
    try:
        if os.path.isdir(path) or os.path.islink(path):
            os.rename(path, final)  # fails if a checkpoint, which is never empty, has the name
            return True
        os.link(path, final)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(final):
            return False
        os.rename(path, final)  # a file system without hard links
        return True
    os.unlink(path)
    return True


def publish_new(temporary: str, final: str) -> None:
    """Rename a finished temporary to its final name, replacing only an empty file or directory.

    Raises:
        StorageError: another checkpoint has the name.
    """
    for _ in range(_TRIES):
        if rename_new(temporary, final):
            return
        _clear(final)
    raise _taken(final)


def _clear(final: str) -> None:
    """Remove an empty file or directory; rename it first, because another process may publish under the name."""
    if not is_empty(final):
        raise _taken(final)
    aside = temporary_path(final)
    try:
        os.rename(final, aside)
    except GONE:
        return
    if not is_empty(aside):
        rename_new(aside, final)
        raise _taken(final)
    if os.path.isdir(aside):
        os.rmdir(aside)
    else:
        os.unlink(aside)


def is_empty(path: str) -> bool:
    """Return whether a local path is an empty directory or file; False for links."""
    if os.path.islink(path):
        return False
    try:
        if os.path.isdir(path):
            return not os.listdir(path)
        return os.path.isfile(path) and os.path.getsize(path) == 0
    except GONE:
        return False


def _taken(final: str) -> StorageError:
    message = f"{final}: another process has saved a checkpoint of this name meanwhile, so this one was not saved"
    return StorageError(f"{message}; pass overwrite=True to replace it", path=final, errno=errno.EEXIST)
