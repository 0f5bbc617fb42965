"""Translate errors of the file system, and of TensorStore on it, into ours, with reason and remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from flax_ckpt_compat._core.errors import CheckpointError, StorageError, is_of_handler, storage_error_of

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the permissions of {folder}, and of what is in it"),
    **dict.fromkeys(FULL_DISK, "free space or files (df -i), or save to another directory"),
    errno.EROFS: "{folder} is mounted read-only; save to another directory",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "too many files are open; close some, or raise ulimit -n"),
    errno.EFBIG: "a file would be too large for this process (ulimit -f) or the file system",
    errno.ENOTEMPTY: "another program wrote there meanwhile; try again",
    errno.ENOTDIR: "a part of this path is no directory; check the path",
    errno.EIO: "the disk or the network file system failed; check it, or save to another directory",
    errno.ENAMETOOLONG: "shorten the directory, the prefix or the step",
}
TENSORSTORE_ERRORS = (ValueError, RuntimeError, OSError)


class translated(AbstractContextManager[Any]):  # noqa: N801  (each look-up enters one, so it is no generator)
    """Translate lower errors, such as `TENSORSTORE_ERRORS`, into StorageError; ``doing`` completes "could not be …"."""

    def __init__(self, path: str, doing: str = "", kinds: tuple[type[Exception], ...] = (OSError,)):
        self._path, self._doing, self._kinds = path, doing, kinds

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, self._kinds) and not isinstance(error, CheckpointError) and not is_of_handler(error):
            raise storage_error(self._path, error, self._doing) from error


def storage_error(path: str, error: Exception, doing: str = "") -> StorageError:
    """Return the StorageError for an error of the file system, or of TensorStore on it; see `translated`."""
    if isinstance(error, StorageError):
        return error
    number, folder = getattr(error, "errno", None), os.path.dirname(path)
    what = f"{path} could not be {doing}" if doing else path
    if number in _REMEDIES:
        remedy = _REMEDIES[number].format(folder=folder)
    elif doing and "://" in path:
        remedy = "nothing else may change what is there meanwhile; try again"
    elif number == errno.ENOENT:
        remedy = "it was removed meanwhile, or was never there"
    else:
        remedy = "check the path, and the disk or network file system that it is on"
    message = f"{what}: {getattr(error, 'strerror', None) or error}; {remedy}"
    return storage_error_of(message, path=path, errno=number)


@contextmanager
def writing(path: str, temporary: str) -> Iterator[None]:
    """Translate an OSError about a temporary into a StorageError about the checkpoint."""
    try:
        yield
    except OSError as error:
        # ProcessTimeoutError is an OSError because it is a TimeoutError.
        if (isinstance(error, CheckpointError) and not isinstance(error, StorageError)) or is_of_handler(error):
            raise
        folder, number = os.path.dirname(temporary), error.errno
        reason = str(error).replace(temporary, path)
        if number in _REMEDIES:
            reason = f"{os.strerror(number)}; {_REMEDIES[number].format(folder=folder)}"
        if number in FULL_DISK and folder != os.path.dirname(path):  # a save to a store, which is prepared there
            reason += f", by TMPDIR, in place of {folder}"
        message = reason if reason.startswith(path) else f"{path} could not be saved: {reason}"
        raise storage_error_of(message, path=path, errno=number) from (error.__cause__ or error)


def not_found(url: str) -> FileNotFoundError:
    """Return the error for a missing object."""
    return FileNotFoundError(errno.ENOENT, "no such object in the store", url)
