"""Provide one set of path functions for local paths and URLs of object stores.

Local paths use the functions of `os`. In a store, a folder exists while it holds an object.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic, no_replace
from flax_ckpt_compat._core.local.temporaries import GONE
from flax_ckpt_compat._core.object_store import client, commit, uploads
from flax_ckpt_compat._core.object_store.client import listing_cache as listing_cache
from flax_ckpt_compat._core.object_store.store_errors import not_found

_SLASHES_OF_BUCKET = 2
_BY_EFFECTIVE_IDS = os.access in os.supports_effective_ids
_MANGLED = re.compile(r"(s3|gs|file):/(?!/)")
_FILE_URL = re.compile(r"file://(localhost(?=/))?", re.IGNORECASE)
# Errors of a path that certainly does not exist.
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def absolute(path: str) -> str:
    """Return the absolute local path, or the normalized URL."""
    _refuse_mangled(path)
    return client.normal(path) if is_url(path) else os.path.abspath(local(path))


def normal(path: str) -> str:
    """Normalize a path; relative paths stay relative and ``file://`` is kept."""
    _refuse_mangled(path)
    if is_url(path):
        return client.normal(path)
    plain = local(path)
    return path[: len(path) - len(plain)] + os.path.normpath(plain)


def is_url(path: str) -> bool:
    """Return whether a path is the URL of an object store."""
    return client.is_url(path) and not _FILE_URL.match(path)


def local(path: str) -> str:
    """Return the local path of a ``file://`` URL; return any other path unchanged.

    Raises:
        StorageError: the URL names another machine.
    """
    if not (match := _FILE_URL.match(path)):
        return path
    plain = path[match.end() :]
    if not plain.startswith("/"):
        message = f"{path}: the path in a file URL must start with a slash, as in file:///home/me; pass that, or a path"
        raise StorageError(message, path=path)
    return plain


def _refuse_mangled(path: str) -> None:
    if _MANGLED.match(path):
        message = f"{path}: pathlib made this of a URL; pass the URL as text, or as an etils.epath.Path"
        raise StorageError(message, path=path)


def content_root(path: str) -> str:
    """Return the folder that holds a checkpoint's files; in a store it may be a subfolder of the path."""
    return client.content_root(path) if is_url(path) else path


def listdir(path: str) -> list[str]:
    """List the names in a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: no such directory. Other OSErrors pass through.
    """
    if not is_url(path):
        return os.listdir(path)
    found = client.names(path)
    if not found:
        raise not_found(path)
    return found


def isdir(path: str) -> bool:
    """Return whether a path is a directory."""
    return commit.counts_as_folder(path) if is_url(path) else stat.S_ISDIR(_mode(path))


def isfile(path: str) -> bool:
    """Return whether a path is a regular file or an object."""
    if not is_url(path):
        return stat.S_ISREG(_mode(path))
    return client.is_object(path) and not commit.counts_as_folder(path)


def lexists(path: str) -> bool:
    """Return whether a path exists, without following links."""
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
    """Return the mode of a local path, following links; 0 if it does not exist.

    Raises:
        StorageError: a directory above it may not be searched, so existence is unknown.
    """
    try:
        return os.stat(path).st_mode
    except PermissionError as error:
        # Otherwise only this path is refused, such as the mount point of another user.
        if not os.access(os.path.dirname(path) or os.curdir, os.X_OK, effective_ids=_BY_EFFECTIVE_IDS):
            raise StorageError(f"{path}: {error.strerror}", path=path, errno=error.errno) from error
    except (OSError, ValueError):
        pass
    return 0


def getsize(path: str) -> int:
    """Return the size of a file, in bytes."""
    return client.size(path) if is_url(path) else os.path.getsize(path)


def is_empty(path: str) -> bool:
    """Return whether a file is empty; one request in a store, where its size may take many."""
    return client.is_empty(path) if is_url(path) else os.path.getsize(path) == 0


def holds_nothing(path: str) -> bool:
    """Return whether nothing is lost by replacing a path: a zero-byte file, an empty or unfinished directory."""
    if not is_url(path):
        with atomic.translated(path):
            return no_replace.is_empty(path)
    with suppress(FileNotFoundError):  # another writer has just replaced it
        return commit.is_unfinished(listdir(path)) if isdir(path) else isfile(path) and client.is_empty(path)
    return False


def read(path: str, limit: int | None = None) -> bytes:
    """Read the first ``limit`` bytes of a file, or all."""
    if is_url(path):
        return client.read(path) if limit is None else client.read_range(path, 0, limit)
    with open(path, "rb") as file:
        return file.read(-1 if limit is None else limit)


def total_size(path: str) -> int:
    """Return the bytes in a file, or in all files below a directory; 0 if it does not exist."""
    if is_url(path):
        return _size_in_store(path)
    total = 0
    with suppress(*GONE):
        if not os.path.isdir(path):
            return os.stat(path).st_size
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(*GONE):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _size_in_store(url: str) -> int:
    if not commit.counts_as_folder(url):
        return _size_or_zero(url) if client.is_object(url) else 0
    with client.listing_cache(url):
        inside = [f"{url}/{key}" for key in client.keys(url)]
        client.prefetch_sizes(inside)
        return sum(map(_size_or_zero, inside))


def _size_or_zero(url: str) -> int:
    with suppress(FileNotFoundError):  # another process evicted it
        return client.size(url)
    return 0


def is_valid_destination(path: str) -> bool:
    """Return whether a checkpoint can have this path: a store's bucket cannot be one."""
    return not is_url(path) or path.count("/") > _SLASHES_OF_BUCKET


def temporary_path(path: str) -> str:
    """Return a local temporary path for a checkpoint that is published as ``path``."""
    return commit.staging_path(path) if is_url(path) else atomic.temporary_path(path)


def publish(temporary: str, path: str, *, new: bool = False) -> None:
    """Publish a finished temporary under its final name; no reader sees a part of it.

    Args:
        temporary: result of `temporary_path`.
        path: final path or URL.
        new: do not replace a checkpoint that has this name by now.
    """
    if is_url(path):
        uploads.check_sizes(temporary, path)  # before anything in the store changes
        commit.publish(temporary, path, new=new)
    else:
        atomic.publish(temporary, path, new=new)


def discard(path: str) -> None:
    """Remove a checkpoint; a crash in the middle leaves nothing that counts as one."""
    (commit if is_url(path) else atomic).discard(path)


def prepare_directory(path: str) -> None:
    """Create a directory of checkpoints and remove stale temporaries."""
    if is_url(path):
        commit.remove_stale(path)
    else:
        atomic.make_directory(path)
        atomic.remove_stale(path)


def tensorstore_folder(path: str) -> dict[str, Any]:
    """Return the TensorStore kvstore spec of a directory, as the base of an array or a database."""
    return client.spec(path) if is_url(path) else local_kvstore(os.path.join(os.path.abspath(path), ""))


def local_kvstore(path: str) -> dict[str, Any]:
    """Return the TensorStore kvstore spec of a local path.

    Raises:
        StorageError: a name in the path is not UTF-8, which TensorStore requires.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        message = (
            f"{path}: a name in this path is not UTF-8; TensorStore, which reads and writes arrays of Orbax's "
            "format, requires UTF-8; rename the directory, or save as msgpack"
        )
        raise StorageError(message, path=path, errno=errno.EILSEQ) from error
    return {"driver": "file", "path": path}


def tensorstore_context(path: str) -> Any:
    """Return the TensorStore context to open a path with; None for the default."""
    return client.context() if is_url(path) else None
