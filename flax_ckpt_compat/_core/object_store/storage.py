"""Reach ``s3://`` and ``gs://`` URLs, where a folder exists while it holds an object."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.listing import AfterCommit, Listing
from flax_ckpt_compat._core.object_store import (
    client,
    commit,
    multiprocess,
    prefetching,
    removal,
    request_timeouts,
    retrying,
    uploads,
)
from flax_ckpt_compat._core.object_store.opened_object import OpenedObject
from flax_ckpt_compat._core.storage import Storage
from flax_ckpt_compat._core.storage_errors import not_found, store_errors
from flax_ckpt_compat._core.upload import Upload

_MAX_KEY, _MAX_INSIDE = 1024, 128  # bytes that stores take, and of the names of a checkpoint's files
_SLASHES_OF_BUCKET = 2
# Of what TensorStore itself tries again, for this long, beside the time for the bytes.
_TIMEOUT = 60.0  # seconds
_SLOWEST_RATE = 2**20  # bytes/s


class ObjectStorage(Storage):
    """An object store; paths are URLs."""

    is_remote = True
    names_processes = sets_aside = False

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

    def resolve(self, path: str) -> str:
        return path

    def why_too_long(self, path: str) -> str | None:
        size = len(retrying.key_of(path).encode())
        if size <= _MAX_KEY - _MAX_INSIDE:
            return None
        return f"{size} bytes without the bucket, and up to {_MAX_INSIDE} for its files, are more than the store allows"

    def can_hold(self, path: str) -> bool:
        return path.count("/") > _SLASHES_OF_BUCKET

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
        prefetching.prefetch_sizes(inside, listing)
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

    def identity(self, path: str) -> None:
        """Return None: folders have no identity, and objects are compared by their version."""

    def watch(self, path: str, listing: Listing | None = None) -> Callable[[], bool]:
        return client.watch(path, listing)

    def delete(self, path: str) -> None:
        client.delete(path)

    def prefetch_sizes(self, paths: Collection[str], listing: Listing) -> None:
        prefetching.prefetch_sizes(paths, listing)

    def prefetch_heads(self, paths: Collection[str], listing: Listing) -> None:
        prefetching.prefetch_heads(paths, listing)

    def prefetch_contents(self, paths: Collection[str], listing: Listing) -> None:
        prefetching.prefetch_contents(paths, listing)

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
        return {name: removal.is_removed_whole(path, name, known) for name in removal.stale_names(path, known)}

    def remove_leftovers(self, path: str, names: Collection[str]) -> None:
        removal.remove_stale(path, names)

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
    ) -> None:
        uploads.check_sizes(temporary, path)  # before anything in the store changes
        commit.publish(temporary, path, new=new, known=listing, after=after)

    def discard(self, doomed: Iterable[str], listing: Listing | None = None) -> dict[str, StorageError]:
        failures = {}
        for path in doomed:
            try:
                removal.discard(path, listing)
            except StorageError as error:
                failures[path] = error
        return failures

    def restore_set_aside(self, directory: str, names: Collection[str]) -> list[str]:  # noqa: ARG002
        """Return nothing: stores need not set anything aside."""
        return []

    def is_shared(self, directory: str) -> bool:  # noqa: ARG002
        """Return False: stores show at once what others change, so there is nothing to ``refresh`` either."""
        return False

    refresh = is_shared

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


def _size_or_zero(url: str, known: Listing | None) -> int:
    with suppress(FileNotFoundError):  # another process evicted it
        return client.size(url, known)
    return 0
