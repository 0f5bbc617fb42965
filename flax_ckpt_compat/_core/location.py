"""Make the `Location` of a caller's path, at the door: of text or a path object, of the local disk or a store."""

from __future__ import annotations

import os
import posixpath
import re
from contextlib import suppress

from flax_ckpt_compat._core.errors import ArgumentError, StorageError
from flax_ckpt_compat._core.storage import Location as Location
from flax_ckpt_compat._core.storage import split_url

_MANGLED = re.compile(r"(s3|gs|az|hf|file):/(?!/)")
_REFUSED = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
_FILE_URL = re.compile(r"file://(localhost(?=/))?", re.IGNORECASE)


def location_of(path: object, what: str = "path") -> Location:
    """Return the location of a caller's path, text or a path object: absolute, or a normalized URL.

    Raise ArgumentError if it is neither, and StorageError for a URL that no storage takes."""
    if isinstance(path, Location):
        return path
    text = as_text(path, what)
    if is_url(text):
        from flax_ckpt_compat._core.object_store import commit, storage  # here, because few programs need them

        commit.client_for(text)  # raises for a scheme that nothing reaches
        return storage.ObjectLocation(normal_url(text))
    try:
        return Location(os.path.abspath(local(text)))
    except FileNotFoundError as error:  # of the working directory
        message = f"{text}: the working directory, to which this path is relative, was removed; pass an absolute path"
        raise StorageError(message, path=text, errno=error.errno) from error


def resolved(path: str) -> Location:
    """Return the location of a path as the file system resolves it: ``..`` after the name of a link leads elsewhere."""
    with suppress(ValueError):  # no file can have this name; a save refuses it
        return location_of(path) if is_url(path) else Location(os.path.realpath(local(path)))
    return location_of(path)


def as_text(path: object, what: str = "path") -> str:
    """Return a caller's path, or prefix, as text; raise ArgumentError if it is neither text nor a path object."""
    with suppress(TypeError):
        if isinstance(text := os.fspath(path), str):  # type: ignore[call-overload]
            return text
    remedy = "pass a str or a pathlib.Path" + "; the path comes first, before the tree" * (what == "path")
    raise ArgumentError(f"a {what} is text or a path object, found {type(path).__name__}; {remedy}")


def is_url(path: str) -> bool:
    """Return whether a path is the URL of an object store."""
    return "://" in path and not _FILE_URL.match(path)


def normal_url(url: str) -> str:
    """Normalize a user's URL: resolve ``.`` and ``..``, and remove redundant slashes."""
    scheme, bucket, key = split_url(url)
    if found := _REFUSED.search(url):
        message = f"{url!a} has the character {found[0]!a}, with which stores take no name, or change it; leave it out"
        raise StorageError(message, path=url)
    return f"{scheme}://{bucket}{posixpath.normpath('/' + key.lstrip('/'))}".rstrip("/")


def normal(path: str) -> str:
    """Normalize the text of a path; relative paths stay relative and ``file://`` is kept."""
    if is_url(path):
        return location_of(path).path
    plain = local(path)
    return path[: len(path) - len(plain)] + os.path.normpath(plain)


def local(path: str) -> str:
    """Return the local path of a ``file://`` URL, of this machine alone, or any other path; refuse what was a URL."""
    if _MANGLED.match(path):
        message = f"{path}: pathlib made this of a URL; pass the URL as text, or as an etils.epath.Path"
        raise StorageError(message, path=path)
    if not (match := _FILE_URL.match(path)):
        return path
    plain = path[match.end() :]
    if not plain.startswith("/"):
        message = f"{path}: the path in a file URL must start with a slash, as in file:///home/me; pass that, or a path"
        raise StorageError(message, path=path)
    return plain
