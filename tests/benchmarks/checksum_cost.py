"""What checksums cost: saves that record them and restores that verify them, beside those without."""

import dataclasses
import gc
import os
import random
import tempfile
from typing import Any

from tests.benchmarks.report import Table
from tests.benchmarks.series import Series
from tests.benchmarks.systems import OURS, RESTORE, SAVE, Checkpoints, timed
from tests.benchmarks.workloads import Workload

SAVE_GOAL, RESTORE_GOAL = 1.10, 1.15
_SETTINGS = ("off", "verify")
_REPEATS = 4  # The ratios are close to one: each round of the benchmark is several of these.


def table(workload: Workload, rounds: int, workdir: str) -> Table:
    """Return how many times as long saves and restores take with checksums, each compared within its round."""
    rows = []
    tree, target = workload.tree(), workload.target()
    for system in OURS:
        series = Series()
        for number in range(rounds * _REPEATS + 1):
            for setting in random.Random(number).sample(_SETTINGS, 2):
                one = dataclasses.replace(system, name=setting, settings={"checksums": setting})
                # The first round loads what is loaded once.
                _run(one, tree, target, workdir, series if number else Series())
        for operation, goal in ((SAVE, SAVE_GOAL), (RESTORE, RESTORE_GOAL)):
            off, on = (series.seconds[setting, operation] for setting in _SETTINGS)
            ratios = [one / beside for one, beside in zip(on, off, strict=True)]
            medians = [f"{series.median(setting, operation):.3f}" for setting in _SETTINGS]
            ratio = series.ratio(operation, "verify", "off") or 0.0
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            verdict = "yes" if ratio <= goal else "no"
            rows.append((f"{operation}, {system.name}", *medians, f"{ratio:.2f}", spread, f"≤ {goal:g}", verdict))
    columns = ("what", "off, median s", "on, median s", "on ÷ off", "min to max", "goal", "met")
    return Table(f"What checksums cost: {workload.summary}", columns, rows)


def _run(system: Checkpoints, tree: Any, target: Any, workdir: str, series: Series) -> None:
    """Saves and restores once; the file is in the page cache."""
    gc.collect()
    os.sync()
    with tempfile.TemporaryDirectory(dir=workdir) as directory:
        series.add(system.name, SAVE, timed(lambda: system.save(directory, tree)))
        series.add(system.name, RESTORE, timed(lambda: system.restore(directory, target)))
