"""What a failed save by several processes leaves behind, and trees that differ between the processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess import jobs, late_jobs
from tests.support.peers import needs_arrays_without_shards
from tests.support.team import team_of

# Processes wait for each other in the same way in both formats.
IN_ONE_FORMAT = pytest.mark.parametrize("orbax", [True, pytest.param(False, marks=pytest.mark.slow)], indirect=True)


@pytest.mark.slow
@IN_ONE_FORMAT
def test_a_process_that_wakes_after_the_others_gave_up(orbax: bool, tmp_path: Path) -> None:
    """It writes its part, finds that nobody waits for it, and removes what it made anew."""
    team = team_of(2)
    team.call(jobs.save_small, str(tmp_path), orbax, 1)
    before = jobs.names(str(tmp_path))
    for error in team.call(late_jobs.save_late, str(tmp_path), orbax, 2):
        assert error.startswith("ProcessTimeoutError: "), error
        assert "process 1 of 2 did not reach barrier 'commit'" in error
    assert jobs.names(str(tmp_path)) == before
    team.call(jobs.save_small, str(tmp_path), orbax, 2)


def test_no_descriptors_in_process_0(orbax: bool, tmp_path: Path) -> None:
    """What could not be removed then is removed by the next save of the same processes."""
    team = team_of(2)
    for error in team.call(late_jobs.save_without_descriptors, str(tmp_path), orbax, 1):
        assert "Too many open files" in error
    team.call(jobs.save_small, str(tmp_path), orbax, 2)
    assert jobs.names(str(tmp_path)) == (["checkpoint_2"] if orbax else jobs.both(2))


@pytest.mark.slow
@IN_ONE_FORMAT
def test_an_interrupted_wait_leaves_no_registration(orbax: bool, tmp_path: Path) -> None:
    """The next save of the same step, and of another one, finds all processes and accuses none."""
    team = team_of(2)
    for step in (1, 2):
        outcome = team.run(late_jobs.save_interrupted, str(tmp_path), orbax, 1, only=[1], timeout=20)[1]
        assert outcome.value == "KeyboardInterrupt: "
        team.call(jobs.save_small, str(tmp_path), orbax, step, None, 3)
    assert team.call(jobs.restore_small, str(tmp_path)) == [2, 2]


def test_a_manager_that_takes_no_task(orbax: bool, tmp_path: Path) -> None:
    """The others raise the reason at once, and nothing is left."""
    team = team_of(2)
    errors = team.run(late_jobs.save_without_a_manager, str(tmp_path), orbax, 1, timeout=15)
    assert [outcome.value.partition(":")[0] for outcome in errors] == ["MultiprocessSaveError", "OSError"], errors
    assert all("no tasks in this test" in outcome.value for outcome in errors), errors
    assert jobs.names(str(tmp_path)) == []


def test_a_sharding_that_differs_in_one_leaf(orbax: bool, tmp_path: Path) -> None:
    """The error names the leaf, before anything is written."""
    for error in team_of(2).call(late_jobs.save_split_otherwise, str(tmp_path), orbax):
        assert error.startswith("MultiprocessSaveError: "), error
        assert "process 1 saves" in error
        assert "shardings" in error
        assert "look at odd;" in error
    assert jobs.names(str(tmp_path)) == []


@pytest.mark.slow
def test_leaves_that_process_0_does_not_hold(orbax: bool, tmp_path: Path) -> None:
    """They are not saved, as in Flax, which process 0 says once; a process may hold fewer."""
    warned, *others = team_of(3).call(late_jobs.save_own_keys, str(tmp_path), orbax, 3)
    assert others == [[], []]
    assert len(warned) == 1, warned
    assert "are not saved (4 leaves, and 4 in process 0)" in warned[0]


@needs_arrays_without_shards
@pytest.mark.parametrize("background", [False, True])
def test_sub_meshes_that_leave_out_a_process(orbax: bool, tmp_path: Path, background: bool) -> None:
    """All processes save and restore arrays of which some see nothing; real Orbax reads them, too."""
    team = team_of(3)
    team.call(late_jobs.save_on_sub_meshes, str(tmp_path), orbax, background)
    for abstract in (False, True):
        team.call(late_jobs.restore_on_sub_meshes, str(tmp_path), abstract)
    if orbax and not background:
        late_jobs.read_with_orbax(str(tmp_path / "checkpoint_1"))


@needs_arrays_without_shards
@pytest.mark.parametrize("writer", ["ours", "flax"])
def test_sub_meshes_with_real_flax(tmp_path: Path, writer: str) -> None:
    """Real Flax restores ours in all processes, and ours restore its."""
    team_of(3).call(late_jobs.sub_meshes_with_flax, str(tmp_path), writer)


@needs_arrays_without_shards
def test_any_leaf_is_restored_onto_a_sub_mesh(tmp_path: Path) -> None:
    """Typed keys, what a transform computed, and plain arrays; what does not fit is the same error in all processes."""
    team_of(3).call(late_jobs.restore_other_kinds, str(tmp_path))
