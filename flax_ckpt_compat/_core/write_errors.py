"""Translate errors of a failed write: name the checkpoint instead of its temporary, and add a remedy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flax_ckpt_compat._core.errors import CheckpointError, StorageError
from flax_ckpt_compat._core.tree import Node, iter_leaves

_REMEDIES = {
    errno.EACCES: "check the permissions of {folder}",
    errno.EPERM: "check the permissions of {folder}",
    errno.EROFS: "{folder} is mounted read-only; save to another directory",
    errno.EMFILE: "this process has too many files open; close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "the machine has too many files open; close some",
    errno.EFBIG: "a file would be larger than the limit of this process (ulimit -f) or of the file system",
    errno.EIO: "the disk or the network file system failed; check it, or save to another directory",
}
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


@contextmanager
def writing(path: str, temporary: str, tree: Node = None) -> Iterator[None]:
    """Translate an OSError, or a StorageError about a temporary, into a StorageError about the checkpoint.

    Args:
        path: path or URL of the checkpoint.
        temporary: path that is written in its place.
        tree: tree to save, to report the space that it needs.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError) and not isinstance(error, StorageError):
            raise  # such as ProcessTimeoutError, which is an OSError because it is a TimeoutError
        raise _storage_error(path, temporary, tree, error) from (error.__cause__ or error)


def _storage_error(path: str, temporary: str, tree: Node, error: OSError) -> StorageError:
    folder = os.path.dirname(temporary)
    number = error.errno
    if number in (errno.ENOSPC, errno.EDQUOT):
        reason, remedy = os.strerror(number), f"{_space(temporary, tree)}; free space, or save to another directory"
        if folder != os.path.dirname(path):  # a save to a store
            remedy = f"{_space(temporary, tree)}, where the checkpoint is prepared; free space, or set TMPDIR"
    elif number in _REMEDIES:
        reason, remedy = os.strerror(number), _REMEDIES[number].format(folder=folder)
    else:
        reason, remedy = str(error).replace(temporary, path), ""
    if reason.startswith(path):
        return StorageError(reason, path=path, errno=number)
    message = f"{path} could not be saved: {reason}{'; ' + remedy if remedy else ''}"
    return StorageError(message, path=path, errno=number)


def _space(temporary: str, tree: Node) -> str:
    """Describe the space needed, and the space free once the temporary is removed."""
    folder = os.path.dirname(temporary)
    needed = f"it needs {_size(_nbytes(tree))} and " if tree is not None else ""
    with suppress(OSError):
        return f"{needed}{_size(shutil.disk_usage(folder).free + _disk_space(temporary))} are free in {folder}"
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


def _size(number: float) -> str:
    for unit in _UNITS[:-1]:
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {_UNITS[-1]}"
