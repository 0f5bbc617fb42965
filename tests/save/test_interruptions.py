"""Signals, forks, kills and closed streams within saves: nothing acknowledged is lost, nothing half is latest."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.local import atomic
from tests.support import interrupting
from tests.support.layouts import assert_same
from tests.support.saves import before_publish, names, run_python, run_saving, tree

# A job that saves once more on SIGTERM, which comes once in the middle of a save: as a thread starts, a pool takes a
# task, or the first save imports a module.
HANDLER = """
import _thread
where, kind, preempted = *arguments, []
manager = kind and eval(kind).AsyncManager()
tree = {"w": np.arange(1_000_000.0), **{f"a{n}": np.ones(300) for n in range(20)}}
def preempt():
    if not preempted:
        preempted.append(where)
        signal.raise_signal(signal.SIGTERM)
def preempted_before(real):
    return lambda *call: preempt() or real(*call)
class Finder:
    def find_spec(self, name, *_):
        if name == where:
            preempt()
def save(path, step):
    checkpoints.save_checkpoint(path, tree, step, keep=9, async_manager=manager)
    if manager:
        manager.wait_previous_save()
if where == "thread":
    _thread.start_new_thread = preempted_before(_thread.start_new_thread)
elif where == "pool":
    threading.Thread.start = preempted_before(threading.Thread.start)
else:
    sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGTERM, lambda *_: (save(folder + "/last", 7), save(folder, 7)))
save(folder, 8)
assert preempted
"""


@pytest.mark.parametrize(
    ("where", "manager", "orbax"),
    [
        ("thread", "", True),
        ("pool", "checkpoints", False),
        ("pool", "theirs", False),
        pytest.param("flax_ckpt_compat.legacy.encode", "", False, marks=pytest.mark.slow),
        pytest.param("flax_ckpt_compat.orbax_backend.ocdbt_writer", "", True, marks=pytest.mark.slow),
    ],
)
def test_a_handler_saves_in_the_middle_of_a_save(tmp_path: Path, where: str, manager: str, orbax: bool) -> None:
    """Neither save waits for ever for a lock of the other, nor finds half of an imported module: the last state of a
    preempted job was lost."""
    run_saving(HANDLER, tmp_path, orbax, where, manager, fresh="." in where)
    for saved in (tmp_path / "last", tmp_path):
        np.testing.assert_array_equal(checkpoints.restore_checkpoint(saved, None)["w"], np.arange(1_000_000.0))


WAITING = """
broke, manager = threading.Event(), eval(arguments[0]).AsyncManager()
publish = atomic.publish
def fail(temporary, final, **options):
    if final.endswith("1"):
        assert broke.wait(30)
        raise OSError("the disk broke")
    publish(temporary, final, **options)
atomic.publish = fail
checkpoints.save_checkpoint(folder, {"n": 1}, 1, async_manager=manager)
interrupt = signal.pthread_kill, (threading.get_ident(), signal.SIGINT)
threading.Timer(0.3, *interrupt).start()
try:
    checkpoints.save_checkpoint(folder, {"n": 2}, 2, async_manager=manager)
except KeyboardInterrupt:
    print("interrupted")
threading.Timer(0.3, broke.set).start()
try:
    checkpoints.save_checkpoint(folder, {"n": 2}, 2)
except OSError as error:
    print("the disk broke" in str(error))
checkpoints.save_checkpoint(folder, {"n": 2}, 2, async_manager=manager)
manager.wait_previous_save()
"""


@pytest.mark.slow
@pytest.mark.parametrize("manager", ["checkpoints", "theirs"])
def test_an_interrupted_wait_loses_no_failure(tmp_path: Path, manager: str) -> None:
    """After Ctrl-C the background save still runs: the next call waits for it, and raises its failure, once."""
    out, _ = run_saving(WAITING, tmp_path, False, manager)
    assert out.split() == ["interrupted", "True"]
    assert names(tmp_path) == ["checkpoint_2"]


class Shared(checkpoints.AsyncManager):
    """A manager of two threads: before a call has ended, the other thread's sets ``save_future``."""

    def save_async(self, task: Callable[[], Any]) -> Future[Any]:
        future = super().save_async(task)
        self.save_future = self.executor.submit(int)
        return future


