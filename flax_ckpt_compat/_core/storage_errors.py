"""Translate errors of the file system, and of TensorStore on it, into ours, with reason and remedy."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from flax_ckpt_compat._core.errors import (
    CheckpointError,
    StorageError,
    is_of_handler,
    storage_error_of,
)
from flax_ckpt_compat._core.text_formatting import format_size
from flax_ckpt_compat._core.tree import Node, iter_leaves

_REMEDIES = {
    errno.EACCES: "check the permissions of {folder}",
    errno.EPERM: "check the permissions of {folder}",
    errno.EROFS: "{folder} is mounted read-only; save to another directory",
    errno.EMFILE: "this process has too many files open; close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "the machine has too many files open; close some",
    errno.EFBIG: "a file would be larger than the limit of this process (ulimit -f) or of the file system",
    errno.ENOTDIR: "a part of this path is no directory; check the path",
    errno.ELOOP: "a part of this path is a link that leads to itself; check the path",
    errno.EIO: "the disk or the network file system failed; check it, or save to another directory",
}
# FAT, exFAT and NTFS refuse these characters in names, with one of these errors; so do SMB servers.
_NOT_ON_WINDOWS = re.compile(r'[<>:"\\|?*]')
_REFUSED_NAME = (errno.EINVAL, errno.ENOENT)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM)
TENSORSTORE_ERRORS = (ValueError, RuntimeError, OSError)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'|\[OS error (\d+):")
_MARGIN = 2**20  # bytes
_LOOKS = ("found", "listed", "read")
_CHECK_PATH = "check the path, and the disk or network file system that it is on"


class translated:  # noqa: N801  (a function that returns a context; each look-up enters one, so it is no generator)
    """Translate lower errors, such as `TENSORSTORE_ERRORS`, into StorageError; see `storage_error`.

    Errors of this library tell already what happened, such as that the source of a conversion is damaged."""

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
    """Return the StorageError for an error of the file system, or of TensorStore on it.

    ``doing`` completes "could not be …"."""
    if isinstance(error, StorageError):
        return error
    number = _number_of(error)
    message = f"{path} could not be {doing}: " if doing else f"{path}: "
    message += str(getattr(error, "strerror", None) or error)
    if number in _DENIED:
        message += f"; check the permissions of it and of {os.path.dirname(path)}"
    elif number in _REMEDIES:
        message += f"; {_REMEDIES[number].format(folder=os.path.dirname(path))}"
    elif number in FULL_DISK:
        message += "; free space, or, where there is some, remove files (df -i), or save to another directory"
    elif number == errno.EXDEV:
        message += (
            "; on overlayfs, a directory of a lower layer, such as that of a container's image, cannot be replaced: "
            "save to another directory, or remove this one first"
        )
    elif number == errno.ENAMETOOLONG:
        message += "; shorten the path, to which up to 255 bytes are added while it is written"
    elif doing in _LOOKS and "://" not in path:
        is_gone = number == errno.ENOENT
        message += f"; {'it was removed meanwhile, or was never there' if is_gone else _CHECK_PATH}"
    elif doing:
        message += "; check the disk's space and permissions"
        if "://" in path:
            message = message.rpartition(";")[0] + "; nothing else may change what is there meanwhile; try again"
    elif number == errno.ENOENT:  # also where a file system takes no new names, such as /proc
        message += f"; check that {os.path.dirname(path)} exists and that files can be created in it"
    else:
        message += f"; {_CHECK_PATH}"
    return storage_error_of(message, path=path, errno=number)


def _number_of(error: Exception) -> int | None:
    """Return the operating system's error number, which TensorStore has in its text only."""
    number: int | None = getattr(error, "errno", None)
    found = _OS_ERROR.search(str(error)) if number is None else None
    return int(found[1] or found[2]) if found else number


@contextmanager
def writing(path: str, temporary: str, tree: Node = None) -> Iterator[None]:
    """Translate an OSError, or a StorageError about a temporary, into a StorageError about the checkpoint.

    With ``tree`` it reports the space that the tree needs."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError) and not isinstance(error, StorageError):
            raise  # such as ProcessTimeoutError, which is an OSError because it is a TimeoutError
        if is_of_handler(error):
            raise
        raise _storage_error(path, temporary, tree, error) from (error.__cause__ or error)


def _storage_error(path: str, temporary: str, tree: Node, error: OSError) -> StorageError:
    folder = os.path.dirname(temporary)
    number = error.errno
    if number in FULL_DISK:
        reason, remedy = (
            os.strerror(number),
            f"{_describe_space(temporary, tree)}; free space, or save to another directory",
        )
        if folder != os.path.dirname(path):  # a save to a store
            remedy = f"{_describe_space(temporary, tree)}, where the checkpoint is prepared; free space, or set TMPDIR"
    elif number in _REMEDIES:
        reason, remedy = os.strerror(number), _REMEDIES[number].format(folder=folder)
    elif (
        number in _REFUSED_NAME
        and os.path.isdir(folder)
        and (refused := _NOT_ON_WINDOWS.search(os.path.basename(path)))
    ):
        reason = os.strerror(number)
        remedy = f"the file system of {folder} may not take {refused[0]!r} in names: choose another prefix or directory"
    else:
        reason, remedy = str(error).replace(temporary, path), ""
    if reason.startswith(path):
        return storage_error_of(reason, path=path, errno=number)
    message = f"{path} could not be saved: {reason}{'; ' + remedy if remedy else ''}"
    return storage_error_of(message, path=path, errno=number)


def _describe_space(temporary: str, tree: Node) -> str:
    """Describe the space needed, and the space free once the temporary is removed."""
    folder = os.path.dirname(temporary)
    needed = f"it needs {format_size(_nbytes(tree))} and " if tree is not None else ""
    with suppress(OSError):
        free = shutil.disk_usage(folder).free + _disk_space(temporary)
        # Files take a little more than their leaves.
        is_enough = tree is not None and free > 2 * _nbytes(tree) + _MARGIN
        other = ", so what is used up is a quota, or the number of files (df -i)" if is_enough else ""
        return f"{needed}{format_size(free)} are free in {folder}{other}"
    return f"{needed}nothing is free in {folder}"


def _disk_space(path: str) -> int:
    """Return the disk usage of a file or of the files below a directory, in bytes."""
    block = 512  # bytes, whatever the file system's blocks are (POSIX)
    with suppress(NotADirectoryError, FileNotFoundError):
        return sum(_disk_space(entry.path) for entry in os.scandir(path))
    with suppress(OSError):
        return os.lstat(path).st_blocks * block
    return 0


def _nbytes(tree: Node) -> int:
    return sum(_size_of(leaf) for _, leaf in iter_leaves(tree))


def _size_of(leaf: Any) -> int:
    leaf = getattr(leaf, "data", leaf) if not hasattr(leaf, "nbytes") else leaf
    return int(getattr(leaf, "nbytes", 0)) or (len(leaf) if isinstance(leaf, (str, bytes)) else 0)


def not_found(url: str) -> FileNotFoundError:
    """Return the error for a missing object."""
    return FileNotFoundError(errno.ENOENT, "no such object in the store", url)
