"""Reach ``s3://`` and ``gs://`` URLs, where a folder exists while it holds an object."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.listing import AfterCommit, Listing
from flax_ckpt_compat._core.object_store import (
    client,
    commit,
    multiprocess,
    removal,
    request_timeouts,
    retrying,
    uploads,
)
from flax_ckpt_compat._core.object_store.request_errors import OutOfRangeError, store_errors
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import HEAD_BYTES, RemoteStorage, Source
from flax_ckpt_compat._core.storage_errors import not_found
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.upload import Upload

# Of what TensorStore itself tries again, for this long, beside the time for the bytes.
_TIMEOUT = 60.0  # seconds
_SLOWEST_RATE = 2**20  # bytes/s
_TINY_AT_ONCE = 64  # requests for a byte or less


class ObjectStorage(RemoteStorage):
    """An object store that TensorStore has a client for."""

    def normal(self, path: str) -> str:
        return retrying.normal(path)

    def listing(self, path: str) -> Listing:
        return client.listing(path)

    def isdir(self, path: str, listing: Listing | None = None) -> bool:
        return commit.counts_as_folder(path, listing)

    def isfile(self, path: str, listing: Listing | None = None) -> bool:
        return commit.counts_as_object(path, listing)

    def exists(self, path: str, listing: Listing | None = None) -> bool:
        return bool(client.keys(path, listing)) or client.is_object(path, listing)

    def listdir(self, path: str, listing: Listing | None = None) -> list[str]:
        found = client.names(path, listing)
        if not found:
            raise not_found(path)
        return found

    def files_below(self, path: str, listing: Listing | None = None) -> list[str]:
        return client.keys(path, listing)

    def why_too_long(self, path: str) -> str | None:
        size = len(retrying.key_of(path).encode())
        if size <= self.max_key - self.max_inside:
            return None
        inside = f"up to {self.max_inside} for its files"
        return f"{size} bytes without the bucket, and {inside}, are more than the store allows"

    def size(self, path: str, listing: Listing | None = None) -> int:
        return client.size(path, listing)

    def head(self, path: str, listing: Listing | None = None) -> bytes:
        return client.head(path, listing)

    def total_size(self, path: str, listing: Listing | None = None) -> int:
        if not commit.counts_as_folder(path, listing):
            return _size_or_zero(path, listing) if client.is_object(path, listing) else 0
        if listing is None or not listing.covers(path):
            listing = client.listing(path)
        inside = [f"{path}/{key}" for key in client.keys(path, listing)]
        self.prefetch_sizes(inside, listing)
        return sum(_size_or_zero(url, listing) for url in inside)

    def read(self, path: str, start: int = 0, stop: int | None = None, listing: Listing | None = None) -> bytes:
        if stop is None:
            return client.read(path, listing)[start:]
        return client.read_range(path, start, stop)

    def open_file(self, path: str) -> OpenedObject:
        return OpenedObject(path)

    def version(self, path: str) -> bytes:
        found = client.version(path)
        if found == client.NO_OBJECT:
            raise not_found(path)
        return found

    def watch(self, path: str, listing: Listing | None = None) -> Callable[[], bool]:
        return client.watch(path, listing)

    def delete(self, path: str) -> None:
        client.delete(path)

    def prefetch_sizes(self, paths: Collection[str], listing: Listing) -> None:
        _prefetch(listing.sizes, paths, client.size)

    def prefetch_heads(self, paths: Collection[str], listing: Listing) -> None:
        objects = [path for path in paths if commit.counts_as_object(path, listing)]
        _prefetch(listing.heads, objects, client.head)

    def prefetch_contents(self, paths: Collection[str], listing: Listing) -> None:
        _prefetch(listing.contents, paths, client.read)

    def content_root(self, path: str, listing: Listing | None = None) -> str:
        return client.content_root(path, listing)

    def why_unfinished(self, path: str, names: Collection[str]) -> str | None:
        return commit.why_unfinished(path, names)

    def holds_nothing(self, path: str, listing: Listing | None = None) -> bool:
        with suppress(FileNotFoundError):  # another writer has just replaced it
            if self.isdir(path, listing):
                return commit.is_unfinished(self.listdir(path, listing))
            return client.is_object(path, listing) and not client.head(path, listing)
        return False

    def prepare_directory(self, path: str, listing: Listing | None = None) -> None:
        removal.remove_stale(path, known=listing)

    def leftovers(self, path: str) -> dict[str, bool]:
        known = client.listing(path)
        found = {name: removal.is_removed_whole(path, name, known) for name in removal.stale_names(path, known)}
        # Parts that are no object yet are in no listing; an object of that name, which is complete, stays.
        return {name: not client.is_object(f"{path}/{name}") for name in removal.stale_uploads(path)} | found

    def remove_leftovers(self, path: str, names: Collection[str]) -> None:
        removal.remove_stale(path, names)
        removal.abort_stale_uploads(path, names)

    def temporary_path(self, path: str, *, locked: bool = False) -> str:
        return commit.staging_path(path, locked=locked)

    def publish(
        self,
        temporary: str,
        path: str,
        *,
        new: bool = False,
        listing: Listing | None = None,
        after: AfterCommit | None = None,
        meter: Meter = OFF,
    ) -> None:
        uploads.check_sizes(temporary, path)  # before anything in the store changes
        commit.publish(temporary, path, new=new, known=listing, after=after, meter=meter)

    def discard_one(self, path: str, listing: Listing | None) -> None:
        removal.discard(path, listing)

    def kvstore(self, path: str) -> dict[str, Any]:
        return client.spec(path)

    def context(self) -> Any:
        return retrying.context()

    def stored_crc32c(self, path: str) -> int | None:
        return client.stored_crc32c(path)

    def begin_upload(self, path: str, *, in_gda_folder: bool) -> Upload:
        return multiprocess.begin(path, in_gda_folder=in_gda_folder)

    def join_upload(self, fields: dict[str, str]) -> Upload:
        return multiprocess.MultiprocessUpload(**fields)

    def wait(self, path: str, future: Any, nbytes: int = 0) -> Any:
        with store_errors(path), retrying.replaced_context_after_failure():
            return request_timeouts.wait(future, nbytes, _TIMEOUT, _SLOWEST_RATE)

    def retry(self, path: str, operation: str, request: Callable[[], Any], nbytes: int = 0) -> Any:
        return retrying.retry(path, operation, request, nbytes)


def _prefetch(answers: dict[str, Any], urls: Collection[str], request: Callable[[str], Any]) -> None:
    """Ask the store for what is not among the answers, in parallel, before look-ups ask one by one."""
    found: dict[str, Any] = {}

    def look(url: str) -> None:
        with suppress(FileNotFoundError):
            found[url] = request(url)

    in_parallel(look, [url for url in urls if url not in answers], _TINY_AT_ONCE)
    answers.update(found)


def _size_or_zero(url: str, known: Listing | None) -> int:
    with suppress(FileNotFoundError):  # another process evicted it
        return client.size(url, known)
    return 0


class OpenedObject(Source):
    """One version of an object, of ``size`` bytes, read in parts; ``head`` has its first bytes, or all of a small one.

    Size and version are of one moment: a small object is one answer, and of a large one the size is looked up later
    than the first bytes, and earlier than the last.
    """

    def __init__(self, url: str):
        self.path = url
        self.head, self.size = b"", 0
        try:
            found, is_whole = client.request_object(url, slice(0, HEAD_BYTES)), False
        except OutOfRangeError as error:
            if error.size <= 0:
                return  # empty
            found, is_whole = client.request_object(url, None), True  # one answer, even if it was just replaced
            if found is not None and len(found.value) < error.size and client.size(url) > len(found.value):
                raise client.too_short(url) from error
        self._version = self._version_of(found)
        self.head = bytes(found.value)
        self.size = len(self.head) if is_whole else client.size(url)

    def _version_of(self, result: Any) -> bytes:
        if result is None or result.state == "missing":
            raise client.not_found_error(self.path)
        return bytes(result.stamp.generation)

    def read(self, start: int, stop: int) -> bytes:
        """Read from ``start`` to ``stop`` or the end; raise StorageError if the object was replaced or removed."""
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        try:
            result = client.request_object(self.path, slice(start, stop))
        except OutOfRangeError:
            result = None
        if result is None or result.state == "missing" or self._version_of(result) != self._version:
            message = f"{self.path} was replaced or removed since it was opened; open it again"
            raise StorageError(message, path=self.path, errno=errno.ESTALE)
        return bytes(result.value)
