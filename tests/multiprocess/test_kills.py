"""A process is killed in the middle of a save."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.multiprocess import kills


@pytest.mark.slow
@pytest.mark.parametrize(
    ("orbax", "trials"),
    [(True, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((False, 1), (True, 3), (False, 3)))],
    indirect=["orbax"],
)
def test_kill_9_of_one_process(orbax: bool, tmp_path: Path, trials: int) -> None:
    """The others end within the bound and name it; the step before restores; the next save works."""
    kills.prepare(str(tmp_path), orbax)
    chance = random.Random(orbax)
    for _ in range(trials):
        kills.trial(str(tmp_path), orbax, chance)
