"""Saving in the background: the values of the call, the order of the calls, and no failure lost."""

import _thread
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors, rules, save
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._save import async_saves
from flax_ckpt_compat._save.snapshot import Copies
from tests.support.saves import before_publish, names, run_saving, tree


class Asking:
    """A user's own manager, which asks for the result of its save whenever it is called."""

    save_future: Any = None

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)

    def wait_previous_save(self) -> None:
        if self.save_future is not None:
            self.save_future.result()

    def save_async(self, task: Callable[[], Any]) -> None:
        self.wait_previous_save()
        self.save_future = self.executor.submit(task)


class Retelling(Asking):
    """One that tells of it in words of its own, anew at each call."""

    def wait_previous_save(self) -> None:
        if self.save_future is not None and (error := self.save_future.exception()):
            raise RuntimeError(str(error))


@pytest.fixture(params=[ours.AsyncManager, flax_checkpoints.AsyncManager], ids=["ours", "Flax's"])
def manager(request: pytest.FixtureRequest) -> Any:
    """Our AsyncManager, and Flax's own class."""
    return request.param()


class Gate:
    """Holds every commit until it is opened, or makes it fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.error: BaseException | None = None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before every commit; closed."""
    held = Gate()

    def wait(_: str) -> None:
        assert held.open.wait(30)
        if held.error is not None:
            raise held.error

    before_publish(monkeypatch, wait)
    yield held
    held.open.set()


def fail_once(gate: Gate, folder: Path, manager: Any, *, finished: bool) -> None:
    """A background save that fails; it has ended on return only if ``finished``."""
    gate.error = errors.StorageError("the disk broke", path=str(folder), errno=5)
    (gate.open.set if finished else gate.open.clear)()
    ours.save_checkpoint(folder, tree(1), 1, async_manager=manager)
    if finished:
        assert manager.save_future.exception() is not None
    else:
        threading.Timer(0.05, gate.open.set).start()


def test_values_are_those_of_the_call(flag: bool, tmp_path: Path, manager: Any, gate: Gate) -> None:
    """numpy arrays mutated, also of a subclass or seen through a read-only view, jax arrays deleted or donated, and
    containers changed afterwards do no harm."""
    array, fortran = np.arange(6.0), np.asfortranarray(np.arange(6).reshape(2, 3))
    deleted, donated, key = jnp.arange(3), jnp.arange(1000.0), jax.random.key(7)
    view, own = np.broadcast_to(array[1], (3,)), np.zeros(3).view(type("Own", (np.ndarray,), {}))
    target = {"a": array, "f": fortran, "d": deleted, "o": donated, "k": key, "l": [1, 2], "view": view, "own": own}
    expected = {
        "view": np.ones(3),
        "own": np.zeros(3),
        "a": array.copy(),
        "f": fortran.copy(),
        "d": np.arange(3),
        "o": np.arange(1000.0, dtype=np.float32),
    }
    ours.save_checkpoint(tmp_path, target, 1, async_manager=manager)
    array[:], fortran[:], own[:] = -1, -1, -1
    deleted.delete()
    jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(donated).block_until_ready()
    target["l"].append(3)
    target.clear()
    gate.open.set()
    manager.wait_previous_save()
    # Callers wait, and then ask for the result, or whether it is done.
    assert manager.save_future.done() and manager.save_future.exception() is None
    found = ours.restore_checkpoint(tmp_path, None)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    assert list(found["l"]) == ["0", "1"]
    np.testing.assert_array_equal(jax.random.key_data(found["k"]), jax.random.key_data(jax.random.key(7)))


