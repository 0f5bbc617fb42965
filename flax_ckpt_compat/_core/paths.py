"""Provide one set of path functions for local paths and URLs of object stores.

`storage_of` chooses the class; the functions of this module call its methods. What differs between ``gs://`` and
``s3://`` is in `flax_ckpt_compat._core.object_store.gs` and `flax_ckpt_compat._core.object_store.s3`, but for
credentials and the words of errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.local.storage import LocalStorage
from flax_ckpt_compat._core.location import _STORES, LOCAL, of_text
from flax_ckpt_compat._core.location import as_text as as_text
from flax_ckpt_compat._core.location import is_url as is_url
from flax_ckpt_compat._core.location import local as local
from flax_ckpt_compat._core.location import normal as normal
from flax_ckpt_compat._core.object_store.storage import ObjectStorage


def storage_of(path: str) -> LocalStorage | ObjectStorage:
    """Return the storage of a path or URL."""
    return _STORES if is_url(path) else LOCAL


def absolute(path: str) -> str:
    """Return the absolute local path, or the normalized URL."""
    return of_text(path).path


def is_valid_destination(path: str) -> bool:
    """Return whether a checkpoint can have this path: a store's bucket cannot be one."""
    return storage_of(path).can_hold(path)


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
