"""Object stores (``s3://``, ``gs://``) as folders of objects, through TensorStore, which is loaded on first use.

A URL is ``scheme://bucket/key``. What is not there is a FileNotFoundError, as in a file system; everything else
that a store refuses is a `StorageError` that says what to do. All is retried that is safe to do twice: reading,
listing, deleting, and writing an object whole.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import listing_memory, specs, views
from flax_ckpt_compat._core.object_store.list_proofs import whole_list
from flax_ckpt_compat._core.object_store.specs import context as context
from flax_ckpt_compat._core.object_store.specs import normal as normal
from flax_ckpt_compat._core.object_store.specs import spec as spec
from flax_ckpt_compat._core.object_store.store_errors import OutOfRangeError, attempt, missing, refusal
from flax_ckpt_compat._core.object_store.threads import in_parallel as in_parallel

# TensorStore's version of what is not there (measured).
NO_OBJECT = b"\x02"
_DOTS = {".", ".."}
# What is read whole, for how long to wait: JSON and the like.
_SMALL = 64 * 2**20
_FAR = 2**40 * 5


def is_url(path: str) -> bool:
    """True for what is not a path of the local file system."""
    return "://" in path


@contextmanager
def listing_cache(url: str) -> Iterator[None]:
    """Within it, this thread answers what is there below ``url`` from one listing, taken at its start."""
    if not is_url(url) or listing_memory.known(url) is not None:
        yield
        return
    held, there = listing_memory.held(), fresh_keys(url)
    held.append((url, there, views.visible(there)))
    try:
        yield
    finally:
        held.pop()
        if not held:
            listing_memory.forget()


def keys(url: str) -> list[str]:
    """Names of all objects below the folder ``url``, relative to it; none where there is no such folder."""
    known = listing_memory.known(url)
    return views.visible(fresh_keys(url)) if known is None else known


def content_root(url: str) -> str:
    """Return the URL that a checkpoint's files are read below: its own, or a folder in it while it is replaced."""
    known = listing_memory.known(url, every=True)
    inside = views.current(fresh_keys(url) if known is None else known)
    return url if inside is None else f"{url}/{inside}"


def fresh_keys(url: str) -> list[str]:
    """Return the names of all objects below a folder, never from a snapshot, with those of saves that go on."""
    prefix = _prefix(url)

    stop = prefix[:-1] + b"0" if prefix else b""  # "0" follows "/"

    def ask(start: bytes, stop: bytes) -> list[bytes]:
        names: list[bytes] = attempt(url, "listed", lambda: specs.bucket_store(url).list(_range(start, stop)))
        return names

    whole = whole_list(url, prefix, stop, ask) if url.startswith("gs://") else ask(prefix, stop)
    found = (key[len(prefix) :].decode("utf-8", "surrogateescape") for key in whole)
    # Consoles make an empty object for a folder. Keys with . and .. would on the way become those of other objects.
    return sorted(key for key in found if key and not _DOTS.intersection(key.split("/")))


def _prefix(url: str) -> bytes:
    key = specs.split(url)[2]
    return key.encode() + b"/" if key else b""


def _range(start: bytes, stop: bytes) -> Any:
    import tensorstore as ts

    return ts.KvStore.KeyRange(start, stop)


def names(url: str) -> list[str]:
    """Names of the objects and folders directly in the folder ``url``."""
    return list(dict.fromkeys(key.split("/", 1)[0] for key in keys(url)))


def is_folder(url: str) -> bool:
    """Whether there are objects below ``url``."""
    return bool(keys(url))


def is_object(url: str) -> bool:
    """Whether ``url`` is an object itself."""
    folder, name = posixpath.split(url)
    known = listing_memory.known(folder)
    return name in known if known is not None else _read(url, slice(0, 0)) is not None


def read(url: str) -> bytes:
    """A whole object.

    Raises:
        FileNotFoundError: there is none.
        StorageError: the store refused.
    """
    known = listing_memory.contents().get(url)
    return _present(url, _read(url, None)) if known is None else known


def read_range(url: str, start: int, stop: int) -> bytes:
    """Bytes of an object; fewer, or none, where it ends before ``stop``.

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
    return _present(url, found)


def size(url: str) -> int:
    """Bytes of an object, of which none is read.

    Raises:
        FileNotFoundError: there is none.
        StorageError: the store refused.
    """
    if url in listing_memory.sizes():
        return listing_memory.sizes()[url]
    found = _read(url, slice(_FAR, _FAR + 1))  # no store has objects as large; the refusal tells the size
    if found is None:
        raise _no_object(url)
    return found if isinstance(found, int) and found >= 0 else _probed_size(url)


def is_empty(url: str) -> bool:
    """Return whether an object has no bytes.

    Raises:
        FileNotFoundError: there is none.
        StorageError: the store refused.
    """
    if url in listing_memory.sizes():
        return listing_memory.sizes()[url] == 0
    if url in listing_memory.empties():
        return listing_memory.empties()[url]
    if not url.startswith("gs://"):
        return size(url) == 0  # which one refusal tells
    found = _read(url, slice(0, 1))  # refused as out of range where there is no first byte
    if found is None:
        raise _no_object(url)
    return not isinstance(found, bytes) or not found


def version(url: str) -> bytes:
    """TensorStore's name for what the object is now; `NO_OBJECT` where there is none."""
    try:
        found = _ask(url, slice(0, 0))
    except OutOfRangeError:
        found = _ask(url, None)  # it is empty
    return bytes(found.stamp.generation)


