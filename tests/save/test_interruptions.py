"""Signals, forks and closed streams in the middle of saves: Ctrl-C, handlers that save, data loaders, daemons."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from tests.support.saves import before_publish, names, run_python, tree

HANDLER = """
import _thread, signal, sys
import flax, numpy as np
from flax_ckpt_compat import checkpoints
folder = sys.argv[1]
flax.config.update("flax_use_orbax_checkpointing", True)
signal.alarm(30)
tree = {"w": np.arange(1_000_000.0), **{f"a{n}": np.ones(300) for n in range(20)}}
start, preempted = _thread.start_new_thread, []
def preempted_here(*call):
    if not preempted:
        preempted.append(call)
        signal.raise_signal(signal.SIGTERM)
    return start(*call)
def save_last(*_):
    checkpoints.save_checkpoint(folder + "/last", tree, 7)
_thread.start_new_thread = preempted_here
signal.signal(signal.SIGTERM, save_last)
checkpoints.save_checkpoint(folder, tree, 1)
assert preempted
"""


def test_a_handler_saves_while_a_save_starts_a_thread(tmp_path: Path) -> None:
    """Jobs save once more on SIGTERM, wherever it comes: neither save waits for ever for a lock of the other."""
    run_python(HANDLER, tmp_path)
    for saved in (tmp_path / "last", tmp_path):
        np.testing.assert_array_equal(ours.restore_checkpoint(saved, None)["w"], np.arange(1_000_000.0))


POOL = """
import signal, sys, threading
import flax
from flax.training import checkpoints as theirs
from flax_ckpt_compat import checkpoints
folder, module = sys.argv[1], {"ours": checkpoints, "Flax's": theirs}[sys.argv[2]]
flax.config.update("flax_use_orbax_checkpointing", False)
signal.alarm(30)
start, manager = threading.Thread.start, module.AsyncManager()
def preempted_here(thread):
    threading.Thread.start = start
    signal.raise_signal(signal.SIGTERM)
    start(thread)
def save_last(*_):
    checkpoints.save_checkpoint(folder, {"n": 7}, 7, async_manager=manager)
    manager.wait_previous_save()
    assert checkpoints.available_steps(folder) == [7]
signal.signal(signal.SIGTERM, save_last)
threading.Thread.start = preempted_here
checkpoints.save_checkpoint(folder, {"n": 8}, 8, async_manager=manager)
assert threading.Thread.start is start
"""


@pytest.mark.parametrize("manager", ["ours", "Flax's"])
def test_a_handler_saves_while_a_pool_takes_a_task(tmp_path: Path, manager: str) -> None:
    """Python's pools share a lock: a handler's async save would wait for ever for the call that it interrupted."""
    run_python(POOL, tmp_path, manager)
    assert ours.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_8")


WAITING = """
import signal, sys, threading
import flax
from flax.training import checkpoints as theirs
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import atomic
folder, module = sys.argv[1], {"ours": checkpoints, "Flax's": theirs}[sys.argv[2]]
flax.config.update("flax_use_orbax_checkpointing", False)
broke, manager = threading.Event(), module.AsyncManager()
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
@pytest.mark.parametrize("manager", ["ours", "Flax's"])
def test_an_interrupted_wait_loses_no_failure(tmp_path: Path, manager: str) -> None:
    """After Ctrl-C the background save still runs: the next call waits for it, and raises its failure, once."""
    out, _ = run_python(WAITING, tmp_path, manager)
    assert out.split() == ["interrupted", "True"]
    assert names(tmp_path) == ["checkpoint_2"]


class Shared(ours.AsyncManager):
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
    ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=Shared())
    with pytest.raises(errors.StorageError, match="broke"):
        ours.save_checkpoint(tmp_path, tree(2), 2)


IMPORT = """
import os, signal, sys
import ml_dtypes, numpy
from flax_ckpt_compat._core.load_tensorstore import load_tensorstore

def interrupted_after(seconds):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        load_tensorstore()
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    load_tensorstore().KvStore.open({"driver": "memory"}).result()
    os._exit(0)

children = []
for number in range(3):
    if not (child := os.fork()):
        interrupted_after(0.05 + 0.07 * number)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def test_an_interrupted_import_of_tensorstore(tmp_path: Path) -> None:
    """Ctrl-C in the first save of Orbax's format: TensorStore aborts a process that imports it a second time."""
    assert run_python(IMPORT, fresh=True)[0] == "[0, 0, 0]\n"


