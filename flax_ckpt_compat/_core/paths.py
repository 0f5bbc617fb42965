"""Provide one set of path functions for local paths and URLs of object stores.

`storage_of` chooses the class; the functions of this module call its methods. What differs between ``gs://`` and
``s3://`` is in `flax_ckpt_compat._core.object_store.gs` and `flax_ckpt_compat._core.object_store.s3`, but for
credentials and the words of errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from flax_ckpt_compat._core.errors import ArgumentError, StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.local.storage import LocalStorage
from flax_ckpt_compat._core.object_store import retrying
from flax_ckpt_compat._core.object_store.storage import ObjectStorage

_SLASHES_OF_BUCKET = 2
_MANGLED = re.compile(r"(s3|gs|file):/(?!/)")
_FILE_URL = re.compile(r"file://(localhost(?=/))?", re.IGNORECASE)
_LOCAL, _STORES = LocalStorage(), ObjectStorage()


def storage_of(path: str) -> LocalStorage | ObjectStorage:
    """Return the storage of a path or URL. Its methods, beside those with a function in this module:

    ``content_root``: the folder with a checkpoint's files; in a store it may be a subfolder of the path.
    ``files_below``: the paths of all files below a directory, relative to it.
    ``why_too_long``: why no checkpoint can have a path of that length, or None if one can.
    ``resolve``: the path without symbolic links. ``identity``: device and inode of a local path, or None.
    ``version``: bytes that change when a file is replaced; equal for all machines that share it.
    ``head``: the first bytes of a file, none of an empty one; one request in a store, where its size may take many.
    ``total_size``: bytes in a file, or in all files below a directory; 0 if it does not exist.
    ``prefetch_sizes``, ``prefetch_heads``, ``prefetch_contents``: request many in parallel, in `listing_cache`.
    ``current_listing``, ``offering``: hand the listing of a `listing_cache` to the next one; None on a local disk.
    ``watching``: yield a function that returns whether a checkpoint was replaced since the block began.
    ``offering_after_commit``: hand it the listing that `publish` makes behind its commit.
    ``temporary_path``: a local path for a checkpoint that `publish` publishes.
    ``discard``: remove checkpoints durably; a crash in the middle leaves no part of one. Return path → failure.
    ``restore_set_aside``: put back checkpoints among these names that a dead writer set aside; return their names.
    ``is_shared``: whether a directory is on a network file system, which may show what others change late.
    ``refresh``: see what they have changed in a directory; False if this process may not write to it.
    ``why_unfinished``: why a directory with these names is incomplete by the rules for stores, or None.
    ``kvstore``, ``context``: TensorStore's spec of a directory, and the context to open it with.
    """
    return _STORES if is_url(path) else _LOCAL


def as_text(path: object, what: str = "path") -> str:
    """Return a caller's path, or prefix, as text; raise ArgumentError if it is neither text nor a path object."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if isinstance(text, str):
        return text
    remedy = "decode it with os.fsdecode" if isinstance(text, bytes) else "pass a str or a pathlib.Path"
    found, shape = type(path).__name__, getattr(path, "shape", None)
    if path is None or isinstance(path, (bytes, bool, int, float)):
        found += f": {path!r:.100}"
    else:  # perhaps a tree, whose text may be long
        found += f" of shape {shape}" if isinstance(shape, tuple) else ""
        remedy += "; the path comes first, before the tree" if what == "path" else ""
    raise ArgumentError(f"a {what} is text or a path object, found {found}; {remedy}")


def is_url(path: str) -> bool:
    """Return whether a path is the URL of an object store."""
    return "://" in path and not _FILE_URL.match(path)


def absolute(path: str) -> str:
    """Return the absolute local path, or the normalized URL."""
    _refuse_mangled(path)
    if is_url(path):
        return retrying.normal(path)
    try:
        return os.path.abspath(local(path))
    except FileNotFoundError as error:  # of the working directory
        message = f"{path}: the working directory, to which this path is relative, was removed; pass an absolute path"
        raise StorageError(message, path=path, errno=error.errno) from error


def normal(path: str) -> str:
    """Normalize a path; relative paths stay relative and ``file://`` is kept."""
    _refuse_mangled(path)
    if is_url(path):
        return retrying.normal(path)
    plain = local(path)
    return path[: len(path) - len(plain)] + os.path.normpath(plain)


def local(path: str) -> str:
    """Return the local path of a ``file://`` URL, of this machine alone; return any other path unchanged."""
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


def is_valid_destination(path: str) -> bool:
    """Return whether a checkpoint can have this path: a store's bucket cannot be one."""
    return not is_url(path) or path.count("/") > _SLASHES_OF_BUCKET


def listing_cache(path: str) -> AbstractContextManager[None]:
    """List a folder of a store once, and answer this thread's look-ups below it from that list within the context."""
    return storage_of(path).listing_cache(path)


def listdir(path: str) -> list[str]:
    """List the names in a directory; OSErrors pass through."""
    return storage_of(path).listdir(path)


def resolve(path: str) -> str:
    """Return a path without symbolic links, or a URL, by which two spellings of one directory are the same."""
    return storage_of(path).resolve(path)


def isdir(path: str) -> bool:
    """Return whether a path is a directory."""
    return storage_of(path).isdir(path)


def isfile(path: str) -> bool:
    """Return whether a path is a regular file or an object."""
    return storage_of(path).isfile(path)


def lexists(path: str) -> bool:
    """Return whether a path exists, without following links."""
    return storage_of(path).lexists(path)


def getsize(path: str) -> int:
    """Return the size of a file, in bytes."""
    return storage_of(path).getsize(path)


def holds_nothing(path: str) -> bool:
    """Return whether nothing is lost by replacing a path: a zero-byte file, an empty or unfinished directory."""
    return storage_of(path).holds_nothing(path)


def read(path: str, start: int = 0, stop: int | None = None) -> bytes:
    """Read the bytes of a file from ``start`` to ``stop``; fewer if it ends before."""
    return storage_of(path).read(path, start, stop)


def prepare_directory(path: str) -> None:
    """Create a directory of checkpoints and remove stale temporaries."""
    storage_of(path).prepare_directory(path)


@contextmanager
def temporary(path: str) -> Iterator[str]:
    """Yield a local path for a checkpoint that `publish` publishes within the context; remove it after a failure."""
    found = storage_of(path).temporary_path(path)
    try:
        yield found
    except BaseException:
        atomic.remove_temporary(found)
        raise


def publish(temporary: str, path: str, *, new: bool = False) -> None:
    """Publish a finished temporary under its final name; no reader sees a part of it.

    With ``new`` a checkpoint that has this name by now is not replaced."""
    storage_of(path).publish(temporary, path, new=new)
