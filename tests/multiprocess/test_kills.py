"""A process is killed in the middle of a save; ``python -m tests.multiprocess.kills`` does it more often."""

from __future__ import annotations

import random
from pathlib import Path

from tests.multiprocess import kills


def test_kill_9_of_one_process(orbax: bool, tmp_path: Path) -> None:
    """The others end within the bound and name it; the step before restores; the next save works."""
    kills.prepare(str(tmp_path), orbax)
    chance = random.Random(orbax)
    for _ in range(2):
        kills.trial(str(tmp_path), orbax, chance, quick=True)
