"""What this thread has asked of a store within a snapshot, so that it need not ask again."""

from __future__ import annotations

import threading

from flax_ckpt_compat._core.object_store import views

_local = threading.local()


def held() -> list[tuple[str, list[str], list[str]]]:
    """This thread's snapshots: of what, all keys, and those that are to be seen."""
    if not hasattr(_local, "held"):
        _local.held = []
    found: list[tuple[str, list[str], list[str]]] = _local.held
    return found


def known(url: str, *, every: bool = False) -> list[str] | None:
    """The keys below ``url`` where a snapshot covers it."""
    every = every or views.is_inside(url)
    for root, there, visible in held():
        inside = there if every else visible
        if url == root:
            return inside
        if url.startswith(root + "/"):
            inner = url[len(root) + 1 :] + "/"
            return [key[len(inner) :] for key in inside if key.startswith(inner)]
    return None


def sizes() -> dict[str, int]:
    """Sizes that this thread asked for in its snapshot."""
    if not hasattr(_local, "sizes"):
        _local.sizes = {}
    sizes: dict[str, int] = _local.sizes
    return sizes


def empties() -> dict[str, bool]:
    """What this thread asked in its snapshot about objects being empty."""
    if not hasattr(_local, "empties"):
        _local.empties = {}
    empties: dict[str, bool] = _local.empties
    return empties


def contents() -> dict[str, bytes]:
    """Objects that this thread read ahead in its snapshot."""
    if not hasattr(_local, "contents"):
        _local.contents = {}
    contents: dict[str, bytes] = _local.contents
    return contents


def forget() -> None:
    """Forget all but the snapshots."""
    sizes().clear()
    empties().clear()
    contents().clear()
