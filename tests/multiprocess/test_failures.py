"""Processes that stay away, fail, fill the disk or die: the others raise the reason within the bound, and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from flax_ckpt_compat import checkpoints
from tests.multiprocess import jobs, rule_jobs
from tests.support.team import team_of

WAIT = 1.0
# Looks are at most half a second apart, and the machine may be busy.
SLACK = 5.0
# Processes wait for each other in the same way in both formats.
in_one_format = pytest.mark.parametrize(
    "orbax", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["msgpack", "orbax"]
)


@in_one_format
@pytest.mark.parametrize(
    ("count", "absent"), [(2, [1]), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, [0]), (4, [1, 3])))]
)
def test_processes_that_do_not_come(orbax: bool, tmp_path: Path, count: int, absent: list[int]) -> None:
    """The others fail within the bound, naming missing processes and barrier; saving the step again works."""
    team = team_of(count)
    team.call(jobs.save_small, str(tmp_path), orbax, 1)
    here = [index for index in range(count) if index not in absent]
    outcomes = team.run(jobs.save_small, str(tmp_path), orbax, 2, None, WAIT, only=here, timeout=20)
    for index in here:
        assert outcomes[index].kinds[:2] == ("ProcessTimeoutError", "MultiprocessSaveError")
        assert f"process {', '.join(map(str, absent))} of {count} did not reach" in outcomes[index].error
        assert "'begin'" in outcomes[index].error
        assert "coordination_timeout" in outcomes[index].error
        assert outcomes[index].seconds < 2 * WAIT + SLACK
    team.call(jobs.save_small, str(tmp_path), orbax, 2)
    assert team.call(jobs.restore_small, str(tmp_path)) == [2] * count


@pytest.mark.slow
@in_one_format
def test_a_late_process_raises_the_same_error(orbax: bool, tmp_path: Path) -> None:
    """A process that comes when the others have given up fails soon, with the same reason."""
    team = team_of(4)
    waited = team.run(jobs.save_small, str(tmp_path), orbax, 1, None, WAIT, only=[0, 1, 3], timeout=20)
    late = team.run(jobs.save_small, str(tmp_path), orbax, 1, None, WAIT, only=[2], timeout=20)[2]
    assert late.kinds[0] == "ProcessTimeoutError"
    assert late.error == waited[0].error
    assert late.seconds < WAIT + SLACK
    team.call(jobs.save_small, str(tmp_path), orbax, 1)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_leaf_that_one_process_cannot_save(orbax: bool, tmp_path: Path, failing: int) -> None:
    """That process gets the error of a save of its own; all others get it too, or one that names it; at once."""
    changes = [{"more": ["unknown"]} if index == failing else {"more": ["plain"]} for index in range(4)]
    for index, outcome in enumerate(
        team_of(4).run(rule_jobs.save_with, str(tmp_path), orbax, changes, 30.0, timeout=25)
    ):
        own = index == failing or failing == 0
        assert outcome.kinds[0] == ("UnsupportedLeafError" if own else "MultiprocessSaveError"), outcome
        assert "unknown" in outcome.error
        assert own or "process 1 failed" in outcome.error
        assert outcome.seconds < SLACK
    assert jobs.names(str(tmp_path)) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_without_a_place_for_its_part(orbax: bool, tmp_path: Path, failing: int) -> None:
    """It fails before the first barrier; the others raise its error at once, and do not wait for it."""
    for outcome in team_of(2).run(rule_jobs.save_without_a_temporary, str(tmp_path), orbax, failing, timeout=25):
        assert outcome.kinds and "not this user's own" in outcome.error, outcome
        assert outcome.seconds < SLACK


@pytest.mark.slow
@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_in_the_middle(orbax: bool, tmp_path: Path, full: int) -> None:
    """Nobody says that it saved; all say why; the last step stays, nothing is left over, and the next save works."""
    team = team_of(2)
    team.call(jobs.save_small, str(tmp_path), orbax, 1)
    before = jobs.names(str(tmp_path))
    for outcome in team.run(rule_jobs.save_full_disk, str(tmp_path), orbax, full, 2, timeout=30):
        assert "CheckpointError" in outcome.kinds, outcome
        assert "File too large" in outcome.error, outcome
        assert outcome.seconds < 10
    assert jobs.names(str(tmp_path)) == before
    assert team.call(jobs.restore_small, str(tmp_path)) == [1, 1]
    team.call(rule_jobs.save_full_disk, str(tmp_path), orbax, -1, 2)
    team.call(jobs.restore_large, str(tmp_path))


@in_one_format
@pytest.mark.parametrize("stage", [pytest.param("begin", marks=pytest.mark.slow), "commit"])
def test_one_fails_while_another_hangs(orbax: bool, tmp_path: Path, stage: str) -> None:
    """Nobody waits as long for a process that hangs once another has failed: the save fails anyway."""
    outcomes = team_of(4).run(rule_jobs.save_while_another_hangs, str(tmp_path), orbax, stage, 12.0, timeout=60)
    for index in (0, 1, 2):
        assert "the disk broke" in outcomes[index].error
        assert outcomes[index].seconds < 0.5 + SLACK
    assert not checkpoints.available_steps(tmp_path)
