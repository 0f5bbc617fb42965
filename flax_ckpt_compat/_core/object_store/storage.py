"""Reach ``s3://`` and ``gs://`` URLs, where a folder exists while it holds an object."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import client, commit, prefetching, removal, retrying, thread_cache, uploads
from flax_ckpt_compat._core.storage_errors import not_found

_MAX_KEY, _MAX_INSIDE = 1024, 128  # bytes that stores take, and of the names of a checkpoint's files


class ObjectStorage:
    """An object store; see `flax_ckpt_compat._core.paths` for the methods."""

    is_remote = True
    content_root = staticmethod(client.content_root)
    isdir = staticmethod(commit.counts_as_folder)
    isfile = staticmethod(commit.counts_as_object)
    files_below = staticmethod(client.keys)
    getsize = staticmethod(client.size)
    head = staticmethod(client.head)
    version = staticmethod(client.version)
    delete = staticmethod(client.delete)
    listing_cache = staticmethod(client.listing_cache)
    watching = staticmethod(client.watching)
    current_listing = staticmethod(thread_cache.current_listing)
    offering = staticmethod(thread_cache.offering)
    offering_after_commit = staticmethod(thread_cache.offering_after_commit)
    prefetch_sizes = staticmethod(prefetching.prefetch_sizes)
    prefetch_heads = staticmethod(prefetching.prefetch_heads)
    prefetch_contents = staticmethod(prefetching.prefetch_contents)
    why_unfinished = staticmethod(commit.why_unfinished)
    temporary_path = staticmethod(commit.staging_path)
    prepare_directory = staticmethod(removal.remove_stale)
    kvstore = staticmethod(client.spec)

    def context(self) -> Any:
        return retrying.context()

    def why_too_long(self, path: str) -> str | None:
        size = len(retrying.key_of(path).encode())
        if size <= _MAX_KEY - _MAX_INSIDE:
            return None
        return f"{size} bytes without the bucket, and up to {_MAX_INSIDE} for its files, are more than the store allows"

    def resolve(self, path: str) -> str:
        return path

    def listdir(self, path: str) -> list[str]:
        found = client.names(path)
        if not found:
            raise not_found(path)
        return found

    def lexists(self, path: str) -> bool:
        return bool(client.keys(path)) or client.is_object(path)

    def holds_nothing(self, path: str) -> bool:
        with suppress(FileNotFoundError):  # another writer has just replaced it
            if self.isdir(path):
                return commit.is_unfinished(self.listdir(path))
            return client.is_object(path) and not client.head(path)
        return False

    def identity(self, path: str) -> None:
        """Return None: folders have no identity, and objects are compared by their version."""

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return client.read(path) if stop is None else client.read_range(path, start, stop)

    def total_size(self, path: str) -> int:
        if not commit.counts_as_folder(path):
            return _size_or_zero(path) if client.is_object(path) else 0
        with client.listing_cache(path):
            inside = [f"{path}/{key}" for key in client.keys(path)]
            prefetching.prefetch_sizes(inside)
            return sum(map(_size_or_zero, inside))

    def publish(self, temporary: str, path: str, *, new: bool) -> None:
        uploads.check_sizes(temporary, path)  # before anything in the store changes
        commit.publish(temporary, path, new=new)

    def discard(self, doomed: Iterable[str]) -> dict[str, StorageError]:
        failures = {}
        for path in doomed:
            try:
                removal.discard(path)
            except StorageError as error:
                failures[path] = error
        return failures

    def restore_set_aside(self, directory: str, names: Iterable[str]) -> list[str]:  # noqa: ARG002
        return []

    def is_shared(self, directory: str) -> bool:  # noqa: ARG002
        """Return False: stores show at once what others change, so there is nothing to ``refresh`` either."""
        return False

    refresh = is_shared


def _size_or_zero(url: str) -> int:
    with suppress(FileNotFoundError):  # another process evicted it
        return client.size(url)
    return 0
