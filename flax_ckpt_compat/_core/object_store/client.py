"""Access object stores (``s3://``, ``gs://``) as folders of objects, through TensorStore, loaded on first use.

A URL is ``scheme://bucket/key``. A missing object is a FileNotFoundError, as in a file system; every other failure is
a `StorageError` with a remedy. Idempotent requests are retried: reads, lists, deletions, and writes of whole objects.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import specs, views
from flax_ckpt_compat._core.object_store.gcs_listing import list_all
from flax_ckpt_compat._core.object_store.request_cache import cache
from flax_ckpt_compat._core.object_store.specs import context as context
from flax_ckpt_compat._core.object_store.specs import normal as normal
from flax_ckpt_compat._core.object_store.specs import spec as spec
from flax_ckpt_compat._core.object_store.store_errors import OutOfRangeError, not_found, retry, store_error
from flax_ckpt_compat._core.object_store.threads import in_parallel as in_parallel

# TensorStore's version of a missing object (measured).
NO_OBJECT = b"\x02"
_DOTS = {".", ".."}
# Assumed size of objects that are read whole (JSON and the like), for timeouts.
_SMALL_BYTES = 64 * 2**20
_BEYOND_END = 2**40 * 5


def is_url(path: str) -> bool:
    """Return whether a path is a URL, and not of the local file system."""
    return "://" in path


@contextmanager
def listing_cache(url: str) -> Iterator[None]:
    """List ``url`` once, and answer this thread's look-ups below it from that list within the context."""
    if not is_url(url) or cache.keys(url) is not None:
        yield
        return
    found = fresh_keys(url)
    cache.listings.append((url, found, views.visible(found)))
    try:
        yield
    finally:
        cache.listings.pop()
        if not cache.listings:
            cache.clear_objects()


def keys(url: str) -> list[str]:
    """Return the names of all objects below the folder ``url``, relative to it; none if there is no such folder."""
    cached_keys = cache.keys(url)
    return views.visible(fresh_keys(url)) if cached_keys is None else cached_keys


def content_root(url: str) -> str:
    """Return the URL with a checkpoint's files: its own, or a folder in it while it is being replaced."""
    cached_keys = cache.keys(url, every=True)
    inside = views.current_folder(fresh_keys(url) if cached_keys is None else cached_keys)
    return url if inside is None else f"{url}/{inside}"


def fresh_keys(url: str) -> list[str]:
    """List all objects below a folder, without the cache and with those of running saves."""
    prefix = _prefix(url)

    stop = prefix[:-1] + b"0" if prefix else b""  # "0" follows "/"

    def list_keys(start: bytes, stop: bytes) -> list[bytes]:
        names: list[bytes] = retry(url, "listed", lambda: specs.bucket_store(url).list(_range(start, stop)))
        return names

    whole = list_all(url, prefix, stop, list_keys) if url.startswith("gs://") else list_keys(prefix, stop)
    found = (key[len(prefix) :].decode("utf-8", "surrogateescape") for key in whole)
    # Consoles create an empty object for a folder. Requests for keys with . or .. would reach other objects.
    return sorted(key for key in found if key and not _DOTS.intersection(key.split("/")))


def _prefix(url: str) -> bytes:
    key = specs.split(url)[2]
    return key.encode() + b"/" if key else b""


def _range(start: bytes, stop: bytes) -> Any:
    import tensorstore as ts

    return ts.KvStore.KeyRange(start, stop)


def names(url: str) -> list[str]:
    """Return the names of the objects and folders directly in the folder ``url``."""
    return list(dict.fromkeys(key.split("/", 1)[0] for key in keys(url)))


def is_folder(url: str) -> bool:
    """Return whether there are objects below ``url``."""
    return bool(keys(url))


def is_object(url: str) -> bool:
    """Return whether ``url`` is an object itself."""
    folder, name = posixpath.split(url)
    cached_keys = cache.keys(folder)
    return name in cached_keys if cached_keys is not None else _read(url, slice(0, 0)) is not None


def read(url: str) -> bytes:
    """Read a whole object.

    Raises:
        FileNotFoundError: there is none.
        StorageError: the store refused.
    """
    cached = cache.contents.get(url)
    return _require(url, _read(url, None)) if cached is None else cached


def read_range(url: str, start: int, stop: int) -> bytes:
    """Read a range of an object; fewer bytes, or none, if it ends before ``stop``.

    Raises:
        FileNotFoundError: there is none.
        StorageError: the store refused.
    """
    if stop <= start:
        return b""
    found = _read(url, slice(start, stop))
    if isinstance(found, int):  # a range that reaches beyond the end is refused
        end = found if found >= 0 else size(url)
        found = b"" if end <= start else _read(url, slice(start, min(stop, end)))
    return _require(url, found)


def size(url: str) -> int:
    """Return the size of an object in bytes, without reading any.

    Raises:
        FileNotFoundError: there is none.
        StorageError: the store refused.
    """
    if url in cache.sizes:
        return cache.sizes[url]
    found = _read(url, slice(_BEYOND_END, _BEYOND_END + 1))  # the error for a range beyond the end has the size
    if found is None:
        raise _not_found_error(url)
    return found if isinstance(found, int) and found >= 0 else _probed_size(url)


