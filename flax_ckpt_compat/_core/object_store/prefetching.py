"""Ask an object store many questions in parallel, before look-ups ask them one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.object_store import client, commit
from flax_ckpt_compat._core.object_store.thread_cache import cache
from flax_ckpt_compat._core.thread_pools import in_parallel

_TINY_AT_ONCE = 64  # requests for a byte or less


def prefetch_sizes(urls: Collection[str]) -> None:
    """Request the sizes of many objects in parallel, within `listing_cache` only."""
    _prefetch(cache.sizes, urls, client.size)


def prefetch_heads(urls: Collection[str]) -> None:
    """Request in parallel the first bytes of those that are objects, within `listing_cache` only."""
    _prefetch(cache.heads, list(filter(commit.counts_as_object, urls)), client.head)


def prefetch_contents(urls: Collection[str]) -> None:
    """Read many small objects in parallel, within `listing_cache` only."""
    _prefetch(cache.contents, urls, client.read)


def _prefetch(known: dict[str, Any], urls: Collection[str], request: Callable[[str], Any]) -> None:
    if cache.listings:
        found: dict[str, Any] = {}

        def look(url: str) -> None:
            with suppress(FileNotFoundError):
                found[url] = request(url)

        in_parallel(look, [url for url in urls if url not in known], _TINY_AT_ONCE)
        known.update(found)
