"""Cache a thread's store requests within `client.listing_cache`."""

from __future__ import annotations

import threading

from flax_ckpt_compat._core.object_store import views


class _Cache(threading.local):
    """Answers of this thread's requests, by URL.

    Attributes:
        listings: by nesting, the URL of a folder, all its keys, and the visible ones.
        sizes: bytes of objects.
        emptiness: whether objects have no bytes.
        contents: objects that were prefetched.
    """

    def __init__(self) -> None:
        self.listings: list[tuple[str, list[str], list[str]]] = []
        self.sizes: dict[str, int] = {}
        self.emptiness: dict[str, bool] = {}
        self.contents: dict[str, bytes] = {}

    def keys(self, url: str, *, every: bool = False) -> list[str] | None:
        """Return the keys below ``url`` if a listing covers it: the visible ones, or ``every`` one."""
        every = every or views.is_in_next_folder(url)
        for root, found, visible in self.listings:
            inside = found if every else visible
            if url == root:
                return inside
            if url.startswith(root + "/"):
                inner = url[len(root) + 1 :] + "/"
                return [key[len(inner) :] for key in inside if key.startswith(inner)]
        return None

    def clear_objects(self) -> None:
        """Clear all but the listings."""
        self.sizes.clear()
        self.emptiness.clear()
        self.contents.clear()


cache = _Cache()
