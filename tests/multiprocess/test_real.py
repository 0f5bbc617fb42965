"""Real Flax and real Orbax on the other side, in two processes, and objects of theirs that callers pass in."""

from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess import jobs, real_jobs
from tests.support.team import team_of


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), [("ours", "flax"), ("flax", "ours")])
def test_real_flax_with_the_flag_on_and_off(orbax: bool, tmp_path: Path, writer: str, reader: str) -> None:
    """Each restores the other's save bit for bit, onto the same mesh and another one."""
    team = team_of(2)
    names = team.call(real_jobs.save, str(tmp_path), orbax, "plain", writer)
    assert names[0] == (["checkpoint_1"] if orbax else ["checkpoint_1", "checkpoint_1_gda"])
    for onto in ("plain", "turned"):
        team.call(real_jobs.restore, str(tmp_path), orbax, onto, reader, 1)


def test_real_orbax_without_flax(tmp_path: Path) -> None:
    """Ours is read by real Orbax in two processes, and its by ours."""
    team = team_of(2)
    team.call(real_jobs.save, str(tmp_path / "ours"), True, "plain", "ours")
    team.call(real_jobs.restore, str(tmp_path / "ours"), True, "turned", "orbax")
    team.call(real_jobs.save_with_orbax, str(tmp_path / "orbax"), "plain")
    team.call(real_jobs.restore, str(tmp_path / "orbax"), True, "turned", "ours")


@pytest.mark.slow
@pytest.mark.parametrize("given", ["gda", "async", "both", "checkpointer", "async checkpointer"])
def test_given_managers_and_checkpointers(orbax: bool, tmp_path: Path, given: str) -> None:
    """They are used and waited for: every save commits, in order, and retention follows."""
    format_given = orbax or "checkpointer" in given
    wanted = jobs.steps_and_arrays(format_given, 1, 2)
    assert team_of(2).call(real_jobs.save_given, str(tmp_path), orbax, given) == [wanted, wanted]


@pytest.mark.parametrize(
    ("save", "kind", "told"),
    [
        (real_jobs.refuse_given, "InvalidCheckpointError", "already exists"),
        (real_jobs.fail_to_publish, "StorageError", "no renaming in this test"),
    ],
)
def test_a_given_checkpointer_whose_save_fails(tmp_path: Path, save: Any, kind: str, told: str) -> None:
    """Where a step exists, or is not published, both processes raise what process 0 does; the version before stays."""
    team = team_of(2)
    team.call(jobs.save_small, str(tmp_path), True, 2)
    for outcome in team.run(save, str(tmp_path)):
        assert outcome.kinds[0] == kind and told in outcome.error
    assert team.call(jobs.restore_small, str(tmp_path)) == [2, 2]
