"""Values are written by several threads: when the disk is full, and when it hangs."""

import errno
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax_ckpt_compat.orbax_backend import ocdbt_writer

import flax_ckpt_compat as fcc
from tests.support.saves import run_saving

MIB = 1 << 20


def descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def test_a_full_disk_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails with its error, once no thread writes any more."""
    tree = {str(n): np.random.default_rng(n).random(3 * MIB) for n in range(4)}
    fcc.save(tmp_path / "first", tree, format="orbax")
    gc.collect()
    before, threads, real, refused = descriptors(), threading.active_count(), os.writev, threading.Event()

    def full(descriptor: int, pieces: Any) -> int:
        if len(pieces[0]) > MIB:
            if refused.is_set():
                time.sleep(0.3)
            refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, pieces)

    tree = {name: fcc.restore(tmp_path / "first")[name] for name in tree}
    for array in tree.values():
        array.flags.writeable = False
    monkeypatch.setattr(os, "writev", full)
    monkeypatch.setattr(ocdbt_writer.memory, "may_change", lambda _: False)
    with pytest.raises(fcc.errors.StorageError, match="No space left"):
        fcc.save(tmp_path / "c", tree, format="orbax")
    assert os.listdir(tmp_path) == ["first"]
    assert (descriptors(), threading.active_count()) == (before, threads)


HUNG = """
def expire(*_):
    raise TimeoutError("the program's own limit")
ended, writev = threading.Event(), os.writev
def hang(descriptor, pieces):
    ended.wait()
    return writev(descriptor, pieces)
os.writev = hang
signal.signal(signal.SIGALRM, expire)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    checkpoints.save_checkpoint(folder, {str(n): np.zeros(2 << 20) for n in range(3)}, 1)  # in several threads
except TimeoutError as error:
    print(error)
ended.set()
"""


def test_a_program_limits_the_time_of_a_save(tmp_path: Path) -> None:
    """By a signal handler that raises TimeoutError, as Python's own waits do: a save that hangs is left by it."""
    out, _ = run_saving(HUNG, tmp_path, True, timeout=20)
    assert out == "the program's own limit\n"
