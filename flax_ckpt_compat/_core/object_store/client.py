"""Access object stores (``s3://``, ``gs://``) as folders of objects.

A URL is ``scheme://bucket/key``. A missing object is a FileNotFoundError, as in a file system; every other failure is
a `StorageError` with a remedy. Idempotent requests are retried: reads, lists, deletions, and writes of whole objects.
"""

from __future__ import annotations

import functools
import importlib
import posixpath
from collections.abc import Callable, Iterable
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.listing import AfterCommit, Listing
from flax_ckpt_compat._core.object_store import size_probing, visible_objects
from flax_ckpt_compat._core.object_store.base_scheme import StoreScheme
from flax_ckpt_compat._core.object_store.request_errors import OutOfRangeError, store_error
from flax_ckpt_compat._core.object_store.retrying import key_of, retry, split
from flax_ckpt_compat._core.object_store.schemes import SCHEMES
from flax_ckpt_compat._core.orbax_layout import MANIFEST
from flax_ckpt_compat._core.storage_errors import not_found
from flax_ckpt_compat._core.thread_pools import in_parallel

# TensorStore's version of a missing object (measured).
NO_OBJECT = b"\x02"
_DOTS = {".", ".."}
HEAD_BYTES = 32  # enough to tell a msgpack tree from most other files
# Assumed size of objects that are read whole (JSON and the like), for timeouts.
_SMALL_BYTES = 64 * 2**20


def scheme_of(url: str) -> StoreScheme:
    """Return what the scheme of a URL has of its own."""
    return _scheme(split(url)[0])


@functools.cache
def _scheme(name: str) -> StoreScheme:
    module, _, kind = SCHEMES[name].implementation.rpartition(".")
    found: StoreScheme = getattr(importlib.import_module(module), kind)()
    return found


def bucket_store(url: str, context: Any = None) -> Any:
    """Open the bucket of a URL as a TensorStore ``KvStore``; see `StoreScheme.open`."""
    return scheme_of(url).open(split(url)[1], context)


def spec(url: str) -> dict[str, Any]:
    """Return TensorStore's spec of the folder ``url``, as the base of an array or of a database."""
    _, bucket, key = split(url)
    found, folder = scheme_of(url).bucket_spec(bucket), visible_objects.parent(key)
    if folder is not None:  # the manifest is the only file of a database whose name another one has too
        manifest = {"base": found | {"path": f"{key.removesuffix('/')}/{MANIFEST}"}, "exact": MANIFEST}
        data = {"base": found | {"path": f"{folder}/"}}
        return {"driver": "kvstack", "layers": [data, manifest | {"strip_prefix": len(MANIFEST)}], "path": ""}
    return found | {"path": key.removesuffix("/") + "/"} if key else found


def listing(url: str) -> Listing:
    """List all keys below a folder."""
    found = fresh_keys(url)
    return Listing(url, found, visible_objects.visible(found))


def watch(url: str, known: Listing | None = None) -> Callable[[], bool]:
    """Return a function that lists a folder, and returns whether its checkpoint was replaced since it was listed."""
    before = known_or_fresh_keys(url, known)
    return lambda: is_replaced(url, before)


def is_replaced(url: str, before: list[str]) -> bool:
    """Return whether a folder's checkpoint was replaced since it had these keys."""
    # An object is read in one version; of an empty folder, nothing is.
    return bool(before) and visible_objects.is_replaced(before, fresh_keys(url))


def keys(url: str, known: Listing | None = None) -> list[str]:
    """Return the names of all objects below the folder ``url``, relative to it; none if there is no such folder."""
    listed = None if known is None else known.below(url, every=visible_objects.is_in_next_folder(url))
    return visible_objects.visible(fresh_keys(url)) if listed is None else listed


def known_keys(url: str, known: Listing | None = None) -> list[str] | None:
    """Return what `fresh_keys` returned for the listing; None if it does not cover the folder."""
    return None if known is None else known.below(url, every=True)