def test_nothing_appears_before_the_commit(flag: bool, tmp_path: Path, manager: Any, gate: Gate) -> None:
    """Until it is complete, a background save is not a checkpoint, and it evicts nothing."""
    gate.open.set()
    ours.save_checkpoint(tmp_path, tree(1), 1)
    gate.open.clear()
    ours.save_checkpoint(tmp_path, tree(2), 2, async_manager=manager)
    assert ours.available_steps(tmp_path) == [1]
    assert ours.restore_checkpoint(tmp_path, None)["n"] == 1
    gate.open.set()
    manager.wait_previous_save()
    assert names(tmp_path) == ["checkpoint_2"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["directory", "checkpoint"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_restore_waits_for_the_first_save(
    flag: bool, tmp_path: Path, manager: Any, gate: Gate, where: str, fails: bool
) -> None:
    """With nothing else to restore, it would return its target: a program would train on from initial values."""
    if fails:
        gate.error = errors.StorageError("the disk broke", path=str(tmp_path), errno=5)
    if where == "checkpoint":
        (tmp_path / "checkpoint_0.5").touch()  # what else the directory holds does not matter
    saved = ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=manager, overwrite=True)
    threading.Timer(0.05, gate.open.set).start()
    place = tmp_path if where == "directory" else saved
    if fails:
        with pytest.raises(errors.StorageError, match="broke"):
            ours.restore_checkpoint(place, tree(0))
    else:
        assert ours.restore_checkpoint(place, tree(0))["n"] == 1
    gate.error = None


def test_a_restore_before_a_queued_save_does_not_wait_for_ever(flag: bool, tmp_path: Path) -> None:
    """In the pool's only thread, the restore runs the save that would be next there."""
    manager, queued = ours.AsyncManager(), threading.Event()

    def restore_then() -> Any:
        assert queued.wait(30)
        return ours.restore_checkpoint(tmp_path, tree(0))

    restored = manager.executor.submit(restore_then)
    ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=manager)
    queued.set()
    assert restored.result(30)["n"] == 1
    manager.wait_previous_save()
    assert names(tmp_path) == ["checkpoint_1"]


def save_two(folder: Path, manager: Any = None) -> None:
    """What a program saves after a failure."""
    ours.save_checkpoint(folder, tree(2), 2, keep=9, async_manager=manager)


# Calls after a background save into ``folder/"run"`` has failed.
TOLD: dict[str, Callable[[Path, Any], Any]] = {
    "next save": lambda folder, manager: save_two(folder / "run", manager),
    "next save, at once": lambda folder, manager: save_two(folder / "run", manager),
    "anyone's, through a link": lambda folder, _: save_two(folder / "link"),
    "the manager's elsewhere": lambda folder, manager: save_two(folder / "other", manager),
    "restore": lambda folder, _: ours.restore_checkpoint(folder / "run", None),
    "restore from two": lambda folder, _: ours.restore_checkpoint(
        folder / "first", None, orbax_transforms=[rules.from_checkpoint(folder / "run", "n")]
    ),
}


@pytest.mark.parametrize("call", TOLD)
@pytest.mark.parametrize("kind", [ours.AsyncManager, flax_checkpoints.AsyncManager, Asking, Retelling])
def test_a_failure_is_raised_once(flag: bool, tmp_path: Path, kind: Any, gate: Gate, call: str) -> None:
    """Nobody goes on unawares, though Flax's own manager forgets the failure of a save that has ended.

    It belongs to its directory, and concerns no other."""
    manager = kind()
    gate.open.set()
    for name in ("run", "first"):
        ours.save_checkpoint(tmp_path / name, {"n": 0}, 0)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    is_finished = call != "next save, at once"
    fail_once(gate, tmp_path / "run", manager, finished=is_finished)
    if is_finished:
        gate.error = None
        save_two(tmp_path / "first")
        assert ours.restore_checkpoint(tmp_path / "first", None)["n"] == 2
    with pytest.raises(errors.StorageError, match="broke"):
        TOLD[call](tmp_path, manager)
    gate.error = None
    TOLD[call](tmp_path, manager)
    save_two(tmp_path / "last", manager)
    manager.wait_previous_save()


@pytest.mark.parametrize("nested", [False, True])
def test_a_restore_from_two_waits_for_multiprocess_saves(tmp_path: Path, nested: bool) -> None:
    """What `rules.from_checkpoint` takes is what this process's multi-process save published, however late."""
    first, other = save(tmp_path / "first", {"n": 1}), tmp_path / "b"
    ours.save_checkpoint(other, {"n": 1}, 1)
    second, may_publish = save(tmp_path / "second", {"n": 2}), threading.Event()

    def late() -> None:
        assert may_publish.wait(30)
        Path(second).rename(other / "checkpoint_2")

    async_saves.start(ours.AsyncManager(), location_of(other), late, lookup_timeout=30)
    taken = rules.from_checkpoint(other, "n")
    if nested:
        taken = rules.from_checkpoint(first, "n", transforms=[taken])
    with ThreadPoolExecutor(1) as pool:
        restored = pool.submit(ours.restore_checkpoint, first, None, orbax_transforms=[taken])
        with pytest.raises(futures.TimeoutError):
            restored.result(0.2)
        may_publish.set()
        assert restored.result(30)["n"] == 2


