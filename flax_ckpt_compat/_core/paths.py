"""What the rules ask about paths, of local ones and of URLs of object stores alike.

A local path takes the functions of `os`, unchanged. In a store, a folder is there while it holds an object.
"""

from __future__ import annotations

import os

from flax_ckpt_compat._core import stores
from flax_ckpt_compat._core.store_errors import missing
from flax_ckpt_compat._core.stores import is_url as is_url
from flax_ckpt_compat._core.stores import snapshot as snapshot


def absolute(path: str) -> str:
    """The absolute local path, or the normal URL."""
    return stores.normal(path) if is_url(path) else os.path.abspath(path)


def normal(path: str) -> str:
    """The path without what has no meaning; a relative one stays relative."""
    return stores.normal(path) if is_url(path) else os.path.normpath(path)


def listdir(path: str) -> list[str]:
    """Names in a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: it is none; other OSErrors as the system, or store, gives them.
    """
    if not is_url(path):
        return os.listdir(path)
    found = stores.names(path)
    if not found:
        raise missing(path)
    return found


def isdir(path: str) -> bool:
    """Whether it is a directory."""
    return stores.is_folder(path) if is_url(path) else os.path.isdir(path)


def isfile(path: str) -> bool:
    """Whether it is a regular file."""
    return stores.is_object(path) if is_url(path) else os.path.isfile(path)


def lexists(path: str) -> bool:
    """Whether there is anything of this name."""
    return stores.is_object(path) or stores.is_folder(path) if is_url(path) else os.path.lexists(path)


def getsize(path: str) -> int:
    """Bytes of a file."""
    return stores.size(path) if is_url(path) else os.path.getsize(path)


def read(path: str, limit: int | None = None) -> bytes:
    """The first ``limit`` bytes of a file, or all."""
    if is_url(path):
        return stores.read(path) if limit is None else stores.read_range(path, 0, limit)
    with open(path, "rb") as file:
        return file.read(-1 if limit is None else limit)
