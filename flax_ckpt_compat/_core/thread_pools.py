"""Run tasks on threads, also at the interpreter's exit, in signal handlers, and where Ctrl-C interrupts a wait.

Python's own pools take no tasks once the interpreter exits, and while one starts a thread it holds a lock, on which a
signal handler that saves would wait for ever. An interrupt while one of its futures is looked at may leave that locked,
and the thread that runs the task then never ends.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import thread as futures_thread
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Messages of Python when a pool was shut down, when the interpreter exits, and when no thread can be started.
_REFUSALS = re.compile("new futures|new thread")
_UNLOCKED = re.compile("un-?(locked|acquired) lock")
_POLL_SECONDS = 0.5
_START_SECONDS = 30.0
_HELD_SECONDS = 1.0  # far longer than any thread holds the lock of Python's pools


class Once:
    """A task that runs once: on the first thread that calls it, or that wants its result.

    When it has ended, or was withdrawn, its function and arguments are dropped. Errors do not keep it alive."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self.done = False  # whether it has ended
        self.thread: int | None = None  # identifier of the thread that runs it, or did
        # One thread takes it from the iterator; Python calls no signal handler between that and the next statement.
        self._call, self._running = iter([(function, args)]), threading.Lock()
        self._running.acquire()
        self._value: Any = None
        self._error: BaseException | type[BaseException] | None = None

    @property
    def runs_here(self) -> bool:
        """Return whether this thread is within the task."""
        return self.thread == threading.get_ident() and not self.done

    @property
    def was_withdrawn(self) -> bool:
        """Return whether it was withdrawn before a thread ran it."""
        return self.done and self.thread is None

    def run(self) -> None:
        """Run the task unless a thread does, or did."""
        for function, args in self._call:
            try:
                self.thread = threading.get_ident()
                self._value = function(*args)
            except BaseException as error:  # raised by `result`
                self._error = error
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise  # Ctrl-C, also where nobody asks for the result
            finally:
                self.done = True
                self._running.release()
                del function, args  # the traceback of an error holds this frame
        del self

    def withdraw(self) -> None:
        """Cancel the task unless a thread runs it, or did."""
        for _ in self._call:
            self._error, self.done = CancelledError, True
            self._running.release()

    def wait(self, timeout: float = math.inf) -> bool:
        """Wait until the task has ended, at most so many seconds; return whether it has.

        Raises RuntimeError within the task itself, such as in a signal handler or finalizer that interrupted it."""
        if self.runs_here:
            raise RuntimeError("a task cannot wait for its own end")
        end = time.monotonic() + timeout
        while not self.done and (left := end - time.monotonic()) > 0:
            # Not for ever: one who was interrupted here may hold the lock.
            if self._running.acquire(timeout=min(left, _POLL_SECONDS)):
                self._running.release()
        return self.done

    def result(self) -> Any:
        """Run the task or wait for it; return or raise its outcome."""
        try:
            self.run()
            self.wait()
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            del self  # the traceback of the error holds this frame

    __call__ = result


def end_of(future: Any) -> Once:
    """Return a task that ends when a future, also one of TensorStore that has begun, is done or cancelled."""
    ended = Once(bool)
    off_main(functools.partial(future.add_done_callback, lambda _: ended.run()))
    return ended


def wait(future: Future[Any], timeout: float = math.inf) -> bool:
    """Wait until a future is done or cancelled, at most so many seconds; return whether it is."""
    return end_of(future).wait(timeout)


def off_main(look: Callable[[], _Result]) -> _Result:
    """Call what takes the lock of a future or of a pool where no Ctrl-C comes, which would leave it locked for ever."""
    if threading.current_thread() is not threading.main_thread():
        return look()
    result: _Result = run_apart(look, "flax-ckpt-look", daemon=True)
    return result


class _StartedEvent(threading.Event):
    """The event by which ``Thread.start`` waits for the new thread; it ends without it after some time.

    Python's own is left locked by a Ctrl-C, and the new thread then never tells, and never ends."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = Once(bool)

    def is_set(self) -> bool:
        return self._begun.done

    def set(self) -> None:
        self._begun.run()

    def wait(self, timeout: float | None = None) -> bool:
        return self._begun.wait(_START_SECONDS if timeout is None else timeout)


def start_thread(run: Callable[[], Any], name: str, *, daemon: bool = False) -> bool:
    """Start a thread; return False if none can be started, as at the interpreter's exit.

    So too if it did not begin in time: one that ends for lack of memory before it has begun never tells, and Python
    would wait for ever. ``run`` may be called by both then, as that of `Once` may."""
    thread = threading.Thread(target=run, name=name, daemon=daemon)
    started = _StartedEvent()
    thread._started = started  # type: ignore[attr-defined]
    try:
        with raising_interrupts():
            thread.start()
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        return False
    return started.is_set()


def clear_frames(error: BaseException | None) -> None:
    """Free what the functions held that raised an error, and those before it, which may form a ring."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def pools_take_tasks() -> bool:
    """Return False in a signal handler that interrupted one of Python's pools where it takes a task.

    The lock that they share would let it wait for ever."""
    lock, end = getattr(futures_thread, "_global_shutdown_lock", None), time.monotonic() + _HELD_SECONDS
    while lock is not None and lock.locked():
        if time.monotonic() > end:
            return False
        time.sleep(_HELD_SECONDS / 1000)
    return True


