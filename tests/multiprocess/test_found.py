"""Processes that find different checkpoints for one path: none goes on from other values than the rest in silence."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, restore
from tests.multiprocess.jobs import small, use
from tests.support.logs import warnings_logged
from tests.support.saves import use_flag
from tests.support.team import team_of

# One path that is another directory in each process, as where a mount is missing on a machine.
OWN_VIEW = "/proc/self/cwd/run"


def restore_own_view(folders: list[str], late: int, strict: bool) -> float:
    """Restores the latest checkpoint of `OWN_VIEW`, which is ``run`` in a folder of each process; one comes later."""
    before = os.getcwd()
    os.chdir(folders[jax.process_index()])
    try:
        if jax.process_index() == late:
            time.sleep(0.7)
        got: Any = restore(OWN_VIEW, small(-1)) if strict else checkpoints.restore_checkpoint(OWN_VIEW, small(-1))
    finally:
        os.chdir(before)
    return float(got["n"])


def restore_and_save(folder: str, orbax: bool) -> list[float]:
    """Looks before, between and after saves, as a training loop does; process 0 also on its own."""
    use(orbax)
    found = []
    for step in range(3):
        found.append(float(checkpoints.restore_checkpoint(folder, small(-1))["n"]))
        checkpoints.save_checkpoint_multiprocess(folder, small(step), step)
        if jax.process_index() == 0:
            checkpoints.restore_checkpoint(folder, small(-1))
    found.append(float(checkpoints.restore_checkpoint(folder, small(-1))["n"]))
    return found


def restore_after_removal(folder: str, late: int) -> float:
    """Restores what was removed since the last look; the ``late`` process does so when the other one has."""
    time.sleep(0.05)  # file systems count time in steps of some milliseconds
    shutil.rmtree(folder, ignore_errors=True)
    if jax.process_index() == late:
        time.sleep(0.3)
    return float(checkpoints.restore_checkpoint(folder, small(-1))["n"])


def restore_steps(folder: str, steps: list[int], late: int) -> list[str]:
    """Restores a step of its own in each process; returns what is warned of there."""
    if jax.process_index() == late:
        time.sleep(0.7)
    with warnings_logged() as logged:
        restore(folder, small(-1), step=steps[jax.process_index()])
    return [text for text in logged if "of this job" in text]


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/cwd differs by process")


def folders_with(tmp_path: Path, orbax: bool, *steps: int | None) -> list[str]:
    """A folder for each process; ``run`` in it holds these steps of one checkpoint directory, or is not there."""
    found = []
    for index, last in enumerate(steps):
        folder = tmp_path / str(index)
        folder.mkdir()
        found.append(str(folder))
        if last is not None:
            with use_flag(orbax):
                for step in range(1, last + 1):
                    tree = {"n": step, "w": np.full((8, 4), step, np.float32), "v": np.full(3, step)}
                    checkpoints.save_checkpoint(folder / "run", tree, step, keep=9)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("steps", [(None, 2), (2, None), (2, 3), (2, 2)])
def test_processes_with_views_of_their_own(
    orbax: bool, tmp_path: Path, steps: tuple[int | None, ...], late: int, strict: bool
) -> None:
    """The later one raises, whichever that is, and says who found what; nothing is said where all see the same."""
    outcomes = team_of(2).run(restore_own_view, folders_with(tmp_path, orbax, *steps), late, strict)
    if steps[0] == steps[1]:
        assert [outcome.value for outcome in outcomes] == [2, 2], outcomes
        return
    found = [f"{OWN_VIEW}/checkpoint_{step}" if step else "nothing" for step in steps]
    kind = "CheckpointNotFoundError" if strict and steps[late] is None else "MultiprocessRestoreError"
    assert outcomes[late].kinds[0] == kind, outcomes
    told = f"process {1 - late} of this job found {found[1 - late]}, and process {late} finds {found[late]}"
    assert told in outcomes[late].error


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_named_steps_that_differ(orbax: bool, tmp_path: Path, late: int) -> None:
    """The later process warns, since it may be meant; the same step in both is nothing to tell of."""
    (folder,) = folders_with(tmp_path, orbax, 2)
    told = team_of(2).call(restore_steps, folder + "/run", [1, 2], late)
    assert told[1 - late] == [] and len(told[late]) == 1
    assert all(part in told[late][0] for part in ("checkpoint_1", "checkpoint_2", f"process {1 - late}"))
    assert team_of(2).call(restore_steps, folder + "/run", [2, 2], late) == [[], []]


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loop_that_restores_and_saves(orbax: bool, tmp_path: Path, late: int) -> None:
    """What is saved, or removed, after a process has looked is no disagreement."""
    run = str(tmp_path / "run")
    for found in team_of(2).call(restore_and_save, run, orbax):
        assert found == [-1, 0, 1, 2]
    assert team_of(2).call(restore_after_removal, run, late) == [-1, -1]