def known_or_fresh_keys(url: str, known: Listing | None = None) -> list[str]:
    """Return `known_keys`, or `fresh_keys` where there are none."""
    found = known_keys(url, known)
    return fresh_keys(url) if found is None else found


def content_root(url: str, known: Listing | None = None) -> str:
    """Return the URL with a checkpoint's files: its own, or a folder in it while it is being replaced."""
    inside = visible_objects.current_folder(known_or_fresh_keys(url, known))
    return url if inside is None else f"{url}/{inside}"


def fresh_keys(url: str) -> list[str]:
    """List all objects below a folder, without the cache and with those of running saves."""
    key = key_of(url)
    prefix = key.encode() + b"/" if key else b""
    stop = prefix[:-1] + b"0" if prefix else b""  # "0" follows "/"
    whole = scheme_of(url).list_keys(url, prefix, stop)
    found = (key[len(prefix) :].decode("utf-8", "surrogateescape") for key in whole)
    # Consoles and tools create an empty object for a folder. Requests for keys with . or .. would reach other objects.
    return sorted(key for key in found if key and key[-1] != "/" and not _DOTS.intersection(key.split("/")))


def keys_after_commit(url: str, after: AfterCommit | None) -> list[str]:
    """List a folder afresh; as part of the listing that `AfterCommit` asks for."""
    if after is None:
        return fresh_keys(url)
    after.listing = listing(after.folder)
    return after.listing.below(url, every=True) or []


def names(url: str, known: Listing | None = None) -> list[str]:
    """Return the names of the objects and folders directly in the folder ``url``."""
    return list(dict.fromkeys(key.split("/", 1)[0] for key in keys(url, known)))


def is_object(url: str, known: Listing | None = None) -> bool:
    """Return whether ``url`` is an object itself."""
    listed = _is_listed(url, known)
    if listed is not None:
        return listed
    if known is None:
        return _read(url, slice(0, 0)) is not None
    try:
        head(url, known)  # the next question is what it begins with
    except FileNotFoundError:
        return False
    return True


def is_listed_object(url: str, known: Listing | None = None) -> bool:
    """Return whether the listing has ``url`` as an object; False if it does not cover it."""
    return bool(_is_listed(url, known))


def _is_listed(url: str, known: Listing | None) -> bool | None:
    if known is None:
        return None
    return known.holds_file(url, every=visible_objects.is_in_next_folder(posixpath.dirname(url)))


def read(url: str, known: Listing | None = None) -> bytes:
    """Read a whole object; raise FileNotFoundError if there is none."""
    cached = None if known is None else known.contents.get(url)
    return _whole(url, _read_there(url, None)) if cached is None else cached


def read_range(url: str, start: int, stop: int) -> bytes:
    """Read a range of an object; fewer bytes, or none, if it ends before ``stop``."""
    if stop <= start:
        return b""
    found = _read_there(url, slice(start, stop))
    if isinstance(found, int):  # a range that reaches beyond the end is refused
        end = found if found >= 0 else size(url)
        found = b"" if end <= start else _read_there(url, slice(start, min(stop, end)))
    return _whole(url, found)


def size(url: str, known: Listing | None = None) -> int:
    """Return the size of an object in bytes, reading at most the end of it."""
    if known is not None and url in known.sizes:
        return known.sizes[url]
    scheme = scheme_of(url)
    if not scheme.tells_sizes:
        stored = scheme.stored_size(_resolve(url))
        return probed_size(url) if stored is None else stored
    # The error for a range beyond the end has the size.
    found = _read_there(url, slice(size_probing.BEYOND_END, size_probing.BEYOND_END + 1))
    return found if isinstance(found, int) and found >= 0 else probed_size(url)


def head(url: str, known: Listing | None = None) -> bytes:
    """Return the first bytes of an object, all of a tiny one; one request if it has more, or none if it is known."""
    if known is not None and url in known.heads:
        return known.heads[url]
    if _is_listed(url, known) is False:
        raise not_found(url)
    found = read_range(url, 0, HEAD_BYTES)
    if known is not None:
        known.heads[url] = found
    return found


