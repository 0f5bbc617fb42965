"""Reach ``s3://`` and ``gs://`` URLs, where a folder exists while it holds an object."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

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
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import RemoteStorage
from flax_ckpt_compat._core.storage_errors import not_found, store_errors
from flax_ckpt_compat._core.upload import Upload

# Of what TensorStore itself tries again, for this long, beside the time for the bytes.
_TIMEOUT = 60.0  # seconds
_SLOWEST_RATE = 2**20  # bytes/s


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


def _size_or_zero(url: str, known: Listing | None) -> int:
    with suppress(FileNotFoundError):  # another process evicted it
        return client.size(url, known)
    return 0
