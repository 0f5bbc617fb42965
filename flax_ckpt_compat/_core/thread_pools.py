"""Threads for work that background saves do as well, which the interpreter waits for at its exit."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

# What Python says when a pool was shut down, when the interpreter ends, and when there can be no more threads.
_REFUSALS = re.compile("new futures|new thread")


class Once:
    """A task that is carried out once, by a thread of a pool or by the caller whom the pool refused.

    Attributes:
        future: its outcome.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any):
        self.future: Future[Any] = Future()
        self._call, self._claim = (function, args, kwargs), threading.Lock()

    def __call__(self) -> Any:
        """Carry it out, unless another thread does; return or raise its outcome."""
        if self._claim.acquire(blocking=False):
            function, args, kwargs = self._call
            try:
                self.future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  (the future's to tell)
                self.future.set_exception(error)
        return self.future.result()


class Pool(ThreadPoolExecutor):
    """A pool that works at the interpreter's exit, too: there are no new threads then, and the caller does the work."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `concurrent.futures.Executor.submit`."""
        task = Once(fn, *args, **kwargs)  # a pool without room for a thread may have taken it all the same
        try:
            return super().submit(task)
        except RuntimeError:
            with suppress(BaseException):  # the future's to tell
                task()
            return task.future


def is_refusal(error: RuntimeError) -> bool:
    """Return whether a pool refused a task, which it will not carry out."""
    return _REFUSALS.search(str(error)) is not None
