"""Overwrite, retention and the flag hold for saves by several processes as for those of one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints
from tests.multiprocess import jobs
from tests.support.saves import tree, use_flag
from tests.support.team import team_of


def test_keep_and_every(orbax: bool, tmp_path: Path) -> None:
    """Retention leaves what it leaves of one process's saves, arrays too; Flax's rule from format chapter 6.4."""
    for step in range(1, 6):
        team_of(2).call(jobs.save_small, str(tmp_path), orbax, step, {"keep": 2, "keep_every_n_steps": 2})
    assert jobs.names(str(tmp_path)) == jobs.steps_and_arrays(orbax, 1, 3, 4, 5)
    assert team_of(2).call(jobs.restore_small, str(tmp_path)) == [5, 5]
    assert team_of(4).call(jobs.restore_small, str(tmp_path), 3) == [3] * 4


@pytest.mark.parametrize("step", [3, 2])
def test_an_existing_or_older_step_is_refused_in_all_processes(orbax: bool, tmp_path: Path, step: int) -> None:
    """Every process gets InvalidCheckpointError, and nothing changes; with overwrite, newer steps go as in Flax."""
    team = team_of(2)
    for saved in (1, 3):
        team.call(jobs.save_small, str(tmp_path), orbax, saved, {"keep": 5})
    before = jobs.names(str(tmp_path))
    for outcome in team.run(jobs.save_small, str(tmp_path), orbax, step, {"keep": 5}):
        assert outcome.kinds[0] == "InvalidCheckpointError"
        assert "checkpoint_3" in outcome.error
        assert "overwrite=True" in outcome.error
    assert jobs.names(str(tmp_path)) == before
    team.call(jobs.save_small, str(tmp_path), orbax, step, {"keep": 5, "overwrite": True})
    assert jobs.names(str(tmp_path)) == jobs.steps_and_arrays(orbax, 1, step)
    assert team.call(jobs.restore_small, str(tmp_path)) == [step, step]


def test_a_step_is_overwritten_in_the_other_format(tmp_path: Path) -> None:
    """A file with its arrays gives way to a directory, and back."""
    team = team_of(2)
    for orbax in (False, True, False, True):
        team.call(jobs.save_small, str(tmp_path), orbax, 1, {"overwrite": True})
        assert jobs.names(str(tmp_path)) == jobs.steps_and_arrays(orbax, 1)
        assert team.call(jobs.restore_small, str(tmp_path)) == [1, 1]


def test_saves_of_one_and_of_several_processes_share_a_directory(orbax: bool, tmp_path: Path) -> None:
    """Each sees the other's steps, and its retention removes them with their arrays."""
    team_of(2).call(jobs.save_small, str(tmp_path), orbax, 1)
    with use_flag(orbax):
        checkpoints.save_checkpoint(tmp_path, tree(2), 2)
    assert jobs.names(str(tmp_path)) == ["checkpoint_2"]
    refused = team_of(2).run(jobs.save_small, str(tmp_path), orbax, 1)
    assert [outcome.kinds[0] for outcome in refused] == ["InvalidCheckpointError"] * 2
    team_of(2).call(jobs.save_small, str(tmp_path), orbax, 3)
    assert jobs.names(str(tmp_path)) == jobs.steps_and_arrays(orbax, 3)


def test_two_jobs_save_one_step_without_overwrite(orbax: bool, tmp_path: Path) -> None:
    """Both have written before one commits: in one job all processes say that they saved, in the other none does."""
    teams = {"a": team_of(2), "bb": team_of(2, 4)}
    for job, team in teams.items():
        team.start(jobs.save_beside_another_job, str(tmp_path), orbax, job, len(teams))
    outcomes = {job: team.finish() for job, team in teams.items()}
    assert all(outcome.ok for both in outcomes.values() for outcome in both), outcomes
    saved = [job for job, both in outcomes.items() if [outcome.value for outcome in both] == ["", ""]]
    assert len(saved) == 1, outcomes
    refused = next(both for job, both in outcomes.items() if job not in saved)
    assert all(outcome.value in ("InvalidCheckpointError", "StorageError") for outcome in refused), outcomes
    for team in teams.values():
        assert team.call(jobs.restore_small, str(tmp_path)) == [len(saved[0])] * 2