def test_threads_that_share_a_manager_lose_no_failure(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save is known by its own future, not by the manager's last one."""

    def fail(final: str) -> None:
        if final.endswith("checkpoint_1"):
            raise errors.StorageError("the disk broke", path=final, errno=5)

    before_publish(monkeypatch, fail)
    checkpoints.save_checkpoint(tmp_path, tree(1), 1, async_manager=Shared())
    with pytest.raises(errors.StorageError, match="broke"):
        checkpoints.save_checkpoint(tmp_path, tree(2), 2)


IMPORT = """
import contextlib, os, signal, sys
import ml_dtypes, numpy
from flax_ckpt_compat.orbax_backend.load_tensorstore import ForkedProcessError, load_tensorstore
def interrupted_after(seconds):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with contextlib.suppress(KeyboardInterrupt):
        load_tensorstore()
    signal.setitimer(signal.ITIMER_REAL, 0)
    load_tensorstore().KvStore.open({"driver": "memory"}).result()
    os._exit(0)
children = []
for number in range(4):
    if number == 3:
        os.getpid = lambda: 2  # the number of a process that has ended is used again
        load_tensorstore()
    if not (child := os.fork()):
        with contextlib.suppress(ForkedProcessError):
            interrupted_after(0.05 + 0.07 * number)
        os._exit(7)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def test_an_interrupted_import_of_tensorstore(tmp_path: Path) -> None:
    """TensorStore aborts a process that imports it again after Ctrl-C, and a child of one that has used it."""
    assert run_python(IMPORT, fresh=True)[0] == "[0, 0, 0, 7]\n"


NO_DESCRIPTOR = """
import resource
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
def without_descriptors(call, *arguments):
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        return call(*arguments)
    except errors.StorageError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
checkpoints.save_checkpoint(folder, {"w": 1.0}, 1)
for call in (checkpoints.latest_checkpoint, lambda path: checkpoints.restore_checkpoint(path, None)):
    call(folder)
    answer = without_descriptors(call, folder)
    assert "ulimit -n" in str(answer), answer
"""


def test_no_descriptor_is_left_for_a_look_up(flag: bool, tmp_path: Path) -> None:
    """It is an error that says what to do, and no older checkpoint."""
    run_saving(NO_DESCRIPTOR, tmp_path, flag)


PAUSED = """
from flax_ckpt_compat._core import memory
paused, end = threading.Event(), threading.Event()
def save():
    with memory.pause_gc():
        paused.set()
        end.wait()
thread = threading.Thread(target=save)
thread.start()
assert paused.wait(20)
if not (child := os.fork()):
    os._exit(0 if gc.isenabled() else 1)
assert os.waitpid(child, 0)[1] == 0
assert not gc.isenabled()
end.set()
thread.join()
assert gc.isenabled()
"""


def test_a_fork_during_a_save_has_a_garbage_collector(tmp_path: Path) -> None:
    """A data loader that starts while a background save pauses Python's collector would never collect again."""
    run_saving(PAUSED, tmp_path, False)


# Native libraries log so: to the descriptor 2, whatever it is.
LOGS = """
os.close(2)
done = threading.Event()
def log():
    while not done.wait(0):
        with contextlib.suppress(OSError):
            os.write(2, b"W0000 a native library\\n")
thread = threading.Thread(target=log)
thread.start()
try:
    tree = {"w": np.arange(300_000.0), "b": 1}
    for step in range(8):
        checkpoints.save_checkpoint(folder, tree, step, keep=9)
        found = checkpoints.restore_checkpoint(folder, None, step)
        assert found["b"] == 1 and np.array_equal(found["w"], tree["w"])
    for result in convert(folder, "converted", to="msgpack" if flag == "True" else "orbax"):
        assert result.status == "converted", result.error
finally:
    done.set()
    thread.join()
print("all", len(checkpoints.available_steps("converted")))
"""


@pytest.mark.slow
def test_logs_get_into_no_checkpoint(flag: bool, tmp_path: Path) -> None:
    """The files of a save would get the descriptor of the closed stderr, and the save would succeed."""
    out, _ = run_saving(LOGS, "run", flag, cwd=tmp_path, fresh=True)
    assert out.split() == ["all", "8"]


# Real processes, killed for real


# One process imports everything once; the writers that are killed, and the readers that come after, are its forks.
KILLS = """
from tests.reliability import kills
from tests.reliability.tally import Tally
from tests.reliability.workloads import SYSTEMS
signal.alarm(0)
mode, tally = arguments[0], Tally(prints=True)
if "two steps" in mode:
    atomic.exchange = lambda *_: False
systems = [one for one in SYSTEMS[:2] if "mixed" in mode or one.orbax == ("orbax" in mode)]
for number in range(int(arguments[1])):
    kills.random_time(systems, number, tally, background="async" in mode, overwrite="same" in mode)
print(tally.wrong, tally.shown())
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
    out, _ = run_saving(KILLS, tmp_path, False, mode, kills)
    assert out.splitlines()[-1].startswith("0 "), out


TOGETHER = """
children = []
for mine, prefix in enumerate(arguments):
    child = os.fork()
    if not child:
        for step in range(15):
            tree = {"w": np.full(3000, step), "mine": mine}
            checkpoints.save_checkpoint(folder, tree, step, prefix, 2, len(set(arguments)) == 1)
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""


@pytest.mark.parametrize("prefixes", [("a_", "b_", "a_b_"), ("c_",) * 3], ids=["prefixes of their own", "the same"])
def test_processes_save_into_one_directory(flag: bool, tmp_path: Path, prefixes: tuple[str, ...]) -> None:
    """None disturbs another, and each prefix has its own count. Scripts that forget to save the same steps from one
    process only still get whole checkpoints, without an error or a warning."""
    _, err = run_saving(TOGETHER, tmp_path, flag, *prefixes)
    assert "incomplete" not in err
    assert names(tmp_path) == sorted(f"{prefix}{step}" for prefix in {*prefixes} for step in (13, 14))
    for prefix in prefixes:
        for step in (13, 14):
            restored = checkpoints.restore_checkpoint(tmp_path, None, step, prefix)
            np.testing.assert_array_equal(restored["w"], np.full(3000, step))


# Ctrl-C in both formats' saves, evictions, background saves and conversions, at many places in turn


def tree_of(step: int) -> dict[str, Any]:
    """A tree whose every value tells the step."""
    arrays = {f"a{number:02}": np.full(200 * number, step + number, np.float32) for number in range(20)}
    return {"step": step, "params": arrays, "large": np.full(300_000, step, np.int16), "on_device": jnp.full(9, step)}


class Run:
    """One directory of one format, and what of it was acknowledged."""

    def __init__(self, folder: Path, flag: bool) -> None:
        self.format, self.other = ("orbax", "msgpack") if flag else ("msgpack", "orbax")
        self.folder, self.step, self.acknowledged = folder / self.format, 0, -1
        self.manager = checkpoints.AsyncManager()
        self.converted = 0

    def save(self, **options: Any) -> Callable[[], Any]:
        """A save of the next step, or of the last one with ``overwrite``."""
        self.step += not options.get("overwrite")
        tree, step = tree_of(self.step), self.step
        return lambda: checkpoints.save_checkpoint(self.folder, tree, step, **options)

    def save_in_background(self) -> Callable[[], Any]:
        """Several saves in the background, and the wait for them."""
        steps = range(self.step + 1, self.step + 4)
        self.step = steps[-1]

        def call() -> None:
            for step in steps:
                checkpoints.save_checkpoint(self.folder, tree_of(step), step, keep=2, async_manager=self.manager)
            self.manager.wait_previous_save()

        return call

    def convert(self) -> Callable[[], Any]:
        """A conversion of all steps to the other format."""
        self.converted += 1
        target = self.folder.parent / f"converted-{self.format}-{self.converted}"
        return lambda: flax_ckpt_compat.convert(self.folder, target, to=self.other)

    def look(self) -> None:
        """Check all that is there, against what was acknowledged."""
        with contextlib.suppress(CancelledError):  # of a save whose start was interrupted
            self.manager.wait_previous_save()
        steps = checkpoints.available_steps(self.folder)
        assert max([int(step) for step in steps], default=-1) >= self.acknowledged, (steps, self.acknowledged)
        for step in steps:
            assert_same(checkpoints.restore_checkpoint(self.folder, None, step), tree_of(int(step)))
        for folder in self.folder.parent.glob(f"converted-{self.format}-*"):
            for step in checkpoints.available_steps(folder):
                assert_same(flax_ckpt_compat.restore(folder, step=step), tree_of(int(step)))


def test_ctrl_c_leaves_no_lock_of_a_directory(tmp_path: Path) -> None:
    """Wherever it comes while a directory is locked: each later save waited for five seconds."""

    def lock() -> None:
        with atomic.locked(str(tmp_path)):
            pass

    at = 1
    while interrupting.ctrl_c(lock, at):
        at += 1
        descriptor = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    assert at > 20


KINDS: dict[str, Callable[[Run], Callable[[], Any]]] = {
    "new": lambda run: run.save(keep=9),
    "keep": lambda run: run.save(keep=1),
    "overwrite": lambda run: run.save(overwrite=True),
    "background": lambda run: run.save_in_background(),
    "convert": lambda run: run.convert(),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_comes_out_of_each_call(flag: bool, kind: str, tmp_path: Path) -> None:
    """Wherever it comes, in Python's own modules and in jax too, a call raises KeyboardInterrupt, and saves work on.

    An eviction raised CleanupError for a descriptor that `shutil.rmtree` had closed twice."""
    run, is_place, at = Run(tmp_path, flag), True, 1
    for first in ("keep", kind, kind):  # which import what they need
        KINDS[first](run)()
    while is_place:
        is_place = interrupting.ctrl_c(KINDS[kind](run), at)
        at += 53
        run.look()
        run.save(keep=1)()
        run.acknowledged = run.step
        for converted in tmp_path.glob("converted-*"):
            shutil.rmtree(converted)
    assert at > 1000
