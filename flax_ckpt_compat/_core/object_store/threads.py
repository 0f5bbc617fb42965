"""Many requests at once."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection
from typing import Any

from flax_ckpt_compat._core.thread_pools import Pool

_AT_ONCE = 16


def in_parallel(work: Callable[[str], Any], names: Collection[str]) -> None:
    """Does the work for each name, several at once; the first failure ends it once those begun have ended."""
    if len(names) < 2:
        for name in names:
            work(name)
        return
    left = collections.deque(names)
    helpers = min(_AT_ONCE, len(names)) - 1
    with Pool(helpers, thread_name_prefix="flax-ckpt-store") as pool:
        futures = [pool.submit(_drain, work, left) for _ in range(helpers)]
        _drain(work, left)
        for future in futures:
            future.result()


def _drain(work: Callable[[str], Any], left: collections.deque[str]) -> None:
    while left:
        try:
            name = left.popleft()
        except IndexError:
            return  # another thread took the last one
        try:
            work(name)
        except BaseException:
            left.clear()
            raise
