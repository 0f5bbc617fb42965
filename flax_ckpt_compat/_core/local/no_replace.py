"""Giving a finished checkpoint its name without replacing another that was saved under it meanwhile."""

from __future__ import annotations

import errno
import os

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local.temporaries import GONE, temporary_path

# What systems say of a name that is taken: by a file, by a directory that holds something, by a file for a directory.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_TRIES = 3


def rename_new(path: str, final: str) -> bool:
    """Rename without replacing anything but an empty directory; False where the name is taken."""
    try:
        if os.path.isdir(path) or os.path.islink(path):
            os.rename(path, final)  # onto a checkpoint, which is not empty, this fails
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


def put_new(temporary: str, final: str) -> None:
    """Give a finished temporary its final name, which nothing has but what is void: empty, or of no size.

    Raises:
        StorageError: another checkpoint has the name.
    """
    for _ in range(_TRIES):
        if rename_new(temporary, final):
            return
        _clear(final)
    raise _taken(final)


def _clear(final: str) -> None:
    """Remove what is void. It is renamed first, because by then a checkpoint of another process may have the name."""
    if not is_void(final):
        raise _taken(final)
    aside = temporary_path(final)
    try:
        os.rename(final, aside)
    except GONE:
        return
    if not is_void(aside):
        rename_new(aside, final)
        raise _taken(final)
    if os.path.isdir(aside):
        os.rmdir(aside)
    else:
        os.unlink(aside)


def is_void(path: str) -> bool:
    """Whether a local path holds nothing at all: an empty directory or a file of no size. Links never do."""
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
