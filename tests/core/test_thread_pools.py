"""Threads at the interpreter's exit, for which background saves go on, and errors in threads."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core import thread_pools
from flax_ckpt_compat._core.thread_pools import Once, in_parallel
from tests.support import interrupting
from tests.support.saves import run_python

CODE = """
import sys, threading, time
from flax_ckpt_compat._core.thread_pools import Pool
def fail():
    raise OSError("the disk broke")
def late():
    threading.main_thread().join()
    with Pool(2, "late") as pool:
        tasks = [pool.submit(abs, number) for number in (-1, -2, -3)]
        print([task.result() for task in tasks])
        try:
            pool.submit(fail).result()
        except OSError as error:
            print(repr(error))
threading.Thread(target=late).start()
"""


def test_a_pool_works_at_exit(tmp_path: Path) -> None:
    """When the main thread has ended and there are no new threads, the work is done all the same, failures too."""
    out, err = run_python(CODE, tmp_path)
    assert (out.strip(), err) == ("[1, 2, 3]\nOSError('the disk broke')", "")


def test_an_error_in_a_thread_of_the_pool_is_raised() -> None:
    """Also where the caller's own share of the work is done without one."""
    caller, both = threading.get_ident(), threading.Barrier(2, timeout=20)

    def work(_: int) -> None:
        both.wait()  # one item for each of the two threads
        if threading.get_ident() != caller:
            raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        in_parallel(work, [1, 2], 2)


def test_a_pool_starts_a_thread_for_a_later_task() -> None:
    """Also where those of earlier tasks have ended, for want of work."""
    with thread_pools.Pool(1, "test") as pool:
        for _ in range(2):
            assert pool.submit(abs, -1).wait(20)
            assert pool._workers[-1].wait(20)


def test_a_wait_tells_whether_the_task_has_ended() -> None:
    """Not that its time is over."""
    task = Once(bool)
    assert not task.wait(0.001)
    task.run()
    assert task.wait(0)


def test_a_pool_ends_with_its_block() -> None:
    """It never has more threads than were asked for, and waits for the tasks that have begun; others never do."""
    began, goes_on, done = threading.Semaphore(0), threading.Event(), list[int]()

    def work(number: int) -> None:
        began.release()
        goes_on.wait(20)
        done.append(number)

    def go_on(pool: thread_pools.Pool) -> None:
        end = time.monotonic() + 5
        while pool._tasks and time.monotonic() < end:  # until the block's end drops them
            time.sleep(0.001)
        goes_on.set()

    with thread_pools.Pool(2, "test") as pool:
        tasks = [pool.submit(work, number) for number in range(5)]
        assert len(pool._workers) == 2
        assert began.acquire(timeout=20)
        assert began.acquire(timeout=20)
        threading.Thread(target=go_on, args=(pool,)).start()
    assert [task.done for task in tasks] == [True, True, False, False, False]
    assert sorted(done) == [0, 1]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_is_ended_is_not_done(error: BaseException) -> None:
    """What ends a program is raised where the result is wanted, like any error: there is none to go on with."""

    def end() -> None:
        raise error

    with thread_pools.Pool(1, "test") as pool:
        task = pool.submit(end)
        task.wait(20)
        with pytest.raises(type(error)):
            task.result()