def test_save_checkpoint_on_process_0_only(orbax: bool, tmp_path: Path) -> None:
    """It waits for nobody, with the flag on and off; so does a restore by one process."""
    team = team_of(2)
    outcome = team.run(jobs.save_alone, str(tmp_path), orbax, 1, only=[0], timeout=20)[0]
    assert outcome.value == str(tmp_path / "checkpoint_1"), outcome
    outcome = team.run(checkpoints.restore_checkpoint, str(tmp_path), None, only=[1], timeout=20)[1]
    np.testing.assert_array_equal(outcome.value["v"], np.full(3, 1))
    team.call(jobs.save_small, str(tmp_path), orbax, 2)


def test_save_checkpoint_on_all_processes(orbax: bool, tmp_path: Path) -> None:
    """One saves, and the others hear what to call; with ``overwrite`` all do, one after the other."""
    team = team_of(4)
    outcomes = team.run(jobs.save_alone, str(tmp_path), orbax, 1)
    assert sum(outcome.ok for outcome in outcomes) == 1, outcomes
    for outcome in outcomes:
        if not outcome.ok:
            assert outcome.kinds[0] == "InvalidCheckpointError", outcome
            assert "in process 0 only, or save_checkpoint_multiprocess in all" in outcome.error
    team.call(jobs.save_alone, str(tmp_path), orbax, 1, True)
    assert jobs.names(str(tmp_path)) == ["checkpoint_1"]
    for restored in team.call(checkpoints.restore_checkpoint, str(tmp_path), None):
        np.testing.assert_array_equal(restored["v"], np.full(3, 1))


def test_save_checkpoint_names_the_function_for_spread_arrays(orbax: bool, tmp_path: Path) -> None:
    """An array that this process sees only a part of is an error, which says what to call; nothing is written."""
    outcome = team_of(2).run(jobs.save_alone, str(tmp_path), orbax, 1, False, True, only=[0], timeout=20)[0]
    assert outcome.kinds[0] == "MPACheckpointingRequiredError"
    assert "save_checkpoint_multiprocess" in outcome.error
    assert "w is spread" in outcome.error
    assert jobs.names(str(tmp_path)) == []


SAME: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"step": 6}, ["checkpoint_6", "checkpoint_5"]),
        pytest.param({"below": "/elsewhere"}, ["/elsewhere/checkpoint_5"], marks=pytest.mark.slow),
        pytest.param({"overwrite": True}, ["overwrite=True", "overwrite=False"], marks=pytest.mark.slow),
        pytest.param({"orbax": None}, ["msgpack", "orbax"], marks=pytest.mark.slow),
        ({"checksums": "off"}, ["checksums='off'"]),  # else a part of the checkpoint would have none
        ({"compression": "crc32c"}, ["orbax with overwrite=False, compression='crc32c'"]),
        ({"more": ["spread"]}, ["arrays that are spread over processes differ"]),  # not a checkpoint with a hole
    ],
)
def test_arguments_that_differ(orbax: bool, tmp_path: Path, other: dict[str, Any], found: list[str]) -> None:
    """All processes fail within the bound and name the process and the difference; nothing is saved."""
    other = {"orbax": not orbax} if "orbax" in other else other
    orbax = orbax or "compression" in other  # has no effect on msgpack
    for outcome in team_of(2).run(jobs.save_with, str(tmp_path), orbax, [SAME, other], 2, timeout=20):
        assert outcome.kinds[0] == "MultiprocessSaveError"
        assert "process 1 saves" in outcome.error
        assert all(text in outcome.error for text in found), outcome.error
        assert outcome.seconds < 8
    assert jobs.names(str(tmp_path)) == []
    team_of(2).call(jobs.save_with, str(tmp_path), orbax, [SAME, SAME])
    assert team_of(2).call(jobs.restore_small, str(tmp_path)) == [5, 5]


def test_threads_save_at_once(orbax: bool, tmp_path: Path) -> None:
    """Saves to three prefixes, which come in another order in each process, do not take each other for a mistake."""
    for step in range(3):
        team_of(2).call(jobs.save_in_threads, str(tmp_path), orbax, step)
    assert [checkpoints.available_steps(tmp_path, prefix) for prefix in ("a_", "b_", "c_")] == [[2]] * 3
