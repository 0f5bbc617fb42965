"""What the rules ask about paths, of local ones and of URLs of object stores alike.

A local path takes the functions of `os`, unchanged. In a store, a folder is there while it holds an object.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import client, commit, uploads
from flax_ckpt_compat._core.object_store.client import listing_cache as listing_cache
from flax_ckpt_compat._core.object_store.store_errors import missing

_GONE = (FileNotFoundError, NotADirectoryError)
_SLASHES_OF_BUCKET = 2
_BY_EFFECTIVE_IDS = os.access in os.supports_effective_ids
_MANGLED = re.compile(r"(s3|gs|file):/(?!/)")
_FILE_URL = re.compile(r"file://(localhost(?=/))?", re.IGNORECASE)
# What the system says of a path that is certainly not there.
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def absolute(path: str) -> str:
    """The absolute local path, or the normal URL."""
    _refuse_mangled(path)
    return client.normal(path) if is_url(path) else os.path.abspath(local(path))


def normal(path: str) -> str:
    """The path without what has no meaning; a relative one stays relative, and ``file://`` stays too."""
    _refuse_mangled(path)
    if is_url(path):
        return client.normal(path)
    plain = local(path)
    return path[: len(path) - len(plain)] + os.path.normpath(plain)


def is_url(path: str) -> bool:
    """Return whether it is the URL of an object store."""
    return client.is_url(path) and not _FILE_URL.match(path)


def local(path: str) -> str:
    """Return the local path of a ``file://`` URL; any other path as it is.

    Raises:
        StorageError: the URL names another machine.
    """
    if not (match := _FILE_URL.match(path)):
        return path
    plain = path[match.end() :]
    if not plain.startswith("/"):
        message = (
            f"{path}: the path in a file URL starts with a slash, as in file:///home/me; pass that, or a plain path"
        )
        raise StorageError(message, path=path)
    return plain


def _refuse_mangled(path: str) -> None:
    if _MANGLED.match(path):
        message = f"{path}: pathlib made this of a URL; pass the URL as text, or as an etils.epath.Path"
        raise StorageError(message, path=path)


def content_root(path: str) -> str:
    """Return the path below which the files of a checkpoint's directory are read; in stores it may be one inside."""
    return client.content_root(path) if is_url(path) else path


def listdir(path: str) -> list[str]:
    """Names in a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: it is none; other OSErrors as the system, or store, gives them.
    """
    if not is_url(path):
        return os.listdir(path)
    found = client.names(path)
    if not found:
        raise missing(path)
    return found


def isdir(path: str) -> bool:
    """Whether it is a directory."""
    return commit.counts_as_folder(path) if is_url(path) else stat.S_ISDIR(_mode(path))


def isfile(path: str) -> bool:
    """Whether it is a regular file."""
    if not is_url(path):
        return stat.S_ISREG(_mode(path))
    return client.is_object(path) and not commit.counts_as_folder(path)


def lexists(path: str) -> bool:
    """Whether there is anything of this name."""
    if is_url(path):
        return client.is_folder(path) or client.is_object(path)
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise StorageError(f"{path}: {error.strerror}", path=path, errno=error.errno) from error
    except ValueError:  # a NUL in the path
        return False
    return True


def _mode(path: str) -> int:
    """Return the mode of what is at a local path, links followed; 0 where there is nothing.

    Raises:
        StorageError: a directory above it may not be searched, so that nobody can tell.
    """
    try:
        return os.stat(path).st_mode
    except PermissionError as error:
        # Else it is this one path that is refused, such as the mount point of another user.
        if not os.access(os.path.dirname(path) or os.curdir, os.X_OK, effective_ids=_BY_EFFECTIVE_IDS):
            raise StorageError(f"{path}: {error.strerror}", path=path, errno=error.errno) from error
    except (OSError, ValueError):
        pass
    return 0


def getsize(path: str) -> int:
    """Bytes of a file."""
    return client.size(path) if is_url(path) else os.path.getsize(path)


def is_empty(path: str) -> bool:
    """Return whether a file has no bytes, which costs one request in a store where its size may cost many."""
    return client.is_empty(path) if is_url(path) else os.path.getsize(path) == 0


def read(path: str, limit: int | None = None) -> bytes:
    """The first ``limit`` bytes of a file, or all."""
    if is_url(path):
        return client.read(path) if limit is None else client.read_range(path, 0, limit)
    with open(path, "rb") as file:
        return file.read(-1 if limit is None else limit)


def total_size(path: str) -> int:
    """Bytes in a file, or in all files below a directory; 0 for what is not there."""
    if is_url(path):
        return _size_in_store(path)
    total = 0
    with suppress(*_GONE):
        if not os.path.isdir(path):
            return os.stat(path).st_size
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(*_GONE):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _size_in_store(url: str) -> int:
    if not commit.counts_as_folder(url):
        return _size_or_zero(url) if client.is_object(url) else 0
    with client.listing_cache(url):
        inside = [f"{url}/{key}" for key in client.keys(url)]
        client.know_sizes(inside)
        return sum(map(_size_or_zero, inside))


def _size_or_zero(url: str) -> int:
    with suppress(FileNotFoundError):  # another process has just evicted it
        return client.size(url)
    return 0


def is_valid_destination(path: str) -> bool:
    """Whether a checkpoint can have this path: a store's bucket is none."""
    return not is_url(path) or path.count("/") > _SLASHES_OF_BUCKET


def temporary_path(path: str) -> str:
    """A local path to write a checkpoint to that is then published as ``path``."""
    return commit.staging_path(path) if is_url(path) else atomic.temporary_path(path)


def publish(temporary: str, path: str, *, new: bool = False) -> None:
    """Gives a finished local temporary its final name, of which nothing counts until all is there.

    Args:
        temporary: of `temporary_path`.
        path: the final one.
        new: another checkpoint that has this name by now is not replaced.
    """
    if is_url(path):
        uploads.check_sizes(temporary, path)  # before anything there is touched
        commit.publish(temporary, path, new=new)
    else:
        atomic.publish(temporary, path, new=new)


def discard(path: str) -> None:
    """Removes a checkpoint so that a crash in the middle leaves nothing that counts as one."""
    (commit if is_url(path) else atomic).discard(path)


def prepare_directory(path: str) -> None:
    """Makes a directory of checkpoints, and frees it from what dead writers left."""
    if is_url(path):
        commit.remove_stale(path)
    else:
        atomic.make_directory(path)
        atomic.remove_stale(path)


def tensorstore_folder(path: str) -> dict[str, Any]:
    """TensorStore's description of a directory, as the base of an array or of a database."""
    return client.spec(path) if is_url(path) else local_kvstore(os.path.abspath(path))


def local_kvstore(path: str) -> dict[str, Any]:
    """Return TensorStore's description of a local path.

    Raises:
        StorageError: a name in it is not UTF-8, which TensorStore cannot take.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        message = (
            f"{path}: a name in this path is not UTF-8, and TensorStore, which reads and writes arrays of Orbax's "
            "format, takes no other; rename the directory, or save as msgpack"
        )
        raise StorageError(message, path=path, errno=errno.EILSEQ) from error
    return {"driver": "file", "path": path}


def tensorstore_context(path: str) -> Any:
    """The context to open it with; None for TensorStore's own."""
    return client.context() if is_url(path) else None
