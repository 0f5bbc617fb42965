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
