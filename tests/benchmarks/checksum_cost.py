"""What checksums cost: saves that record them and restores that verify them, beside those without."""

import dataclasses
import gc
import os
import random
import statistics
import tempfile
from typing import Any

from tests.benchmarks.report import Table
from tests.benchmarks.systems import OURS, RESTORE, SAVE, Checkpoints, timed
from tests.benchmarks.workloads import Workload

_Seconds = dict[tuple[str, str], list[float]]  # by operation and setting, one for each round
SAVE_GOAL, RESTORE_GOAL = 1.10, 1.15
_SETTINGS = ("off", "verify")
_REPEATS = 4  # The ratios are close to one: each round of the benchmark is several of these.


def table(workload: Workload, rounds: int, workdir: str) -> Table:
    """Return how many times as long saves and restores take with checksums, each compared within its round."""
    rows = []
    tree, target = workload.tree(), workload.target()
    for system in OURS:
        seconds: _Seconds = {}
        for number in range(rounds * _REPEATS + 1):
            for setting in random.Random(number).sample(_SETTINGS, 2):
                _run(dataclasses.replace(system, settings={"checksums": setting}), tree, target, workdir, seconds)
        for operation, goal in ((SAVE, SAVE_GOAL), (RESTORE, RESTORE_GOAL)):
            # The first round loads what is loaded once.
            off, on = (seconds[operation, setting][1:] for setting in _SETTINGS)
            ratios = [one / beside for one, beside in zip(on, off, strict=True)]
            medians = [f"{statistics.median(one):.3f}" for one in (off, on)]
            ratio = statistics.median(ratios)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            verdict = "yes" if ratio <= goal else "no"
            rows.append((f"{operation}, {system.name}", *medians, f"{ratio:.2f}", spread, f"≤ {goal:g}", verdict))
    columns = ("what", "off, median s", "on, median s", "on ÷ off", "min to max", "goal", "met")
    return Table(f"What checksums cost: {workload.summary}", columns, rows)


def _run(
    system: Checkpoints, tree: Any, target: Any, workdir: str, seconds: dict[tuple[str, str], list[float]]
) -> None:
    """Saves and restores once; the file is in the page cache."""
    gc.collect()
    os.sync()
    setting = system.settings["checksums"]
    with tempfile.TemporaryDirectory(dir=workdir) as directory:
        seconds.setdefault((SAVE, setting), []).append(timed(lambda: system.save(directory, tree)))
        seconds.setdefault((RESTORE, setting), []).append(timed(lambda: system.restore(directory, target)))
