"""Cache the answers of a store within a listed folder, for each thread, to make no request twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.listing import Listing
from flax_ckpt_compat._core.thread_pools import Once, start_thread


class _Cache(threading.local):
    """Answers of this thread's requests by URL; ``offered`` is the listing that `client.listing_cache` uses next.

    ``wanted`` is the folder that `client.keys_after_commit` lists for it."""

    def __init__(self) -> None:
        self.listings: list[Listing] = []
        self.offered: Listing | None = None
        self.wanted: str | None = None
        self.beside: list[Once] = []  # what `offering_after_commit` waits for


cache = _Cache()


def current_listing() -> Listing | None:
    """Return the listing of the enclosing `client.listing_cache`, with what was found since, for `offering`."""
    return cache.listings[0] if cache.listings else None


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
