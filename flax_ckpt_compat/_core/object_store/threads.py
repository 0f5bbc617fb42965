"""Run many requests in parallel."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection
from typing import Any

from flax_ckpt_compat._core.thread_pools import Pool

_AT_ONCE = 16


def in_parallel(work: Callable[[str], Any], names: Collection[str]) -> None:
    """Call ``work`` for each name, on several threads; after a failure, start no more, and raise it."""
    if len(names) < 2:
        for name in names:
            work(name)
        return
    pending = collections.deque(names)
    n_threads = min(_AT_ONCE, len(names)) - 1
    with Pool(n_threads, thread_name_prefix="flax-ckpt-store") as pool:
        futures = [pool.submit(_drain, work, pending) for _ in range(n_threads)]
        _drain(work, pending)
        for future in futures:
            future.result()


def _drain(work: Callable[[str], Any], pending: collections.deque[str]) -> None:
    while pending:
        try:
            name = pending.popleft()
        except IndexError:
            return  # another thread took the last one
        try:
            work(name)
        except BaseException:
            pending.clear()
            raise