def run_apart(function: Callable[[], Any], name: str, *, daemon: bool = False) -> Any:
    """Call a function on a thread of its own, or here if none can be started; return its result."""
    task = Once(function)
    if start_thread(task.run, name, daemon=daemon):
        task.wait()
    return task.result()


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Raise the exception of a signal handler where a lock that it interrupted replaces it by another error."""
    try:
        yield
    except RuntimeError as error:
        if _UNLOCKED.search(str(error)) and error.__context__ is not None:
            raise error.__context__ from None
        raise


class Pool:
    """Threads for tasks; a task that none of them has begun runs on the thread that wants its result.

    A ``with`` block waits at its end for the tasks that run, and drops those that nobody has begun."""

    def __init__(self, n_threads: int, name: str):
        self._n_threads, self._name = n_threads, name
        self._tasks, self._workers = collections.deque[Once](), list[Once]()

    def submit(self, function: Callable[..., Any], *args: Any) -> Once:
        """Return a task to call ``function``, which begins as soon as a thread is free."""
        task = Once(function, *args)
        self._tasks.append(task)
        self._workers = [worker for worker in self._workers if not worker.done]
        if len(self._workers) < self._n_threads:
            worker = Once(self._work)
            self._workers.append(worker)
            start_thread(worker.run, self._name)
        return task

    def _work(self) -> None:
        with suppress(IndexError):
            while True:
                self._tasks.popleft().run()

    def cancel(self, *, wait: bool) -> None:
        """Drop the tasks that nobody has begun; ``wait`` for those that run."""
        self._tasks.clear()
        for worker in self._workers if wait else ():
            worker.result()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel(wait=True)


def in_parallel(
    work: Callable[[_Item], _Result], items: Collection[_Item], at_once: int = 16, *, in_runs: bool = False
) -> list[_Result]:
    """Call ``work`` for each item, on up to ``at_once`` threads, and return what it returns, in the order of the items.

    After a failure, start no more, and raise it. With ``in_runs``, each thread takes a contiguous run, then steals half
    of the longest remaining one: the system reads ahead well in a few parts of a file, and badly where threads take
    turns."""
    n_threads, ordered = min(at_once, len(items)), list(items)
    if n_threads < 2:
        return [work(item) for item in ordered]
    results: dict[int, _Result] = {}

    def call(number: int) -> None:
        results[number] = work(ordered[number])

    numbers = range(len(ordered))
    bounds = [len(ordered) * thread // n_threads for thread in range(n_threads + 1)] if in_runs else [0, len(ordered)]
    queues = [collections.deque(numbers[start:stop]) for start, stop in itertools.pairwise(bounds)]
    with Pool(n_threads - 1, "flax-ckpt") as pool:
        tasks = collections.deque([pool.submit(_drain, call, queues, thread) for thread in range(1, n_threads)])
        _drain(call, queues, 0)
        while tasks:
            tasks.popleft().result()
    return [results[number] for number in numbers]


def results_of(work: Callable[[_Item], _Result], items: Collection[_Item], at_once: int = 16) -> dict[_Item, _Result]:
    """Call ``work`` for each item, on several threads, and return item → result; see `in_parallel`."""
    return dict(zip(items, in_parallel(work, items, at_once), strict=True))


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Call functions on several threads and return their results; see `in_parallel`."""
    return in_parallel(lambda function: function(), functions)


def _drain(work: Callable[[_Item], Any], queues: list[collections.deque[_Item]], number: int) -> None:
    own = queues[number % len(queues)]
    try:
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
            work(item)
    except BaseException:
        for queue in queues:
            queue.clear()
        raise


def is_refusal(error: BaseException) -> bool:
    """Return whether an error means that a pool refused a task."""
    return isinstance(error, RuntimeError) and _REFUSALS.search(str(error)) is not None