def version(url: str) -> bytes:
    """Return TensorStore's generation of an object; `NO_OBJECT` if there is none."""
    try:
        found = request_object(url, slice(0, 0))
    except OutOfRangeError:
        found = request_object(url, None)  # it is empty
    return bytes(found.stamp.generation)


def probed_size(url: str) -> int:
    """Find a size by reading; see `size_probing.probed_size`."""
    return size_probing.probed_size(url, lambda start, stop: _read_there(url, slice(start, stop)))


def _read_there(url: str, span: slice | None) -> bytes | int:
    """Return what `_read` does; raise FileNotFoundError if there is no object."""
    found = _read(url, span)
    if found is None:
        raise not_found_error(url)
    return found


def _read(url: str, span: slice | None) -> bytes | int | None:
    """Return the bytes; None if there is no object; its size, or -1, if it ends before the span does."""
    try:
        result = request_object(url, span)
    except OutOfRangeError as error:
        return error.size
    return None if result is None or result.state == "missing" else bytes(result.value)


def request_object(url: str, span: slice | None) -> Any:
    """Read an object, or a span of it; return TensorStore's result, or None for the bucket itself."""
    key = visible_objects.resolve_key(key_of(url))
    if not key:
        return None

    def request() -> Any:
        bucket = bucket_store(url)
        return bucket.read(key) if span is None else bucket.read(key, byte_range=span)

    nbytes, at_most = (0, _SMALL_BYTES) if span is None else (span.stop - span.start, 0)
    try:
        found = retry(url, "read", request, nbytes, at_most=at_most)
    except OutOfRangeError as error:
        if span is None:
            raise too_short(url) from error
        raise
    if found.state == "unspecified":  # see `_write`
        raise _unconditional_412(url, "read")
    return found


def stored_crc32c(url: str) -> int | None:
    """Return the CRC-32C of an object that its store reports, or None."""
    return scheme_of(url).stored_crc32c(_resolve(url))


def _resolve(url: str) -> str:
    """Return the URL of the object itself; see `visible_objects.resolve_key`."""
    key = key_of(url)
    return f"{url.removesuffix(key)}{visible_objects.resolve_key(key)}"


def _whole(url: str, found: bytes | int) -> bytes:
    if isinstance(found, int):
        raise too_short(url)
    return found


def too_short(url: str) -> StorageError:
    """Return the error for an answer that ends before the object does."""
    return store_error(url, "read", "the answer has fewer bytes than the object", "")


def not_found_error(url: str) -> FileNotFoundError:
    """Return the error for a missing object; a list raises if its bucket is missing too."""
    fresh_keys(url)
    return not_found(url)


def write(url: str, data: bytes) -> None:
    """Write a whole object; the old one stays until it is complete."""
    _write(url, "written", lambda: bucket_store(url).write(key_of(url), data), len(data))


def delete(url: str) -> None:
    """Delete an object, if it exists."""
    _write(url, "deleted", lambda: bucket_store(url).write(key_of(url), None))


def delete_version(url: str, there: bytes) -> bool:
    """Delete this version of an object: a request that the store executes late, or twice, deletes no newer one.

    Return whether it was deleted. Where `StoreScheme.deletes_versions` is False, any version is."""
    scheme = scheme_of(url)
    if not scheme.deletes_versions():
        delete(url)
        return True
    return scheme.delete_version(url, there)


def _write(url: str, operation: str, request: Callable[[], Any], nbytes: int = 0) -> None:
    stamp = retry(url, operation, request, nbytes)
    if not stamp.generation:  # TensorStore's sign of HTTP 412, even without a condition
        raise _unconditional_412(url, operation)


def _unconditional_412(url: str, operation: str) -> StorageError:
    return store_error(url, operation, "the store answered HTTP 412 to an unconditional request", "412")


def delete_all(urls: Iterable[str]) -> None:
    """Delete objects in parallel, in any order."""
    in_parallel(delete, list(urls))
