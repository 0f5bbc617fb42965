"""A process is killed in the middle of a save; ``python -m tests.multiprocess.kills`` does it more often."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.multiprocess import kills


@pytest.mark.parametrize("trials", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_kill_9_of_one_process(orbax: bool, tmp_path: Path, trials: int) -> None:
    """The others end within the bound and name it; the step before restores; the next save works."""
    kills.prepare(str(tmp_path), orbax)
    chance = random.Random(orbax)
    for _ in range(trials):
        kills.trial(str(tmp_path), orbax, chance, quick=True)