def test_commits_keep_the_order_of_the_calls(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several managers with several workers, Flax's among them, mixed with saves in the foreground."""
    order = []

    def slow(final: str) -> None:
        time.sleep(0.02 if final.endswith("0") else 0)
        order.append(Path(final).name)

    before_publish(monkeypatch, slow)
    managers: list[Any] = [ours.AsyncManager(4), flax_checkpoints.AsyncManager(4), None, ours.AsyncManager()]
    for step in range(12):
        ours.save_checkpoint(tmp_path, tree(step), step, keep=2, async_manager=managers[step % len(managers)])
    async_saves.finish(async_saves.saves_into(location_of(tmp_path)))
    assert order == [f"checkpoint_{step}" for step in range(12)]
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_11"]


@pytest.mark.parametrize("raised_by", ["save", "restore"])
def test_a_cancelled_save_raises_once(flag: bool, tmp_path: Path, gate: Gate, raised_by: str) -> None:
    """A save that its pool never ran is a failure like any other, and the next save works again."""
    manager = ours.AsyncManager()
    gate.open.set()
    ours.save_checkpoint(tmp_path, tree(0), 0)
    gate.open.clear()
    manager.executor.submit(gate.open.wait)
    ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=manager)
    manager.executor.shutdown(wait=False, cancel_futures=True)
    gate.open.set()
    with pytest.raises(futures.CancelledError):
        save_two(tmp_path) if raised_by == "save" else ours.restore_checkpoint(tmp_path, None)
    ours.save_checkpoint(tmp_path, tree(2), 2)
    assert names(tmp_path) == ["checkpoint_2"]


def test_ctrl_c_ends_no_queued_save(flag: bool, tmp_path: Path, gate: Gate) -> None:
    """It ends the wait for a save that the pool had not begun, and the save goes on."""
    manager = ours.AsyncManager()
    manager.executor.submit(gate.open.wait)
    ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=manager)
    threading.Timer(0.1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        save_two(tmp_path)
    gate.open.set()
    manager.wait_previous_save()
    assert names(tmp_path) == ["checkpoint_1"]


def test_look_ups_wait_for_their_time(tmp_path: Path, gate: Gate) -> None:
    """A multi-process save that its pool has not begun, or that hangs, hangs no look-up; one that ends is forgotten."""
    manager, may_end, calls = ours.AsyncManager(), threading.Event(), list[int]()
    manager.executor.submit(gate.open.wait)
    begun = threading.Event()
    async_saves.start(
        manager, location_of(tmp_path), lambda: (begun.set(), may_end.wait(30), calls.append(1)), lookup_timeout=0.2
    )
    for release in (gate.open.set, lambda: (begun.wait(30), may_end.set())):
        start = time.monotonic()
        async_saves.wait_for_multiprocess_saves(location_of(tmp_path))
        assert 0.2 <= time.monotonic() - start < 5
        release()
    async_saves.finish(async_saves.saves_into(location_of(tmp_path)))
    assert calls == [1] and not async_saves.saves_into(location_of(tmp_path))


class Hooked(Asking):
    """A manager whose tasks end with a save of its program's own, and whose failures are others', too."""

    hook: Callable[[], Any] = staticmethod(lambda: None)
    own: BaseException | None = None

    def wait_previous_save(self) -> None:
        if self.own is not None:
            raise self.own
        super().wait_previous_save()

    def save_async(self, task: Callable[[], Any]) -> None:
        super().save_async(lambda: (task(), self.hook()))


def test_a_hook_after_a_save_may_save(tmp_path: Path) -> None:
    """It runs in the pool's thread once our task has ended, and would wait for itself."""
    manager: Any = Hooked()
    manager.hook = lambda: ours.save_checkpoint(tmp_path, tree(1), 1, prefix="best_")
    ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=manager)
    manager.save_future.result(30)
    assert names(tmp_path) == ["best_1", "checkpoint_1"]


def test_another_failure_of_a_manager_is_raised(tmp_path: Path, gate: Gate) -> None:
    """Only the one that was raised before is not raised again, whatever its class."""
    manager: Any = Hooked()
    gate.open.set()
    gate.error = SystemExit(3)
    ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=manager)
    with pytest.raises(SystemExit):
        save_two(tmp_path, manager)
    gate.error, manager.own = None, RuntimeError("the upload failed")
    with pytest.raises(RuntimeError, match="the upload failed"):
        save_two(tmp_path, manager)
    manager.own = None
    save_two(tmp_path, manager)
    manager.save_future.result(30)


