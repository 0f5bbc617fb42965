"""Threads at the interpreter's exit, for which background saves go on, and errors in threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.thread_pools import in_parallel
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
