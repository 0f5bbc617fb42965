"""Run many requests in parallel."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from flax_ckpt_compat._core.thread_pools import Pool

_AT_ONCE = 16
_Item = TypeVar("_Item")


def in_parallel(work: Callable[[_Item], Any], items: Collection[_Item], at_once: int = _AT_ONCE) -> None:
    """Call ``work`` for each item, on several threads; after a failure, start no more, and raise it."""
    if len(items) < 2:
        for item in items:
            work(item)
        return
    pending = collections.deque(items)
    n_threads = min(at_once, len(items)) - 1
    with Pool(n_threads, thread_name_prefix="flax-ckpt-store") as pool:
        futures = [pool.submit(_drain, work, pending) for _ in range(n_threads)]
        _drain(work, pending)
        for future in futures:
            future.result()


def _drain(work: Callable[[_Item], Any], pending: collections.deque[_Item]) -> None:
    while pending:
        try:
            item = pending.popleft()
        except IndexError:
            return  # another thread took the last one
        try:
            work(item)
        except BaseException:
            pending.clear()
            raise