@pytest.mark.parametrize("raised_by", ["save", "restore"])
def test_a_failure_of_a_hook_after_the_save_is_raised_once(tmp_path: Path, raised_by: str) -> None:
    """Also where a restore has found the save itself whole, before the hook failed."""
    manager: Any = Hooked()
    may_fail = threading.Event()

    def hook() -> None:
        assert may_fail.wait(30)
        raise OSError("the upload failed")

    manager.hook = hook
    ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=manager)
    assert ours.restore_checkpoint(tmp_path, tree(0))["n"] == 1  # waits for the save, and not for the hook
    may_fail.set()
    futures.wait([manager.save_future])
    manager.hook = lambda: None
    with pytest.raises(OSError, match="the upload failed"):
        save_two(tmp_path, manager) if raised_by == "save" else ours.restore_checkpoint(tmp_path, None)
    save_two(tmp_path, manager)
    manager.wait_previous_save()


IN_A_PROCESS = """
import multiprocessing
def work():
    def fail(*arguments, **options):
        raise OSError("the disk broke")
    atomic.publish = fail
    for number, module in enumerate([checkpoints, theirs]):
        checkpoints.save_checkpoint(f"{folder}/{number}", {"n": 1}, 1, async_manager=module.AsyncManager())
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join(60)
assert process.exitcode == 0
"""


def test_a_failure_is_logged_at_the_end_of_a_process(tmp_path: Path) -> None:
    """The processes of multiprocessing call no exit handlers."""
    _, err = run_saving(IN_A_PROCESS, tmp_path, False)
    assert all(f"{tmp_path}/{number} failed: OSError('the disk broke')" in err for number in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_copies_are_freed_when_the_save_has_ended(
    flag: bool, fails: bool, tmp_path: Path, manager: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when its failure was seen, or the garbage collector has run."""
    copies, add = list[Any](), Copies.add

    def noted(self: Copies, source: Any) -> Any:
        copies.append(weakref.ref(copy := add(self, source)))
        return copy

    monkeypatch.setattr(Copies, "add", noted)
    if fails:
        gate.error = errors.StorageError("the disk broke", path=str(tmp_path), errno=5)
    target = {"a": np.ones(100_000), "j": jnp.ones(9), "large": np.ones(9_000_000)}
    gc.collect()
    gc.disable()
    try:
        ours.save_checkpoint(tmp_path, target, 1, async_manager=manager)
        assert any(copy() is not None for copy in copies)
        gate.open.set()
        future = manager.save_future
        futures.wait([future])
        manager.executor.submit(int).result()  # its thread has dropped the task
        assert [copy() for copy in copies] == [None] * len(copies)
    finally:
        gc.enable()
    with pytest.raises(errors.StorageError, match="broke") if fails else contextlib.nullcontext():
        ours.restore_checkpoint(tmp_path, None)


def test_a_save_within_a_save(flag: bool, tmp_path: Path, manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an object that is freed there, and saves at its end: it does not wait for the save that it is in."""
    is_known = threading.Event()

    def finalize_before(final: str) -> None:
        if final.endswith("_1"):
            assert is_known.wait(20)
            for step, its_manager in ((2, manager), (3, None)):
                ours.save_checkpoint(tmp_path, tree(step), step, prefix="last_", keep=2, async_manager=its_manager)

    before_publish(monkeypatch, finalize_before)
    ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=manager)
    future = manager.save_future
    is_known.set()
    future.result(20)
    assert names(tmp_path) == ["checkpoint_1", "last_2", "last_3"]


def test_saves_in_a_managers_own_pool(flag: bool, tmp_path: Path, manager: Any) -> None:
    """The second one does not wait for the first behind itself."""

    def save_twice() -> None:
        for step in (1, 2):
            ours.save_checkpoint(tmp_path, tree(step), step, async_manager=manager)

    manager.executor.submit(save_twice).result(20)
    assert names(tmp_path) == ["checkpoint_2"]


LATE = """
tree = {"w": np.arange(300000.0), "s": "x", **{f"a{n}": np.ones(300) for n in range(20)}}

def save(where, manager):
    for step in (1, 2):
        checkpoints.save_checkpoint(f"{folder}/{where}", tree, step, async_manager=manager)
        manager.wait_previous_save()
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(f"{folder}/{where}", None)["w"], tree["w"])
    print(where)

def after_main():
    threading.main_thread().join()
    save("thread", checkpoints.AsyncManager())

ended = checkpoints.AsyncManager()
ended.executor.shutdown()
save("shutdown", ended)
atexit.register(save, "ours", checkpoints.AsyncManager())
atexit.register(save, "flax", theirs.AsyncManager())
threading.Thread(target=after_main).start()
publish = atomic.publish
def slow(temporary, final, **options):
    time.sleep(0.3 if "/slow/" in final else 0)
    publish(temporary, final, **options)
atomic.publish = slow
checkpoints.save_checkpoint(f"{folder}/slow", tree, 1, async_manager=checkpoints.AsyncManager())
"""


def test_saves_when_there_are_no_more_threads(flag: bool, tmp_path: Path) -> None:
    """After main, in exit handlers and with a pool that was shut down, an async save is done at once; one that the
    program did not wait for is finished."""
    out, err = run_saving(LATE, tmp_path, flag, whole_end=True)
    assert sorted(out.split()) == ["flax", "ours", "shutdown", "thread"], err
    assert "Traceback" not in err and "failed" not in err
    np.testing.assert_array_equal(ours.restore_checkpoint(tmp_path / "slow", None)["w"], np.arange(300000.0))


def test_a_managers_own_error_is_raised(flag: bool, tmp_path: Path) -> None:
    """Only a pool's refusal makes a save go on without it; what was queued all the same does nothing later."""
    queued = list[Callable[[], Any]]()

    class Broken(Asking):
        def save_async(self, task: Callable[[], Any]) -> None:
            queued.append(task)
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        ours.save_checkpoint(tmp_path, tree(), 1, async_manager=Broken())
    queued[0]()
    assert names(tmp_path) == []


def test_a_save_that_is_refused_and_runs_all_the_same(tmp_path: Path, gate: Gate) -> None:
    """A pool queues a task before it starts a thread for it, and another thread may take it: its failure is raised."""

    class Refusing(ours.AsyncManager):
        def save_async(self, task: Callable[[], Any]) -> Future[Any]:
            begun = threading.Event()
            self.executor.submit(lambda: (begun.set(), task()))
            assert begun.wait(30)
            time.sleep(0.2)
            raise RuntimeError("can't start new thread")

    gate.error = errors.StorageError("the disk broke", path=str(tmp_path), errno=5)
    threading.Timer(0.5, gate.open.set).start()
    with pytest.raises(errors.StorageError, match="broke"):
        ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=Refusing())
    gate.error = None
    ours.save_checkpoint(tmp_path, tree(2), 2, async_manager=Refusing())
    assert names(tmp_path) == ["checkpoint_2"]


