"""Threads for work that background saves do as well, which the interpreter waits for at its exit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Pool(ThreadPoolExecutor):
    """A pool that works at the interpreter's exit, too: there are no new threads then, and the caller does the work."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `concurrent.futures.Executor.submit`."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: Future[Any] = Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  (the future's to tell)
                done.set_exception(error)
            return done
