"""Background saves by several processes: one commit, in order, and no failure is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess import async_jobs, jobs
from tests.support.team import team_of


def test_saves_in_the_background(orbax: bool, tmp_path: Path) -> None:
    """Values are those of the call, whatever is donated after; every step is there once, and in order."""
    for committed in team_of(2).call(async_jobs.save_many, str(tmp_path), orbax, 5):
        assert committed == [0, 1, 2, 3, 4]
    assert team_of(2).call(jobs.restore_small, str(tmp_path), 3) == [3, 3]
    assert len(jobs.names(str(tmp_path))) == (3 if orbax else 6)


def test_the_commit_waits_for_all(orbax: bool, tmp_path: Path) -> None:
    """As long as one process has not written its part, there is no checkpoint; then there is one, whole."""
    assert team_of(2).call(async_jobs.save_slowly, str(tmp_path), orbax) == [[], []]
    assert team_of(2).call(jobs.restore_small, str(tmp_path)) == [1, 1]


@pytest.mark.slow
def test_look_ups_after_a_background_save_agree(orbax: bool, tmp_path: Path) -> None:
    """Each process waits for its own part, so that none looks before process 0 has published; and for nobody else."""
    team = team_of(2)
    for step, look in enumerate(async_jobs.LOOKS):
        assert team.call(async_jobs.look_at_once, str(tmp_path), orbax, step, look) == [step, step], look
    assert team.call(async_jobs.look_while_the_other_does_not, str(tmp_path), orbax, 99) == [99, None]


def test_a_failure_is_raised_in_all_processes_at_the_next_call(orbax: bool, tmp_path: Path) -> None:
    """One process fails in the background: the next save, wait and restore tell so in each; then all goes on."""
    team = team_of(2)
    team.call(jobs.save_small, str(tmp_path), orbax, 1)
    for at in ("save", "wait", "restore"):
        for index, (kinds, error) in enumerate(team.call(async_jobs.fail, str(tmp_path), orbax, at)):
            assert "CheckpointError" in kinds, kinds
            assert "no space in this test" in error
            assert index == 1 or "process 1 failed at 'commit'" in error
    assert team.call(jobs.restore_small, str(tmp_path)) == [1, 1]
    assert len(jobs.names(str(tmp_path))) == (1 if orbax else 2)
    team.call(jobs.save_small, str(tmp_path), orbax, 2)


def test_a_failure_in_one_process_only_is_told_to_all_at_the_next_save(orbax: bool, tmp_path: Path) -> None:
    """A failure of which only one process knows fails the next save of all, instead of leaving the others waiting."""
    for index, (kinds, error) in enumerate(team_of(2).call(async_jobs.fail_unnoticed, str(tmp_path), orbax)):
        assert "trouble of process 1 alone" in error
        assert (kinds[0] == "StorageError") == (index == 1)
    team_of(2).call(jobs.save_small, str(tmp_path), orbax, 2)
