"""Threads at the interpreter's exit, for which background saves go on."""

from __future__ import annotations

from pathlib import Path

from tests.support.saves import run_python

CODE = """
import sys, threading, time
from flax_ckpt_compat._core.thread_pools import Pool
def fail():
    raise OSError("the disk broke")
def late():
    threading.main_thread().join()
    with Pool(2) as pool:
        print(list(pool.map(abs, [-1, -2, -3])), repr(pool.submit(fail).exception()))
threading.Thread(target=late).start()
"""


def test_a_pool_works_at_exit(tmp_path: Path) -> None:
    """When the main thread has ended and there are no new threads, the work is done all the same, failures too."""
    out, err = run_python(CODE, tmp_path)
    assert (out.strip(), err) == ("[1, 2, 3] OSError('the disk broke')", "")