FORKED_MANAGER = """
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._save import async_saves
hold, begun = threading.Event(), threading.Event()
used, busy = checkpoints.AsyncManager(), checkpoints.AsyncManager(max_workers=2)
checkpoints.save_checkpoint(folder, {"n": 1}, 1, async_manager=used)
used.wait_previous_save()
async_saves.start(busy, location_of(folder), lambda: begun.set() or hold.wait())
begun.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    # The parent's threads are not here.
    for step, manager, orbax in ((2, used, False), (3, busy, True), (4, None, True)):
        flax.config.update("flax_use_orbax_checkpointing", orbax)
        checkpoints.save_checkpoint(folder, {"n": step}, step, keep=0, async_manager=manager)
        if manager:
            manager.wait_previous_save()
        assert [checkpoints.restore_checkpoint(folder, None, n)["n"] for n in (1, step)] == [1, step]
    assert checkpoints.available_steps(folder) == [1, 2, 3, 4] and verify(folder).ok
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert not busy.save_future.done()
hold.set()
busy.wait_previous_save()
checkpoints.save_checkpoint(folder, {"n": 5}, 5, keep=0)
"""


def test_a_forked_child_saves_with_its_parents_managers(flag: bool, tmp_path: Path) -> None:
    """A manager whose thread, or save, is the parent's begins anew in the child, which waits for no save of that.

    Both formats work in the child, as a worker of a data loader, and in the parent."""
    run_saving(FORKED_MANAGER, tmp_path, flag)
    assert ours.available_steps(tmp_path) == [1, 2, 3, 4, 5]


def test_the_managers_own_calls_raise_the_failure_before() -> None:
    """As Flax's manager, which programs also give tasks of their own; a failure is raised once, and starts nothing."""
    manager, done = ours.AsyncManager(), list[str]()
    manager.save_async(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.save_async(lambda: done.append("second"))
    assert isinstance(manager.executor, ThreadPoolExecutor)
    assert manager.save_future is not None and manager.save_future.done()
    manager.save_async(lambda: done.append("third"))
    manager.wait_previous_save()
    assert done == ["third"]
