"""Run tasks on thread pools that also work at the interpreter's exit, when async saves finish."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

# Messages of Python when a pool was shut down, when the interpreter exits, and when no thread can be started.
_REFUSALS = re.compile("new futures|new thread")


class Once:
    """A task that runs once, on a thread of a pool or on the caller's if the pool refuses it.

    Attributes:
        future: its outcome.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any):
        self.future: Future[Any] = Future()
        self._call, self._claim = (function, args, kwargs), threading.Lock()

    def __call__(self) -> Any:
        """Run the task unless another thread does; return or raise its outcome."""
        if self._claim.acquire(blocking=False):
            function, args, kwargs = self._call
            try:
                self.future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  (raised by the future)
                self.future.set_exception(error)
        return self.future.result()


class Pool(ThreadPoolExecutor):
    """A thread pool that runs tasks on the caller's thread when no new thread can start, as at interpreter exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `concurrent.futures.Executor.submit`."""
        task = Once(fn, *args, **kwargs)  # a pool that cannot start a thread may still have queued the task
        try:
            return super().submit(task)
        except RuntimeError:
            with suppress(BaseException):  # raised by the future
                task()
            return task.future


def is_refusal(error: RuntimeError) -> bool:
    """Return whether an error means that a pool refused a task."""
    return _REFUSALS.search(str(error)) is not None
