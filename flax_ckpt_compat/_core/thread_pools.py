"""Run tasks on threads, also at the interpreter's exit, in signal handlers, and where Ctrl-C interrupts a wait.

Python's pools take no tasks at exit, and hold a lock while they start a thread, on which a signal handler would hang.
Here threads claim tasks, and whoever wants a result runs what nobody claimed."""

from __future__ import annotations

import _thread
import collections
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_POLL_SECONDS = 0.5
BEGIN_SECONDS = 1.0  # at the interpreter's exit a thread may start and never run


class Task:
    """A call that runs once: on the first thread that claims it, or that wants its result.

    When it has ended, or was withdrawn, its function and arguments are dropped. Errors do not keep it alive."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self.done = False  # whether it has ended
        self.thread: int | None = None  # identifier of the thread that runs it, or did
        # One thread takes it from the iterator; Python calls no signal handler between that and the next statement.
        self._call = iter([(function, args)])
        self._ended = queue.SimpleQueue[None]()
        self._value: Any = None
        self._error: BaseException | type[BaseException] | None = None

    @property
    def runs_here(self) -> bool:
        """Return whether this thread is within the task, as a signal handler that interrupted it is."""
        return self.thread == threading.get_ident() and not self.done

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
                self.done = True  # Python calls no signal handler before this
                self._ended.put(None)
                del function, args  # the traceback of an error holds this frame
        del self

    def withdraw(self) -> None:
        """Cancel the task unless a thread runs it, or did."""
        for _ in self._call:
            self._error, self.done = CancelledError, True
            self._ended.put(None)

    def wait(self, timeout: float = math.inf) -> bool:
        """Wait until the task has ended, at most so many seconds; return whether it has."""
        if self.runs_here:
            raise RuntimeError("a task cannot wait for its own end")
        end = time.monotonic() + timeout
        while not self.done and (left := end - time.monotonic()) > 0:
            # Not for ever: another who waits may have taken the word, and was interrupted before it put that back.
            with suppress(queue.Empty):
                self._ended.get(timeout=min(left, _POLL_SECONDS))
                self._ended.put(None)
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


class Pool(AbstractContextManager["Pool"]):
    """Threads for tasks; a task that none of them has begun runs on the thread that wants its result.

    A ``with`` block waits at its end for the tasks that run, and drops those that nobody has begun."""

    def __init__(self, n_threads: int):
        self._n_threads = n_threads
        self._tasks, self._workers = collections.deque[Task](), list[Task]()

    def submit(self, function: Callable[..., Any], *args: Any) -> Task:
        """Return a task to call ``function``, which begins as soon as a thread is free."""
        self.begin([task := Task(function, *args)])
        return task

    def begin(self, tasks: Collection[Task]) -> None:
        """Begin tasks, as soon as threads are free."""
        self._tasks.extend(tasks)
        self._workers = [worker for worker in self._workers if not worker.done]
        for _ in range(min(len(tasks), self._n_threads - len(self._workers))):
            self._workers.append(Task(self._work))
            with suppress(RuntimeError):  # none can be started
                _thread.start_new_thread(self._workers[-1].run, ())

    def _work(self) -> None:
        with suppress(IndexError):
            while True:
                self._tasks.popleft().run()

    def cancel(self, *, wait: bool) -> None:
        """Drop the tasks that nobody has begun; ``wait`` for those that run."""
        self._tasks.clear()
        for worker in self._workers if wait else ():
            worker.result()

    def __exit__(self, *_: object) -> None:
        self.cancel(wait=True)


def run_apart(function: Callable[[], Any]) -> Any:
    """Call a function on a thread of its own, where Ctrl-C cannot interrupt it, and return its result.

    It runs here if no thread begins. Ctrl-C waits for its end; a second one is raised at once."""
    with Pool(1) as pool:
        task = pool.submit(function)
        try:
            task.wait(BEGIN_SECONDS)
            return task.result()
        finally:
            del task  # it holds the error, whose traceback holds this frame


def in_parallel(
    work: Callable[[_Item], _Result], items: Collection[_Item], at_once: int = 16, *, in_runs: bool = False
) -> list[_Result]:
    """Call ``work`` for each item, on up to ``at_once`` threads, and return what it returns, in the order of the items.

    After a failure, or Ctrl-C, start no more, and raise it once the others have ended; a second Ctrl-C is raised at
    once. With ``in_runs``, each thread takes a share of neighbours, where the system reads ahead well."""
    ordered = list(items)
    n_threads = min(at_once, len(ordered))
    if n_threads < 2:
        return [work(item) for item in ordered]
    n_shares = n_threads if in_runs else len(ordered)
    bounds = [len(ordered) * share // n_shares for share in range(n_shares + 1)]
    failed = False

    def run(start: int, stop: int) -> list[_Result]:
        nonlocal failed
        try:
            return [work(item) for item in ordered[start:stop] if not failed]
        except BaseException:
            failed = True
            raise

    shares = [Task(run, *pair) for pair in itertools.pairwise(bounds)]
    with Pool(n_threads - 1) as pool:
        try:
            pool.begin(shares)
            list(map(Task.run, shares))
            return list(itertools.chain.from_iterable(map(Task.result, shares)))
        finally:
            failed = True  # nothing begins any more
            shares.clear()  # they hold the error, whose traceback holds this frame
