"""How time grows with the number of leaves and with bytes, ours and Flax's, from tiny trees to large ones."""

import gc
import itertools
import math
import os
import random
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks.report import Table
from tests.benchmarks.series import Entry
from tests.benchmarks.systems import FLAX, OURS, RESTORE, SAVE, timed
from tests.benchmarks.workloads import Tree, leaf_shapes

LEAVES, BYTES = "leaves", "bytes"
GOAL = 1.3
_COUNTS = (10, 100, 1000, 10_000, 50_000)
_SIZES = (10**6, 10**7, 10**8, 10**9, 4 * 10**9)
_QUICK: dict[str, tuple[int, ...]] = {LEAVES: (10, 100), BYTES: (10**4, 10**5)}
_FEW = 8  # leaves of the trees that grow in bytes
# Flax makes two more copies of what it saves, which is too much memory for the largest tree.
_MOST_FOR_FLAX = 10**9
# What takes less than this many times the smallest tree's time is mostly the constant cost of one checkpoint.
_CONSTANT = 2.0


def measure(rounds: int, workdir: str, say: Callable[[str], None], *, quick: bool) -> list[Entry]:
    """Times saves and restores into numpy targets; large trees get fewer rounds.

    Args:
        rounds: of the trees below 1 GB.
        workdir: where the fresh directories go.
        say: told about progress.
        quick: tiny trees only.

    Returns:
        Entries of by (``leaves`` or ``bytes``), at (how many), operation, system, seconds (of each round).

    Raises:
        AssertionError: something came back otherwise than it was saved.
    """
    sizes = _QUICK if quick else {LEAVES: _COUNTS, BYTES: _SIZES}
    _point(LEAVES, 10, 1, workdir)  # what is loaded at the first call
    found = []
    for by, points in sizes.items():
        for at in points:
            count = min(rounds, {10**9: 3, 4 * 10**9: 2}.get(at, rounds))
            say(f"growth by {by}: {at:,}, {count} rounds")
            for (operation, system), seconds in _point(by, at, count, workdir).items():
                series = [round(one, 6) for one in seconds]
                found.append({"by": by, "at": at, "operation": operation, "system": system, "seconds": series})
    return found


def table(entries: list[Entry]) -> Table:
    """A row for each line of the charts, judged by its worst step.

    The slope of a step is log(time ratio) / log(size ratio), by the least times, because with few rounds everything
    else on the machine only adds: 1 is linear. The factor is by how much the
    time of one leaf, or of one byte, grew in the step. The goal is that no factor is above 1.3, which is more than
    that no slope is: 13 times the time for 10 times the leaves is a slope of 1.11. Steps whose end takes less than
    twice the time of the smallest tree are start-up and do not count.
    """
    columns = ("what", "least s, smallest to largest", "steepest slope", "cost of one grew by", "goal", "met")
    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for entry in entries:
        key = (entry["by"], entry["operation"], entry["system"])
        lines.setdefault(key, []).append((entry["at"], min(entry["seconds"])))
    ours = {system.name for system in OURS}
    rows = []
    for (by, operation, system), points in lines.items():
        slope, factor = worst_step(points)
        seconds = ", ".join(f"{second:.2g}" for _, second in sorted(points))
        shown = ("only start-up", "") if factor is None else (f"{slope:.2f}", f"{factor:.2f}x")
        verdict = (f"≤ {GOAL}x", "" if factor is None else "yes" if factor <= GOAL else "no")
        rows.append((f"{operation} by {by}, {system}", seconds, *shown, *(verdict if system in ours else ("", ""))))
    return Table(f"Growth: {_ranges(entries)}", columns, rows)


def worst_step(points: list[tuple[int, float]]) -> tuple[float, float] | tuple[None, None]:
    """The steepest slope and the greatest factor (see `table`) between neighbours of (size, seconds).

    Returns:
        Two Nones where everything is start-up.
    """
    ordered = sorted(points)
    least = min(seconds for _, seconds in ordered)
    steps = [
        (math.log(after / before) / math.log(larger / smaller), after / before * smaller / larger)
        for (smaller, before), (larger, after) in itertools.pairwise(ordered)
        if after >= _CONSTANT * least
    ]
    return (max(slope for slope, _ in steps), max(factor for _, factor in steps)) if steps else (None, None)


def _ranges(entries: list[Entry]) -> str:
    texts = []
    for by in (LEAVES, BYTES):
        points = sorted({entry["at"] for entry in entries if entry["by"] == by})
        texts.append(f"{', '.join(f'{point:,}' for point in points)} {by}")
    return "; ".join(texts)


def _point(by: str, at: int, rounds: int, workdir: str) -> dict[tuple[str, str], list[float]]:
    shapes = leaf_shapes(at) if by == LEAVES else {f"leaf_{n}": (at // 4 // _FEW,) for n in range(_FEW)}
    tree, target = _tree(shapes, filled=True), _tree(shapes, filled=False)
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        systems = [*OURS, FLAX[0]] if at <= _MOST_FOR_FLAX else list(OURS)
        random.Random(number).shuffle(systems)
        for system in systems:
            save, restore = _round(system, tree, target, workdir, 4 * sum(map(math.prod, shapes.values())))
            seconds.setdefault((SAVE, system.name), []).append(save)
            seconds.setdefault((RESTORE, system.name), []).append(restore)
    return seconds


def _round(system: Any, tree: Tree, target: Tree, workdir: str, nbytes: int) -> tuple[float, float]:
    restored: list[Any] = []
    with tempfile.TemporaryDirectory(dir=workdir) as directory:
        _settle(nbytes)
        save = timed(lambda: system.save(directory, tree))
        _settle(nbytes)
        restore = timed(lambda: restored.append(system.restore(directory, target)))
        _compare(restored.pop(), tree)
    return save, restore


def _tree(shapes: dict[str, tuple[int, ...]], *, filled: bool) -> Tree:
    """Numbers that differ from leaf to leaf; random ones would take longer to make than to save."""
    tree: Tree = {}
    for number, (path, shape) in enumerate(shapes.items()):
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = np.zeros(shape, np.float32)
        if filled:
            node[last] += np.arange(number, number + shape[0], dtype=np.float32)
    return tree


def _settle(nbytes: int) -> None:
    gc.collect()
    os.sync()
    # A virtual machine gets memory from its host when it first touches it, which would be up to whoever is first.
    np.ones(min(2 * nbytes, 2**32), np.uint8)


def _compare(restored: Tree, saved: Tree) -> None:
    assert restored.keys() == saved.keys(), "the leaves have other names"
    for name, leaf in saved.items():
        if isinstance(leaf, dict):
            _compare(restored[name], leaf)
        else:
            same = leaf.dtype == restored[name].dtype and np.array_equal(leaf, restored[name])
            assert same, f"{name} differs from what was saved"
