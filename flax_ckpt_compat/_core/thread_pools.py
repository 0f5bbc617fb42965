"""Run tasks on thread pools that also work at the interpreter's exit, when async saves finish."""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

_Item = TypeVar("_Item")

# Messages of Python when a pool was shut down, when the interpreter exits, and when no thread can be started.
_REFUSALS = re.compile("new futures|new thread")


class Once:
    """A task that runs once, on a thread of a pool or on the caller's if the pool refuses it."""

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


def in_parallel(work: Callable[[_Item], Any], items: Collection[_Item], at_once: int = 16) -> None:
    """Call ``work`` for each item, on several threads; after a failure, start no more, and raise it."""
    if len(items) < 2:
        for item in items:
            work(item)
        return
    pending = collections.deque(items)
    n_threads = min(at_once, len(items)) - 1
    with Pool(n_threads, thread_name_prefix="flax-ckpt") as pool:
        futures = [pool.submit(_drain, work, pending) for _ in range(n_threads)]
        _drain(work, pending)
        for future in futures:
            future.result()


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Call functions on several threads and return their results; see `in_parallel`."""
    results: dict[int, Any] = {}

    def call(number: int) -> None:
        results[number] = functions[number]()

    in_parallel(call, range(len(functions)))
    return [results[number] for number in range(len(functions))]


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


def is_refusal(error: RuntimeError) -> bool:
    """Return whether an error means that a pool refused a task."""
    return _REFUSALS.search(str(error)) is not None