def know_sizes(urls: Collection[str]) -> None:
    """Asks for the sizes of many objects side by side, for this thread's snapshot; outside of one it does nothing."""
    _know(listing_memory.sizes(), urls, size)


def know_which_are_empty(urls: Collection[str]) -> None:
    """Ask many objects side by side whether they are empty, for this thread's snapshot; outside of one do nothing."""
    if all(url.startswith("gs://") for url in urls):
        _know(listing_memory.empties(), urls, is_empty)
    else:
        know_sizes(urls)


def know_contents(urls: Collection[str]) -> None:
    """Reads many small objects side by side, for this thread's snapshot; outside of one it does nothing."""
    _know(listing_memory.contents(), urls, read)


def _know(known: dict[str, Any], urls: Collection[str], ask: Callable[[str], Any]) -> None:
    if listing_memory.held():
        found: dict[str, Any] = {}

        def look(url: str) -> None:
            with suppress(FileNotFoundError):
                found[url] = ask(url)

        in_parallel(look, [url for url in urls if url not in known])
        known.update(found)


def _probed_size(url: str) -> int:
    """The size by asking for single bytes, of a store whose refusals do not tell it."""

    def has(at: int) -> bool:
        return isinstance(_read(url, slice(at, at + 1)), bytes)

    low, high = 0, 1  # as many bytes are there, so many may not be
    while has(high - 1):
        low, high = high, high * 16
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has(middle - 1) else (low, middle)
    return low


def _read(url: str, span: slice | None) -> bytes | int | None:
    """The bytes; None where there is no object; the object's size, or -1, where it ends before the span does."""
    try:
        result = _ask(url, span)
    except OutOfRangeError as error:
        return error.size
    return None if result is None or result.state == "missing" else bytes(result.value)


def _ask(url: str, span: slice | None) -> Any:
    key = views.physical(specs.split(url)[2])
    if not key:
        return None  # a bucket

    def ask() -> Any:
        bucket = specs.bucket_store(url)
        return bucket.read(key) if span is None else bucket.read(key, byte_range=span)

    found = attempt(url, "read", ask, _SMALL if span is None else span.stop - span.start)
    if found.state == "unspecified":  # see `_done`
        raise refusal(url, "read", "the store answered that a condition is not met, though none was given", "412")
    return found


class Object:
    """One object, read in parts that are all of the same version.

    Attributes:
        url: of the object.
        size: in bytes.
    """

    def __init__(self, url: str):
        self.url = url
        self._version = self._version_of(_ask(url, slice(0, 0)))
        self.size = size(url)

    def _version_of(self, result: Any) -> bytes:
        if result is None or result.state == "missing":
            raise _no_object(self.url)
        return bytes(result.stamp.generation)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes from ``start`` to ``stop``, as far as the object goes.

        Raises:
            StorageError: the object was replaced or removed since it was opened, or the store refused.
        """
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        try:
            result = _ask(self.url, slice(start, stop))
        except OutOfRangeError:
            result = None
        if result is None or result.state == "missing" or self._version_of(result) != self._version:
            message = f"{self.url} was replaced or removed since it was opened; open it again"
            raise StorageError(message, path=self.url)
        return bytes(result.value)


def _present(url: str, found: bytes | int | None) -> bytes:
    if not isinstance(found, bytes):
        raise _no_object(url)
    return found


def _no_object(url: str) -> FileNotFoundError:
    """The error for an object that is not there, once it is sure that its bucket is."""
    fresh_keys(url)
    return missing(url)


def write(url: str, data: bytes) -> None:
    """Writes an object whole; what was there before stays until then.

    Raises:
        StorageError: the store refused.
    """
    key = specs.split(url)[2]
    _done(url, "written", lambda: specs.bucket_store(url).write(key, data), len(data))


def delete(url: str) -> None:
    """Deletes an object; none need be there."""
    key = specs.split(url)[2]
    _done(url, "deleted", lambda: specs.bucket_store(url).write(key, None))


def _done(url: str, doing: str, ask: Callable[[], Any], nbytes: int = 0) -> None:
    stamp = attempt(url, doing, ask, nbytes)
    if not stamp.generation:  # how TensorStore tells HTTP 412, also where there was no condition
        raise refusal(url, doing, "the store answered that a condition is not met, though none was given", "412")


def delete_all(urls: Iterable[str]) -> None:
    """Deletes objects, side by side; in no order."""
    in_parallel(delete, list(urls))
