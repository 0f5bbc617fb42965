"""Run tasks on thread pools that also work at the interpreter's exit, when async saves finish."""

from __future__ import annotations

import collections
import itertools
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


def in_parallel(
    work: Callable[[_Item], Any], items: Collection[_Item], at_once: int = 16, *, in_runs: bool = False
) -> None:
    """Call ``work`` for each item, on several threads; after a failure, start no more, and raise it.

    With ``in_runs``, each thread takes a run of neighbours, and when it is done half of the longest run that is left:
    the system reads ahead well in a few parts of a file, and badly where threads take turns."""
    if len(items) < 2:
        for item in items:
            work(item)
        return
    n_threads, ordered = min(at_once, len(items)), list(items)
    bounds = [len(ordered) * number // n_threads for number in range(n_threads + 1)] if in_runs else [0, len(ordered)]
    queues = [collections.deque(ordered[start:stop]) for start, stop in itertools.pairwise(bounds)]
    with Pool(n_threads - 1, thread_name_prefix="flax-ckpt") as pool:
        futures = [pool.submit(_drain, work, queues, number) for number in range(1, n_threads)]
        _drain(work, queues, 0)
        for future in futures:
            future.result()


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Call functions on several threads and return their results; see `in_parallel`."""
    results: dict[int, Any] = {}

    def call(number: int) -> None:
        results[number] = functions[number]()

    in_parallel(call, range(len(functions)))
    return [results[number] for number in range(len(functions))]


def _drain(work: Callable[[_Item], Any], queues: list[collections.deque[_Item]], number: int) -> None:
    own = queues[number % len(queues)]
    while True:
        try:
            item = own.popleft()
        except IndexError:
            longest = max(queues, key=len)
            if not longest:
                return
            with suppress(IndexError):  # its owner took the last ones
                for _ in range((len(longest) + 1) // 2):
                    own.appendleft(longest.pop())
            continue
        try:
            work(item)
        except BaseException:
            for queue in queues:
                queue.clear()
            raise


def is_refusal(error: RuntimeError) -> bool:
    """Return whether an error means that a pool refused a task."""
    return _REFUSALS.search(str(error)) is not None
