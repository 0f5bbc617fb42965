"""The timed rounds: every system in turn, each save in a fresh directory, every result compared."""

import gc
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tests.benchmarks.disk import unsynced
from tests.benchmarks.systems import (
    BLOCKED,
    COPY,
    RAW,
    RESTORE,
    RESTORE_NONE,
    SAVE,
    SYSTEMS,
    Checkpoints,
    Raw,
    timed,
)
from tests.benchmarks.workloads import Tree, Workload, assert_same

# One save of the small leaves takes it ten seconds.
SLOW_ROUNDS = 3


class Series:
    """Everything measured on one workload.

    Attributes:
        seconds: (system, operation) → seconds of each round.
        unsynced: system → the most bytes that were not on the disk when a save returned, or None if unknown.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.unsynced: dict[str, int | None] = {}

    def add(self, system: str, operation: str, seconds: float) -> None:
        """Notes one round."""
        self.seconds.setdefault((system, operation), []).append(seconds)

    def median(self, system: str, operation: str) -> float | None:
        """Median seconds, or None where it was not measured."""
        seconds = self.seconds.get((system, operation))
        return statistics.median(seconds) if seconds else None

    def raw(self, operation: str) -> float | None:
        """Median of the fastest raw system, or None where raw has no such operation."""
        medians = [self.median(system.name, operation) for system in RAW]
        return min((median for median in medians if median is not None), default=None)


def run(workload: Workload, rounds: int, workdir: str, say: Callable[[str], None]) -> Series:
    """Measures one workload.

    Args:
        workload: the tree.
        rounds: how many; Flax on Orbax runs fewer on small leaves.
        workdir: where the fresh directories go.
        say: told about progress.

    Returns:
        All figures.

    Raises:
        AssertionError: something came back otherwise than it was saved.
    """
    series, tree, target = Series(), workload.tree(), workload.target()
    data = memoryview(np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)]).view(np.uint8))
    _warm_up(workdir)
    for number in range(rounds):
        say(f"{workload.name}: round {number + 1} of {rounds}")
        for system in _in_turn(workload, number):
            with _settled_directory(workdir, workload.nbytes) as directory:
                if isinstance(system, Raw):
                    _raw_round(series, system, data, directory)
                else:
                    _round(series, system, tree, target, directory)
        for system in _in_turn(workload, number) if workload.kind == "large" else ():
            if isinstance(system, Checkpoints):
                with _settled_directory(workdir, workload.nbytes) as directory:
                    _background_round(series, system, tree, target, directory)
    return series


def _warm_up(workdir: str) -> None:
    """Loads what each system loads at its first call, untimed."""
    tree = {"a": jax.numpy.arange(4.0), "b": np.arange(4.0)}
    for system in SYSTEMS:
        with tempfile.TemporaryDirectory(dir=workdir) as directory:
            system.save(directory, tree)
            system.restore(directory, tree)


def _in_turn(workload: Workload, number: int) -> Iterator[Checkpoints | Raw]:
    """All systems in an order of this round's own, so that nobody always follows the same one."""
    systems = [*SYSTEMS, *RAW]
    random.Random(number).shuffle(systems)
    for system in systems:
        slow = isinstance(system, Checkpoints) and system.orbax and not system.ours and workload.kind == "small"
        if not slow or number < SLOW_ROUNDS:
            yield system


def _settled_directory(workdir: str, nbytes: int) -> tempfile.TemporaryDirectory[str]:
    """A fresh directory, and the machine as every system finds it: no garbage, no unwritten pages, memory at hand."""
    gc.collect()
    os.sync()
    # A virtual machine gets memory from its host when it first touches it, which would be up to whoever comes first.
    np.ones(3 * nbytes, np.uint8)
    return tempfile.TemporaryDirectory(dir=workdir)


def _round(series: Series, system: Checkpoints, tree: Tree, target: Tree, directory: str) -> None:
    series.add(system.name, SAVE, timed(lambda: system.save(directory, tree)))
    _note_unsynced(series, system.name, directory)
    for operation, wanted in ((RESTORE, target), (RESTORE_NONE, None)):
        if wanted is None and system.orbax:
            continue
        assert_same(_timed_restore(series, system, operation, directory, wanted), tree, f"{system.name}, {operation}")


def _timed_restore(series: Series, system: Checkpoints, operation: str, directory: str, target: Tree | None) -> Any:
    restored: list[Any] = []
    series.add(system.name, operation, timed(lambda: restored.append(system.restore(directory, target))))
    return restored[0]


def _raw_round(series: Series, system: Raw, data: memoryview, directory: str) -> None:
    path = os.path.join(directory, "raw")
    series.add(system.name, SAVE, timed(lambda: system.save(path, data)))
    _note_unsynced(series, system.name, directory)
    restored: list[Any] = []
    series.add(system.name, RESTORE, timed(lambda: restored.append(system.restore(path))))
    assert np.array_equal(restored.pop(), data), f"{system.name}: other bytes"
    series.add(system.name, COPY, timed(lambda: restored.append(np.array(data))))


def _background_round(series: Series, system: Checkpoints, tree: Tree, target: Tree, directory: str) -> None:
    series.add(system.name, BLOCKED, system.save_in_background(directory, tree))
    assert_same(system.restore(directory, target), tree, f"{system.name}, {BLOCKED}")


def _note_unsynced(series: Series, system: str, directory: str) -> None:
    dirty, before = unsynced(directory), series.unsynced.get(system, 0)
    series.unsynced[system] = None if dirty is None or before is None else max(dirty, before)
