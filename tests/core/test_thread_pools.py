"""Threads at the interpreter's exit, for which background saves go on, and errors in threads."""

import errno
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core import thread_pools
from flax_ckpt_compat._core.thread_pools import Pool, Task, in_parallel
from tests.support import interrupting
from tests.support.saves import run_python

AT_EXIT = """
import sys, threading, time
from flax_ckpt_compat._core.thread_pools import in_parallel
def fail(_):
    raise OSError("the disk broke")
def late():
    threading.main_thread().join()
    print(in_parallel(abs, [-1, -2, -3]))
    try:
        in_parallel(fail, [1, 2])
    except OSError as error:
        print(repr(error))
threading.Thread(target=late).start()
"""


def test_work_is_done_at_exit(tmp_path: Path) -> None:
    """When the main thread has ended and there are no new threads, failures too."""
    out, err = run_python(AT_EXIT, tmp_path, whole_end=True)
    assert (out.strip(), err) == ("[1, 2, 3]\nOSError('the disk broke')", "")


@pytest.mark.parametrize("started", [0, 2])
def test_where_no_thread_can_be_started(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller does what no thread has claimed, be it that none is refused and yet none begins."""

    def start(*_: Any) -> int:
        if not started:
            raise RuntimeError("can't start new thread")
        return 0

    monkeypatch.setattr(thread_pools._thread, "start_new_thread", start)
    assert in_parallel(abs, range(-5, 0), 3, in_runs=True) == [5, 4, 3, 2, 1]
    assert thread_pools.run_apart(threading.get_ident) == threading.get_ident()
    with Pool(2) as pool:
        assert pool.submit(abs, -1).result() == 1


@pytest.mark.parametrize(("fails", "error"), [("caller", OSError), ("helper", OSError), ("caller", KeyboardInterrupt)])
def test_an_error_in_any_thread_is_raised(fails: str, error: type[BaseException]) -> None:
    """No more is started, and what runs is waited for: it must not go on in memory that somebody else gets next."""
    caller, both, begun, ended = threading.get_ident(), threading.Barrier(2, timeout=20), list[int](), list[int]()

    def work(number: int) -> None:
        begun.append(number)
        both.wait()  # one item for each of the two threads
        if (threading.get_ident() == caller) == (fails == "caller"):
            raise error("unreadable")
        time.sleep(0.3)
        ended.append(number)

    with pytest.raises(error, match="unreadable"):
        in_parallel(work, range(20), 2)
    assert (sorted(begun), len(ended)) == ([0, 1], 1)


@pytest.mark.slow
def test_maps_in_signal_handlers_that_interrupt_a_map() -> None:
    """Wherever they come: none waits for what it has interrupted."""
    done = list[list[int]]()

    def handle(*_: Any) -> None:
        done.append(in_parallel(abs, [-1, -2, -3], 3))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.002)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            assert in_parallel(abs, range(-20, 0), 4) == list(range(20, 0, -1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(done) > 10 and all(one == [1, 2, 3] for one in done)


def test_a_read_that_fails_in_a_thread(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore never returns the memory that a thread of its own could not fill."""
    checkpoints.save_checkpoint(tmp_path, {f"a{n}": np.full(1_500_000, n) for n in range(5)}, 1)
    caller, failed, preadv = threading.get_ident(), threading.Event(), os.preadv

    def failing(*arguments: Any) -> int:
        if threading.get_ident() != caller:
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        failed.wait(20)
        return preadv(*arguments)

    with flax_ckpt_compat.open_checkpoint(tmp_path) as opened:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(errors.StorageError, match="Input/output error") as caught:
            opened.read()
    assert failed.is_set() and caught.value.errno == errno.EIO


def test_a_pool_ends_with_its_block() -> None:
    """It never has more threads than were asked for, and drops the tasks that have not begun."""
    began, goes_on, done = threading.Semaphore(0), threading.Event(), list[int]()

    def work(number: int) -> None:
        began.release()
        goes_on.wait(20)
        done.append(number)

    with Pool(2) as pool:
        tasks = [pool.submit(work, number) for number in range(5)]
        assert began.acquire(timeout=20) and began.acquire(timeout=20)
        threading.Timer(0.2, goes_on.set).start()
        pool.cancel(wait=True)
    assert [task.done for task in tasks] == [True, True, False, False, False]
    assert sorted(done) == [0, 1]


def test_ctrl_c_anywhere_in_a_task() -> None:
    """Whoever runs the task is interrupted at each place where Python may: nobody waits for it in vain afterwards."""
    for at in itertools.count(1):
        calls = list[int]()
        task = Task(calls.append, 1)
        is_place = interrupting.ctrl_c(task.result, at, thread_pools.__file__)
        task.run()
        assert task.wait(1.0), at
        assert len(calls) <= 1
        if not is_place:
            break
    assert at > 5


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_is_ended_is_not_done(error: BaseException) -> None:
    """What ends a program is raised where the result is wanted, like any error: there is none to go on with."""
    with Pool(1) as pool:
        task = pool.submit(Mock(side_effect=error))
        task.wait(20)
        with pytest.raises(type(error)):
            task.result()


def test_a_task_that_waits_for_itself() -> None:
    """A signal handler or finalizer that interrupts a task and wants its end is told so; it would wait for ever."""
    task = Task(lambda: task.result())
    with pytest.raises(RuntimeError, match="wait for its own end"):
        task.result()


def test_a_withdrawn_task_never_runs() -> None:
    """It holds nothing, and who wants it does not take None for what it returned."""
    array = np.ones(3)
    held, task = weakref.ref(array), Task(np.sum, array)
    del array
    assert not task.wait(0.001)
    task.withdraw()
    task.run()
    assert held() is None and task.done and task.wait(0)
    with pytest.raises(CancelledError):
        task.result()


@pytest.mark.slow
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

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OSError, match="cannot be read"):
            in_parallel(work, [0, 1], 2)
        arrays.clear()
        assert [array() for array in held] == [None, None]
    finally:
        gc.enable()