DURING_IMPORT = """
import os, signal, sys, time
import flax, numpy as np
from flax_ckpt_compat import checkpoints
signal.alarm(30)
flax.config.update("flax_use_orbax_checkpointing", sys.argv[2] == "True")
save = lambda step: checkpoints.save_checkpoint(sys.argv[1], {"w": np.full(3, step)}, step, keep=5)
signal.signal(signal.SIGTERM, lambda *_: save(2))

class Preempted:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[3]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

sys.meta_path.insert(0, Preempted())
save(1)
assert not any(isinstance(one, Preempted) for one in sys.meta_path)
print(checkpoints.available_steps(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("flag", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_handler_saves_while_the_first_save_imports(flag: bool, tmp_path: Path) -> None:
    """It found half of the imported module: an AttributeError, and the last state of a preempted job was lost."""
    module = "flax_ckpt_compat.orbax_backend.ocdbt_writer" if flag else "flax_ckpt_compat.legacy.encode"
    out, _ = run_python(DURING_IMPORT, tmp_path, flag, module, fresh=True)
    assert "2" in out


FORKED = """
import os, signal, sys
import flax, numpy as np
from flax_ckpt_compat import checkpoints, verify
signal.alarm(30)
folder, tree = sys.argv[1], {"w": np.arange(9.0)}

def save(name, flag):
    flax.config.update("flax_use_orbax_checkpointing", flag)
    checkpoints.save_checkpoint(f"{folder}/{name}", tree, 1)
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(f"{folder}/{name}", None)["w"], tree["w"])

save("parent", True)
if not os.fork():
    save("child", False)
    save("child2", True)
    checkpoints.restore_checkpoint(f"{folder}/parent", None)
    assert verify(f"{folder}/parent").ok
    os._exit(0)
assert os.wait()[1] == 0
save("parent2", True)
"""


def test_a_fork_of_a_process_that_saved(tmp_path: Path) -> None:
    """Both formats work in the child, as a worker of a data loader."""
    run_python(FORKED, tmp_path, PYTHONWARNINGS="ignore")


NO_DESCRIPTOR = """
import os, resource, sys
import flax
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.local import temporaries
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
def without_descriptors(call, *arguments):
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        return call(*arguments)
    except errors.StorageError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
"""

LOOK_UPS = """
folder, flag = sys.argv[1], sys.argv[2] == "True"
flax.config.update("flax_use_orbax_checkpointing", flag)
checkpoints.save_checkpoint(folder, {"w": 1.0}, 1)
for call in (checkpoints.latest_checkpoint, lambda path: checkpoints.restore_checkpoint(path, None)):
    call(folder)
    answer = without_descriptors(call, folder)
    assert "ulimit -n" in str(answer), answer
"""


def test_no_descriptor_is_left_for_a_look_up(flag: bool, tmp_path: Path) -> None:
    """It is an error that says what to do, and no older checkpoint."""
    run_python(NO_DESCRIPTOR + LOOK_UPS, tmp_path, flag)


PAUSED = """
import gc, os, sys, threading
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
    run_python(PAUSED, PYTHONWARNINGS="ignore")


# Native libraries log so: to the descriptor 2, whatever it is.
LOGS = """
import os, sys, threading
import flax
import numpy as np
from flax_ckpt_compat import checkpoints, convert

os.close(2)
done = threading.Event()

def log():
    while not done.wait(0):
        try:
            os.write(2, b"W0000 a native library\\n")
        except OSError:
            pass

thread = threading.Thread(target=log)
thread.start()
try:
    flax.config.update("flax_use_orbax_checkpointing", sys.argv[1] == "orbax")
    tree = {"w": np.arange(300_000.0), "b": 1}
    for step in range(8):
        checkpoints.save_checkpoint("run", tree, step, keep=9)
        found = checkpoints.restore_checkpoint("run", None, step)
        assert found["b"] == 1 and np.array_equal(found["w"], tree["w"])
    for result in convert("run", "converted", to="msgpack" if sys.argv[1] == "orbax" else "orbax"):
        assert result.status == "converted", result.error
finally:
    done.set()
    thread.join()
print("all", len(checkpoints.available_steps("converted")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", [pytest.param("msgpack", marks=pytest.mark.slow), "orbax"])
def test_logs_get_into_no_checkpoint(format: str, tmp_path: Path) -> None:
    """The files of a save would get the descriptor of the closed stderr, and the save would succeed."""
    out, _ = run_python(LOGS, format, cwd=tmp_path, fresh=True)
    assert out.split() == ["all", "8"]
