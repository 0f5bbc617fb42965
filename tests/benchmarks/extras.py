"""Costs apart from the disk: importing the library, opening and listing, and pairing a target with a checkpoint."""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np

import flax_ckpt_compat
from flax_ckpt_compat import config
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._restore.match import plan_tree
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._trees import state_dict
from tests.benchmarks.report import Table
from tests.benchmarks.systems import OURS, timed
from tests.benchmarks.workloads import Workload, leaf_shapes
from tests.support.handles import handles

IMPORT_GOAL, OPEN_GOAL, LIST_GOAL = 0.05, 0.15, 0.3  # seconds
ROOT = Path(__file__).parents[2]
_MODULES = ("flax_ckpt_compat", "flax_ckpt_compat.checkpoints", "flax.training.checkpoints")


def import_table(rounds: int) -> Table:
    """Seconds that an import takes in a fresh interpreter, above those of jax and flax."""
    rows = []
    for module in _MODULES:
        # jax and flax are what any program that calls these functions has loaded anyway.
        already = "" if module == "flax_ckpt_compat" else "import jax, flax; "
        code = f"import time; {already}start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
        seconds = [float(_output(code)) for _ in range(rounds)]
        note = "nothing loaded before" if not already else "after jax and flax"
        goal = None if already else IMPORT_GOAL
        rows.append(_judged(f"import {module} ({note})", seconds, goal))
    return Table("Import time", _JUDGED, rows)


def opening_table(rounds: int, workdir: str, *, quick: bool) -> Table:
    """Seconds to open a tree of 5,000 leaves without data, and to list 100 checkpoints from the shell."""
    leaves, checkpoints = (40, 3) if quick else (5000, 100)
    many = Workload("many", "small", "Small leaves", leaf_shapes(leaves), on_device=False).tree()
    rows = []
    for system in OURS:
        with tempfile.TemporaryDirectory(dir=workdir) as directory:
            system.save(directory, many)
            seconds = [timed(lambda directory=directory: _open(directory)) for _ in range(rounds + 1)][1:]
        rows.append(_judged(f"open_checkpoint, {leaves} leaves, {system.name}", seconds, OPEN_GOAL))
    for system in OURS:
        with tempfile.TemporaryDirectory(dir=workdir) as directory:
            system.save(directory, {"a": np.ones(8)})
            _multiply(os.path.join(directory, "checkpoint_0"), checkpoints)
            seconds = [timed(lambda directory=directory: _list(directory)) for _ in range(rounds + 1)][1:]
        rows.append(_judged(f"flax-ckpt ls, {checkpoints} checkpoints, {system.name}", seconds, LIST_GOAL))
    return Table("Opening and listing, the files in the page cache", _JUDGED, rows)


_JUDGED = ("what", "median s", "max s", "goal", "met")


def _judged(what: str, seconds: list[float], goal: float | None) -> tuple[str, ...]:
    median = statistics.median(seconds)
    verdict = ("", "") if goal is None else (f"≤ {goal:g} s", "yes" if median <= goal else "no")
    return (what, f"{median:.4f}", f"{max(seconds):.4f}", *verdict)


def _open(directory: str) -> None:
    with flax_ckpt_compat.open_checkpoint(directory):
        pass


def _multiply(checkpoint: str, count: int) -> None:
    """Makes more steps of one by copying; saves would take longer than all the rest."""
    stem = checkpoint.removesuffix("0")
    copy = shutil.copytree if os.path.isdir(checkpoint) else shutil.copyfile
    for step in range(1, count):
        copy(checkpoint, f"{stem}{step}")


def _list(directory: str) -> None:
    """Lists from a process of its own, as a shell does; a wheel's script differs by the start of its launcher."""
    subprocess.run(
        [sys.executable, "-m", "flax_ckpt_compat", "ls", directory], cwd=ROOT, stdout=subprocess.DEVNULL, check=True
    )


def matching_table(counts: tuple[int, ...], rounds: int) -> Table:
    """Seconds to describe a tree and to match it, by number of leaves."""
    rows = []
    reader: Any = types.SimpleNamespace(
        format=Format.MSGPACK, location=location_of("/p"), places_on_device=False, keeps_lists=True
    )
    options = RestoreOptions(config.current())
    for count in counts:
        leaf = np.zeros(1, np.float32)
        tree = {f"part_{n // 100}": {} for n in range(0, count, 100)}
        for n in range(count):
            tree[f"part_{n // 100}"][f"leaf_{n % 100}"] = leaf
        stored, described = handles(tree), state_dict.TargetTree(tree)
        times = {
            "describe": lambda tree=tree: state_dict.describe(tree),
            "match": lambda stored=stored, one=described: plan_tree(reader, stored, one, options, reader.location),
            "rebuild": lambda tree=tree: state_dict.TargetTree(tree).rebuild(tree),
        }
        for name, call in times.items():
            seconds = statistics.median(timed(call) for _ in range(rounds))
            rows.append((f"{name}, {count} leaves", f"{seconds:.4f}", f"{1e6 * seconds / count:.2f}"))
    return Table("Work per leaf, without any file", ("what", "median s", "µs per leaf"), rows)


def _output(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