def is_empty(url: str) -> bool:
    """Return whether an object has no bytes.

    Raises:
        FileNotFoundError: there is none.
        StorageError: the store refused.
    """
    if url in cache.sizes:
        return cache.sizes[url] == 0
    if url in cache.emptiness:
        return cache.emptiness[url]
    if not url.startswith("gs://"):
        return size(url) == 0  # one request
    found = _read(url, slice(0, 1))  # out of range if there is no first byte
    if found is None:
        raise _not_found_error(url)
    return not isinstance(found, bytes) or not found


def version(url: str) -> bytes:
    """Return TensorStore's generation of an object; `NO_OBJECT` if there is none."""
    try:
        found = _request(url, slice(0, 0))
    except OutOfRangeError:
        found = _request(url, None)  # it is empty
    return bytes(found.stamp.generation)


def prefetch_sizes(urls: Collection[str]) -> None:
    """Request the sizes of many objects in parallel, within `listing_cache` only."""
    _prefetch(cache.sizes, urls, size)


def prefetch_emptiness(urls: Collection[str]) -> None:
    """Request in parallel whether many objects are empty, within `listing_cache` only."""
    if all(url.startswith("gs://") for url in urls):
        _prefetch(cache.emptiness, urls, is_empty)
    else:
        prefetch_sizes(urls)


def prefetch_contents(urls: Collection[str]) -> None:
    """Read many small objects in parallel, within `listing_cache` only."""
    _prefetch(cache.contents, urls, read)


def _prefetch(known: dict[str, Any], urls: Collection[str], request: Callable[[str], Any]) -> None:
    if cache.listings:
        found: dict[str, Any] = {}

        def look(url: str) -> None:
            with suppress(FileNotFoundError):
                found[url] = request(url)

        in_parallel(look, [url for url in urls if url not in known])
        known.update(found)


def _probed_size(url: str) -> int:
    """Find the size by reading single bytes, in a store whose errors do not tell it."""

    def has(at: int) -> bool:
        return isinstance(_read(url, slice(at, at + 1)), bytes)

    low, high = 0, 1  # low bytes exist, high may not
    while has(high - 1):
        low, high = high, high * 16
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has(middle - 1) else (low, middle)
    return low


def _read(url: str, span: slice | None) -> bytes | int | None:
    """Return the bytes; None if there is no object; its size, or -1, if it ends before the span does."""
    try:
        result = _request(url, span)
    except OutOfRangeError as error:
        return error.size
    return None if result is None or result.state == "missing" else bytes(result.value)


def _request(url: str, span: slice | None) -> Any:
    key = views.resolve_key(specs.split(url)[2])
    if not key:
        return None  # the bucket itself

    def request() -> Any:
        bucket = specs.bucket_store(url)
        return bucket.read(key) if span is None else bucket.read(key, byte_range=span)

    found = retry(url, "read", request, _SMALL_BYTES if span is None else span.stop - span.start)
    if found.state == "unspecified":  # see `_write`
        raise store_error(url, "read", "the store reported an unmet condition, though none was given", "412")
    return found


class Object:
    """One version of an object, read in parts.

    Attributes:
        url: the object's URL.
        size: its size in bytes.
    """

    def __init__(self, url: str):
        self.url = url
        self._version = self._version_of(_request(url, slice(0, 0)))
        self.size = size(url)

    def _version_of(self, result: Any) -> bytes:
        if result is None or result.state == "missing":
            raise _not_found_error(self.url)
        return bytes(result.stamp.generation)

    def read(self, start: int, stop: int) -> bytes:
        """Read the bytes from ``start`` to ``stop``, or to the end of the object.

        Raises:
            StorageError: the object was replaced or removed since it was opened, or the store refused.
        """
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        try:
            result = _request(self.url, slice(start, stop))
        except OutOfRangeError:
            result = None
        if result is None or result.state == "missing" or self._version_of(result) != self._version:
            message = f"{self.url} was replaced or removed since it was opened; open it again"
            raise StorageError(message, path=self.url)
        return bytes(result.value)


def _require(url: str, found: bytes | int | None) -> bytes:
    if not isinstance(found, bytes):
        raise _not_found_error(url)
    return found


def _not_found_error(url: str) -> FileNotFoundError:
    """Return the error for a missing object; a list raises if its bucket is missing too."""
    fresh_keys(url)
    return not_found(url)


def write(url: str, data: bytes) -> None:
    """Write a whole object; the old one stays until it is complete.

    Raises:
        StorageError: the store refused.
    """
    key = specs.split(url)[2]
    _write(url, "written", lambda: specs.bucket_store(url).write(key, data), len(data))


def delete(url: str) -> None:
    """Delete an object, if it exists."""
    key = specs.split(url)[2]
    _write(url, "deleted", lambda: specs.bucket_store(url).write(key, None))


def _write(url: str, operation: str, request: Callable[[], Any], nbytes: int = 0) -> None:
    stamp = retry(url, operation, request, nbytes)
    if not stamp.generation:  # TensorStore's sign of HTTP 412, even without a condition
        raise store_error(url, operation, "the store reported an unmet condition, though none was given", "412")


def delete_all(urls: Iterable[str]) -> None:
    """Delete objects in parallel, in any order."""
    in_parallel(delete, list(urls))
