"""Ask an object store many questions in parallel, before look-ups ask them one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.listing import Listing
from flax_ckpt_compat._core.object_store import client, commit
from flax_ckpt_compat._core.thread_pools import in_parallel

_TINY_AT_ONCE = 64  # requests for a byte or less


def prefetch_sizes(urls: Collection[str], known: Listing) -> None:
    """Request the sizes of many objects in parallel."""
    _prefetch(known.sizes, urls, client.size)


def prefetch_heads(urls: Collection[str], known: Listing) -> None:
    """Request in parallel the first bytes of those that are objects."""
    _prefetch(known.heads, [url for url in urls if commit.counts_as_object(url, known)], client.head)


def prefetch_contents(urls: Collection[str], known: Listing) -> None:
    """Read many small objects in parallel."""
    _prefetch(known.contents, urls, client.read)


def _prefetch(answers: dict[str, Any], urls: Collection[str], request: Callable[[str], Any]) -> None:
    found: dict[str, Any] = {}

    def look(url: str) -> None:
        with suppress(FileNotFoundError):
            found[url] = request(url)

    in_parallel(look, [url for url in urls if url not in answers], _TINY_AT_ONCE)
    answers.update(found)
