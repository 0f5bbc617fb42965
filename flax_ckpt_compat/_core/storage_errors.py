"""Translate errors of the file system, and of TensorStore on it, into ours, with reason and remedy."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from flax_ckpt_compat._core.errors import CheckpointError, StorageError, is_of_handler, storage_error_of
from flax_ckpt_compat._core.progress import nbytes_of
from flax_ckpt_compat._core.text_formatting import format_size
from flax_ckpt_compat._core.tree import Node, iter_leaves

_DENIED = (errno.EACCES, errno.EPERM)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    **dict.fromkeys(_DENIED, "check the permissions of {folder}, and of what is in it"),
    **dict.fromkeys(FULL_DISK, "free space or files (df -i), or save to another directory"),
    errno.EROFS: "{folder} is mounted read-only; save to another directory",
    errno.EMFILE: "this process has too many files open; close some, or raise the limit (ulimit -n)",
    errno.ENOTEMPTY: "another program wrote there meanwhile; try again",
    errno.EFBIG: "a file would be larger than the limit of this process (ulimit -f) or of the file system",
    errno.ENOTDIR: "a part of this path is no directory; check the path",
    errno.ELOOP: "a part of this path is a link that leads to itself; check the path",
    errno.EIO: "the disk or the network file system failed; check it, or save to another directory",
    errno.ENAMETOOLONG: "shorten the path, to which up to 255 bytes are added while it is written",
    errno.EXDEV: "on overlayfs, a directory of a container's image cannot be replaced: save to another directory, or "
    "remove this one first",
}
TENSORSTORE_ERRORS = (ValueError, RuntimeError, OSError)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'|\[OS error (\d+):")
_BLOCK = 512  # bytes, of `st_blocks`, whatever the blocks of the file system are (POSIX)
_LOOKS = ("found", "listed", "read")


class translated:  # noqa: N801  (a function that returns a context; each look-up enters one, so it is no generator)
    """Translate lower errors, such as `TENSORSTORE_ERRORS`, into StorageError; ``doing`` completes "could not be …"."""

    __slots__ = ("_doing", "_kinds", "_path")

    def __init__(self, path: str, doing: str = "", kinds: tuple[type[Exception], ...] = (OSError,)):
        self._path, self._doing, self._kinds = path, doing, kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if not isinstance(error, self._kinds) or isinstance(error, CheckpointError) or is_of_handler(error):
            return
        raise storage_error(self._path, error, self._doing) from error


def is_denied(error: StorageError) -> bool:
    """Return whether the system refused access, which tells nothing about what is beside the path."""
    return error.errno in _DENIED


def storage_error(path: str, error: Exception, doing: str = "") -> StorageError:
    """Return the StorageError for an error of the file system, or of TensorStore on it; see `translated`."""
    if isinstance(error, StorageError):
        return error
    number, folder = _number_of(error), os.path.dirname(path)
    what = f"{path} could not be {doing}" if doing else path
    if number in _REMEDIES:
        remedy = _REMEDIES[number].format(folder=folder)
    elif doing and "://" in path:
        remedy = "nothing else may change what is there meanwhile; try again"
    elif number == errno.ENOENT and doing in _LOOKS:
        remedy = "it was removed meanwhile, or was never there"
    elif number == errno.ENOENT:  # also where a file system takes no new names, such as /proc
        remedy = f"check that {folder} exists and that files can be created in it"
    else:
        remedy = "check the path, and the disk or network file system that it is on"
    message = f"{what}: {getattr(error, 'strerror', None) or error}; {remedy}"
    return storage_error_of(message, path=path, errno=number)


def _number_of(error: Exception) -> int | None:
    """Return the operating system's error number, which TensorStore has in its text only."""
    number: int | None = getattr(error, "errno", None)
    found = _OS_ERROR.search(str(error)) if number is None else None
    return int(found[1] or found[2]) if found else number


@contextmanager
def writing(path: str, temporary: str, tree: Node = None) -> Iterator[None]:
    """Translate an OSError about a temporary into a StorageError about the checkpoint, of a ``tree``."""
    try:
        yield
    except OSError as error:
        # ProcessTimeoutError is an OSError because it is a TimeoutError.
        if (isinstance(error, CheckpointError) and not isinstance(error, StorageError)) or is_of_handler(error):
            raise
        folder, number = os.path.dirname(temporary), error.errno
        reason = str(error).replace(temporary, path)
        if number in FULL_DISK:
            to = "or set TMPDIR" if folder != os.path.dirname(path) else "or save to another directory"
            reason = f"{os.strerror(number)}; {_describe_space(temporary, tree)}; free space or files (df -i), {to}"
        elif number in _REMEDIES:
            reason = f"{os.strerror(number)}; {_REMEDIES[number].format(folder=folder)}"
        message = reason if reason.startswith(path) else f"{path} could not be saved: {reason}"
        raise storage_error_of(message, path=path, errno=number) from (error.__cause__ or error)


def _describe_space(temporary: str, tree: Node) -> str:
    """Describe the space needed, and the space free once the temporary is removed."""
    folder, nbytes = os.path.dirname(temporary), nbytes_of(leaf for _, leaf in iter_leaves(tree))
    needed = f"it needs {format_size(nbytes)} and " if tree is not None else ""
    with suppress(OSError):
        files = [os.path.join(inner, name) for inner, _, names in os.walk(temporary) for name in names] or [temporary]
        taken = sum(os.lstat(file).st_blocks * _BLOCK for file in files if os.path.lexists(file))
        return f"{needed}{format_size(shutil.disk_usage(folder).free + taken)} are free in {folder}"
    return f"{needed}nothing is free in {folder}"


def not_found(url: str) -> FileNotFoundError:
    """Return the error for a missing object."""
    return FileNotFoundError(errno.ENOENT, "no such object in the store", url)
