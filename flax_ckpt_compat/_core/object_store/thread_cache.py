"""Cache the answers of a store within a listed folder, for each thread, to make no request twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import visible_objects
from flax_ckpt_compat._core.thread_pools import Once, start_thread


class Listing(NamedTuple):
    """A folder with all its keys, the visible ones, and the first bytes of its objects as far as they are known."""

    root: str
    keys: list[str]
    visible: list[str]
    heads: dict[str, bytes]

    def below(self, url: str, *, every: bool) -> list[str] | None:
        """Return the keys below ``url`` if the listing covers it: the visible ones, or ``every`` one."""
        inside = self.keys if every else self.visible
        if url == self.root:
            return inside
        if not url.startswith(self.root + "/"):
            return None
        inner = url[len(self.root) + 1 :] + "/"
        return [key[len(inner) :] for key in inside if key.startswith(inner)]


class _Cache(threading.local):
    """Answers of this thread's requests by URL; ``offered`` is the listing that `client.listing_cache` uses next.

    ``wanted`` is the folder that `client.keys_after_commit` lists for it."""

    def __init__(self) -> None:
        self.listings: list[Listing] = []
        self.offered: Listing | None = None
        self.wanted: str | None = None
        self.beside: list[Once] = []  # what `offering_after_commit` waits for
        self.sizes: dict[str, int] = {}
        self.heads: dict[str, bytes] = {}
        self.contents: dict[str, bytes] = {}

    def keys(self, url: str, *, every: bool = False) -> list[str] | None:
        """Return the keys below ``url`` if a listing covers it: the visible ones, or ``every`` one."""
        every = every or visible_objects.is_in_next_folder(url)
        for listing in self.listings:
            found = listing.below(url, every=every)
            if found is not None:
                return found
        return None

    def clear_objects(self) -> None:
        """Clear all but the listings."""
        self.sizes.clear()
        self.heads.clear()
        self.contents.clear()


cache = _Cache()


def current_listing() -> Listing | None:
    """Return the listing of the enclosing `client.listing_cache`, with what was found since, for `offering`."""
    return cache.listings[0]._replace(heads=dict(cache.heads)) if cache.listings else None


@contextmanager
def offering(listing: Listing | None) -> Iterator[None]:
    """Let the first `client.listing_cache` within the context use a listing that was just made."""
    cache.offered = listing
    try:
        yield
    finally:
        if cache.offered is listing:  # and not what `offering_after_commit` offers
            cache.offered = None


def is_offered(url: str) -> bool:
    """Return whether the next `client.listing_cache` of a folder uses a listing that was just made."""
    return cache.offered is not None and f"{url}/".startswith(f"{cache.offered.root}/")


@contextmanager
def offering_after_commit(url: str) -> Iterator[None]:
    """Let a commit within the context list this folder, and the next `client.listing_cache` use that listing.

    The end waits for what was begun with `beside`, and raises its failure unless there is another."""
    cache.wanted = url
    try:
        yield
        while cache.beside:
            cache.beside.pop().result()
    finally:
        cache.wanted = cache.offered = None
        left, cache.beside = cache.beside, []
        for task in left:
            with suppress(StorageError):
                task.result()


def beside(function: Callable[[], Any]) -> None:
    """Call a function beside what follows within `offering_after_commit`; outside of one, call it here."""
    if cache.wanted is None:
        function()
        return
    task = Once(function)
    cache.beside.append(task)
    start_thread(task.run, "flax-ckpt")
