"""Background saves by several processes: one commit, in order, and no failure is lost."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._save import async_saves
from tests.multiprocess import jobs
from tests.multiprocess.jobs import barrier, before, names, restore_small, save_and_spoil, small, use
from tests.support.team import team_of


def save_many(folder: str, orbax: bool, count: int) -> list[int]:
    """Saves steps in the background, each time from memory that is overwritten at once.

    Returns:
        The latest step after each wait for a save.
    """
    use(orbax)
    manager, seen = checkpoints.AsyncManager(), []
    for step in range(count):
        save_and_spoil(folder, step, manager, keep=3)
        manager.wait_previous_save()
        seen.append(int(restore_small(folder, step)))
    # Once more without waits between.
    for step in range(count, 2 * count):
        checkpoints.save_checkpoint_multiprocess(f"{folder}/fast", small(step), step, keep=3, async_manager=manager)
    manager.wait_previous_save()
    assert checkpoints.available_steps(f"{folder}/fast") == list(range(2 * count - 3, 2 * count))
    return seen


def save_slowly(folder: str, orbax: bool) -> list[str]:
    """Saves in the background where process 1 takes its time to write; what is there meanwhile."""
    use(orbax)
    manager, go = checkpoints.AsyncManager(), threading.Event()
    with before(orbax, "write_process_part", lambda: go.wait(20) if jax.process_index() == 1 else None):
        checkpoints.save_checkpoint_multiprocess(folder, small(1), 1, async_manager=manager)
        time.sleep(0.2)
        # Our own look-ups wait for this process's part of the save.
        meanwhile = [name for name in names(folder) if not name.startswith(".")]
        barrier("all have looked early")
        go.set()
        manager.wait_previous_save()
    assert checkpoints.available_steps(folder) == [1]
    return meanwhile


LOOKS: dict[str, Callable[[str], Any]] = {
    "restore": lambda folder: checkpoints.restore_checkpoint(folder, small(-1))["n"],
    "latest": lambda folder: int(str(checkpoints.latest_checkpoint(folder)).rpartition("_")[2]),
    "steps": lambda folder: checkpoints.available_steps(folder)[-1],
    "iterate": lambda folder: list(flax_ckpt_compat.iter_checkpoints(folder))[-1].step,
    "open": lambda folder: flax_ckpt_compat.open_checkpoint(folder).step,
    "plan": lambda folder: int(flax_ckpt_compat.plan_restore(folder, small(-1)).path.rpartition("_")[2]),
}


def look_at_once(folder: str, orbax: bool, step: int, look: str) -> int:
    """Saves in the background where process 1 writes late, and looks: process 0 at once, process 1 after its wait."""
    use(orbax)
    manager, go = checkpoints.AsyncManager(), threading.Event()
    late = jax.process_index() == 1
    with before(orbax, "write_process_part", lambda: go.wait(20) if late else None):
        checkpoints.save_checkpoint_multiprocess(folder, small(step), step, keep=9, async_manager=manager)
        threading.Timer(0.1, go.set).start()
        if late:
            manager.wait_previous_save()
        seen = int(LOOKS[look](folder))
        manager.wait_previous_save()
    barrier("all have looked at once")
    return seen


def look_while_the_other_does_not(folder: str, orbax: bool, step: int) -> int | None:
    """Saves in the background; then process 0 alone restores."""
    use(orbax)
    manager = checkpoints.AsyncManager()
    checkpoints.save_checkpoint_multiprocess(folder, small(step), step, async_manager=manager)
    seen = int(LOOKS["steps"](folder)) if jax.process_index() == 0 else None
    barrier("process 0 has looked")
    manager.wait_previous_save()
    return seen


def fail(folder: str, orbax: bool, at: str) -> None:
    """Saves in the background where process 1 cannot write, and makes the next call."""
    use(orbax)
    manager = checkpoints.AsyncManager()

    def refuse() -> None:
        if jax.process_index() == 1:
            raise StorageError("no space in this test")

    with before(orbax, "write_process_part", refuse):
        checkpoints.save_checkpoint_multiprocess(folder, small(2), 2, async_manager=manager)
        while not manager.save_future.done():
            time.sleep(0.005)
    barrier(f"failed before {at}")
    if at == "save":
        checkpoints.save_checkpoint_multiprocess(folder, small(3), 3, async_manager=manager)
    elif at == "wait":
        manager.wait_previous_save()
    else:
        checkpoints.restore_checkpoint(folder, small(-1))


def fail_unnoticed(folder: str, orbax: bool) -> None:
    """Saves where a background task of process 1 alone has failed."""
    use(orbax)
    manager, refuse = checkpoints.AsyncManager(), Mock(side_effect=StorageError("trouble of process 1 alone"))
    if jax.process_index() == 1:
        async_saves.start(manager, location_of(folder), refuse)
    with config.override(coordination_timeout=20.0):
        checkpoints.save_checkpoint_multiprocess(folder, small(1), 1, async_manager=manager)


def test_saves_in_the_background(orbax: bool, tmp_path: Path) -> None:
    """Values are those of the call, whatever is donated after; every step is there once, and in order."""
    for committed in team_of(2).call(save_many, str(tmp_path), orbax, 5):
        assert committed == [0, 1, 2, 3, 4]
    assert team_of(2).call(jobs.restore_small, str(tmp_path), 3) == [3, 3]
    assert jobs.names(str(tmp_path)) == [*jobs.steps_and_arrays(orbax, 2, 3, 4), "fast"]


def test_the_commit_waits_for_all(orbax: bool, tmp_path: Path) -> None:
    """As long as one process has not written its part, there is no checkpoint; then there is one, whole."""
    assert team_of(2).call(save_slowly, str(tmp_path), orbax) == [[], []]
    assert team_of(2).call(jobs.restore_small, str(tmp_path)) == [1, 1]


@pytest.mark.slow
def test_look_ups_after_a_background_save_agree(orbax: bool, tmp_path: Path) -> None:
    """Each process waits for its own part, so that none looks before process 0 has published; and for nobody else."""
    team = team_of(2)
    for step, look in enumerate(LOOKS):
        assert team.call(look_at_once, str(tmp_path), orbax, step, look) == [step, step], look
    assert team.call(look_while_the_other_does_not, str(tmp_path), orbax, 99) == [99, None]


def test_a_failure_is_raised_in_all_processes_at_the_next_call(orbax: bool, tmp_path: Path) -> None:
    """One process fails in the background: the next save, wait and restore tell so in each; then all goes on."""
    team = team_of(2)
    team.call(jobs.save_small, str(tmp_path), orbax, 1)
    for at in ("save", "wait", "restore"):
        for index, outcome in enumerate(team.run(fail, str(tmp_path), orbax, at)):
            assert "CheckpointError" in outcome.kinds, outcome
            assert "no space in this test" in outcome.error
            assert index == 1 or "process 1 failed at 'commit'" in outcome.error
    assert team.call(jobs.restore_small, str(tmp_path)) == [1, 1]
    assert len(jobs.names(str(tmp_path))) == (1 if orbax else 2)
    team.call(jobs.save_small, str(tmp_path), orbax, 2)


def test_a_failure_in_one_process_only_is_told_to_all_at_the_next_save(orbax: bool, tmp_path: Path) -> None:
    """A failure of which only one process knows fails the next save of all, instead of leaving the others waiting."""
    for index, outcome in enumerate(team_of(2).run(fail_unnoticed, str(tmp_path), orbax)):
        assert "trouble of process 1 alone" in outcome.error
        assert (outcome.kinds[0] == "StorageError") == (index == 1)
    team_of(2).call(jobs.save_small, str(tmp_path), orbax, 2)