def test_only_a_lack_of_threads_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task then runs elsewhere; any other failure to start one is raised."""
    for text, is_refused in (("can't start new thread", True), ("thread already started", False)):

        def start(_: threading.Thread, text: str = text) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(threading.Thread, "start", start)
        with contextlib.nullcontext() if is_refused else pytest.raises(RuntimeError, match=text):
            assert not thread_pools.start_thread(bool, "test")
        monkeypatch.undo()


def test_after_a_failure_no_more_is_started() -> None:
    """The other threads find nothing left, in their own runs and in those of others."""
    queues = [collections.deque([1, 2]), collections.deque([3])]

    def fail(_: int) -> None:
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        thread_pools._drain(fail, queues, 0)
    assert not any(queues)


def test_each_thread_takes_a_run() -> None:
    """Four threads start at the quarters; who is done takes over what others have left; nothing is done twice."""
    started, done, all_began = list[int](), list[int](), threading.Barrier(4, timeout=20)
    last_of_first = threading.Event()

    def work(item: int) -> None:
        if item % 25 == 0:
            started.append(item)
            all_began.wait()
        if item == 0:  # its thread is held until the others did the rest of its run
            assert last_of_first.wait(20)
        done.append(item)
        if len(done) == 99:
            last_of_first.set()

    in_parallel(work, range(100), 4, in_runs=True)
    assert (sorted(started), sorted(done)) == ([0, 25, 50, 75], list(range(100)))


def test_a_read_that_fails_in_a_thread(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore never returns the memory that a thread of its own could not fill."""
    checkpoints.save_checkpoint(tmp_path, {f"a{n}": np.full(1_500_000, n) for n in range(5)}, 1)
    caller, failed, preadv = threading.get_ident(), threading.Event(), os.preadv

    def failing(*arguments: Any) -> int:
        if threading.get_ident() != caller:
            failed.set()
            raise OSError(5, "Input/output error")
        failed.wait(20)
        return preadv(*arguments)

    with flax_ckpt_compat.open_checkpoint(tmp_path) as opened:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(errors.StorageError, match="Input/output error"):
            opened.read()
    assert failed.is_set()


def test_ctrl_c_anywhere_in_a_task() -> None:
    """Whoever runs the task is interrupted at each place where Python may: nobody waits for it in vain afterwards."""
    for at in itertools.count(1):
        calls = list[int]()
        task = Once(calls.append, 1)
        is_place = interrupting.ctrl_c(task.result, at, thread_pools.__file__)
        task.run()
        assert task.wait(1.0), at
        assert len(calls) <= 1
        if not is_place:
            break
    assert at > 5


def test_a_task_that_waits_for_itself() -> None:
    """A signal handler or finalizer that interrupts a task and wants its end is told so; it would wait for ever."""
    task = Once(lambda: task.result())
    with pytest.raises(RuntimeError, match="wait for its own end"):
        task.result()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only references that are dropped free anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("number", [0, 1])
def test_a_failure_holds_no_arrays(number: int) -> None:
    """Once it was handled, what the work held is free, without the garbage collector: a caller may try again."""
    arrays = [np.ones(3), np.ones(3)]
    held, both = [weakref.ref(array) for array in arrays], threading.Barrier(2, timeout=20)

    def work(at: int) -> None:
        array = arrays[at]
        both.wait()
        if at == number:
            raise OSError(f"{array} cannot be read")

    with pytest.raises(OSError, match="cannot be read"):
        in_parallel(work, [0, 1], 2)
    arrays.clear()
    assert [array() for array in held] == [None, None]


def test_a_withdrawn_task_holds_nothing() -> None:
    """Also while the pool that was to run it still has it in its queue."""
    array = np.ones(3)
    held, task = weakref.ref(array), Once(np.sum, array)
    del array
    task.withdraw()
    assert held() is None and task.done


def test_frames_of_errors_that_form_a_ring_are_cleared() -> None:
    """``raise a from b`` may make two errors each other's cause, or one its own: that is no reason to go round."""
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    thread = threading.Thread(target=thread_pools.clear_frames, args=(first,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_a_thread_that_ends_before_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its memory is short: ``Thread.start`` would wait for it for ever. The task runs where it is wanted."""
    monkeypatch.setattr(thread_pools, "_START_SECONDS", 0.1)
    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", lambda self: None)
    began = time.monotonic()
    assert not thread_pools.start_thread(bool, "never")
    assert thread_pools.run_apart(threading.get_ident, "never") == threading.get_ident()
    assert in_parallel(abs, [-1, -2, -3]) == [1, 2, 3]
    assert time.monotonic() - began < 10


def test_a_task_that_was_withdrawn_has_no_result() -> None:
    """Who wants it learns that it never ran, and does not take None for what it returned."""
    ran = list[int]()
    task = Once(ran.append, 1)
    task.withdraw()
    task.run()
    assert task.done and task.wait(0)
    with pytest.raises(CancelledError):
        task.result()
    assert not ran
