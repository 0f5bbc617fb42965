"""The clock jumps between saves: steps are ordered by their numbers, never by time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flax_ckpt_compat import checkpoints
from tests.support.saves import names, tree

YEARS = 10 * 365 * 24 * 3600.0


def test_the_clock_jumps_between_saves(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back before the epoch, and decades ahead: retention and the latest step are those of a steady clock."""
    now = time.time()
    for step, jump in enumerate((0.0, -6 * YEARS, YEARS, 0.0, 6 * YEARS, -YEARS)):
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda jump=jump: now + jump)
            patched.setattr(time, "time_ns", lambda jump=jump: int((now + jump) * 1e9))
            checkpoints.save_checkpoint(tmp_path, tree(step), step, keep=2)
            assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == step
    assert names(tmp_path) == ["checkpoint_4", "checkpoint_5"]


@pytest.mark.parametrize("jump", [-3600.0, 2 * 24 * 3600.0])
@pytest.mark.parametrize("background", [False, True])
def test_the_clock_jumps_in_the_middle_of_a_save(
    flag: bool, jump: float, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the commit and retention: an hour back, and further than a dead writer's temporaries stay."""
    now, manager = time.time(), checkpoints.AsyncManager() if background else None

    def jumped() -> float:
        return now + jump * (tmp_path / "checkpoint_3").exists()

    monkeypatch.setattr(time, "time", jumped)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumped() * 1e9))
    for step in range(1, 6):
        live = tmp_path / f".checkpoint_9.{'0' * 12}-1-1-0new.orbax-checkpoint-tmp_gda"  # of another machine
        live.touch()
        checkpoints.save_checkpoint(tmp_path, tree(step), step, keep=2, async_manager=manager)
        if manager:
            manager.wait_previous_save()
        assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == step
    assert names(tmp_path) == [live.name, "checkpoint_4", "checkpoint_5"]
