"""Real processes, killed for real: nothing that was acknowledged is lost, and nothing half done is ever latest."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints as ours
from tests.support.saves import names, run_python, start_python, tree

# One process imports everything once; the writers that are killed, and the readers that come after, are its forks.
KILLS = """
import os, random, signal, sys, time, traceback
import flax, numpy as np
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import atomic as files

folder, mode, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
chance = random.Random(int(sys.argv[4]))

def tree(n):
    return {"n": n, "w": np.random.default_rng(n).random(30_000), "small": [np.full(3, n), {"x": str(n)}]}

def check(found, n):
    assert found["n"] == n
    np.testing.assert_array_equal(found["w"], tree(n)["w"])
    np.testing.assert_array_equal(found["small"]["0"], np.full(3, n))
    assert found["small"]["1"] == {"x": str(n)}

def set_flag(n):
    orbax = n % 2 == 0 if "mixed" in mode else "orbax" in mode
    flax.config.update("flax_use_orbax_checkpointing", orbax)

def save(n, manager=None):
    set_flag(n)
    step = 5 if "same" in mode else n
    checkpoints.save_checkpoint(
        folder, tree(n), step, keep=3, overwrite="same" in mode, async_manager=manager
    )

def write_for_ever(pipe):
    manager = checkpoints.AsyncManager() if "async" in mode else None
    n = checkpoints.restore_checkpoint(folder, None)["n"] + 1
    while True:
        save(n, manager)
        if manager:
            manager.wait_previous_save()
        os.write(pipe, b"%d " % n)
        n += 1

def read_and_save(sure):
    # ``sure`` was acknowledged; the next one may have been committed as well.
    latest = checkpoints.restore_checkpoint(folder, None)
    assert latest["n"] in (sure, sure + 1), (latest["n"], sure)
    check(latest, latest["n"])
    if "same" in mode:
        assert checkpoints.available_steps(folder) == [5]
    else:
        steps = checkpoints.available_steps(folder)
        assert {sure - 1, sure} <= set(steps) <= {sure - 2, sure - 1, sure, sure + 1}, (steps, sure)
        for step in steps:
            check(checkpoints.restore_checkpoint(folder, None, step), step)
    n = latest["n"] + 1
    save(n)
    check(checkpoints.restore_checkpoint(folder, None), n)
    assert not [name for name in os.listdir(folder) if name.startswith(".")], os.listdir(folder)
    assert len(os.listdir(folder)) == (1 if "same" in mode else 3)

def fork(function, *arguments):
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

if "two steps" in mode:
    files.exchange = lambda *_: False
for first in (8, 9, 10):
    assert os.waitpid(fork(save, first), 0)[1] == 0
for _ in range(kills):
    reader, pipe = os.pipe()
    writer = fork(write_for_ever, pipe)
    os.close(pipe)
    acknowledged = os.read(reader, 100)  # it is under way
    time.sleep(chance.random() * float(sys.argv[5]))
    os.kill(writer, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(writer, 0)[1])
    while more := os.read(reader, 10_000):
        acknowledged += more
    os.close(reader)
    sure = int(acknowledged.split()[-1])
    assert os.waitpid(fork(read_and_save, sure), 0)[1] == 0, sure
"""


@pytest.mark.parametrize(
    "mode",
    [
        "orbax", "async msgpack", "same mixed",
        *(
            pytest.param(mode, marks=pytest.mark.slow)
            for mode in ("msgpack", "async orbax", "same msgpack", "mixed", "same orbax", "same orbax in two steps")
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, mode: str, kills: int) -> None:
    """After each kill all acknowledged steps restore bit for bit, the latest is whole, and the next save works.

    ``same`` overwrites one step again and again: the old or the new is there, whole. ``mixed`` lets files replace
    directories and back. ``in two steps`` is a file system that cannot exchange two names atomically.
    """
    run_python(KILLS, tmp_path, mode, kills, len(mode), 0.06 if "orbax" in mode else 0.02, PYTHONWARNINGS="ignore")


HELD = """
import signal, sys
import flax, numpy as np
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import atomic as files
flax.config.update("flax_use_orbax_checkpointing", sys.argv[2] == "True")
def hold(*arguments, **_):
    print("written", flush=True)
    signal.pause()
files.publish = hold
checkpoints.save_checkpoint(sys.argv[1], {"n": 1.0, "w": np.full(3, 1, np.float32)}, 1, prefix="held_")
"""


def test_a_live_writers_temporary_is_spared(flag: bool, tmp_path: Path) -> None:
    """Saves of another process leave it alone while it lives, and remove it once it was killed."""
    process = start_python(HELD, tmp_path, flag)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        for step in range(3):
            ours.save_checkpoint(tmp_path, tree(step), step)
        left = [name for name in names(tmp_path) if name.startswith(".held_1")]
        assert len(left) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert ours.latest_checkpoint(tmp_path, "held_") is None
    ours.save_checkpoint(tmp_path, tree(4), 4)
    assert names(tmp_path) == ["checkpoint_4"]


TWO = """
import os, sys
import flax, numpy as np
from flax_ckpt_compat import checkpoints
flax.config.update("flax_use_orbax_checkpointing", sys.argv[2] == "True")
children = []
for prefix in ("a_", "b_", "a_b_"):
    child = os.fork()
    if not child:
        for step in range(12):
            checkpoints.save_checkpoint(sys.argv[1], {"w": np.full(3, step)}, step, prefix=prefix, keep=2)
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""


def test_processes_save_different_prefixes_into_one_directory(flag: bool, tmp_path: Path) -> None:
    """None disturbs another, and each keeps its own count."""
    run_python(TWO, tmp_path, flag, PYTHONWARNINGS="ignore")
    assert names(tmp_path) == [f"{prefix}{step}" for prefix in ("a_", "a_b_", "b_") for step in (10, 11)]
    for prefix in ("a_", "b_", "a_b_"):
        restored = ours.restore_checkpoint(tmp_path, None, prefix=prefix)
        np.testing.assert_array_equal(restored["w"], np.full(3, 11))


SAME = """
import os, sys
import flax, numpy as np
from flax_ckpt_compat import checkpoints
flax.config.update("flax_use_orbax_checkpointing", sys.argv[2] == "True")
children = []
for mine in range(3):
    child = os.fork()
    if not child:
        for step in range(15):
            tree = {"w": np.full(3000, step), "mine": mine}
            checkpoints.save_checkpoint(sys.argv[1], tree, step, keep=2, overwrite=True)
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""


def test_processes_save_the_same_steps(flag: bool, tmp_path: Path) -> None:
    """Scripts that forget to save from one process only still get whole checkpoints, without an error or a warning."""
    _, err = run_python(SAME, tmp_path, flag, PYTHONWARNINGS="ignore")
    assert "incomplete" not in err
    assert names(tmp_path) == ["checkpoint_13", "checkpoint_14"]
    for step in (13, 14):
        np.testing.assert_array_equal(ours.restore_checkpoint(tmp_path, None, step)["w"], np.full(3000, step))
