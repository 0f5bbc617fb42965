"""Costs apart from the disk: importing the library, and pairing a target with a checkpoint."""

import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from flax_ckpt_compat import matching, state
from tests.benchmarks.report import Table
from tests.benchmarks.systems import timed

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
        rows.append((f"import {module} ({note})", f"{statistics.median(seconds):.4f}", f"{max(seconds):.4f}"))
    return Table("Import time", ("what", "median s", "max s"), rows)


def matching_table(counts: tuple[int, ...], rounds: int) -> Table:
    """Seconds to describe a tree and to match it, by number of leaves."""
    rows = []
    for count in counts:
        leaf = np.zeros(1, np.float32)
        tree = {f"part_{n // 100}": {} for n in range(0, count, 100)}
        for n in range(count):
            tree[f"part_{n // 100}"][f"leaf_{n % 100}"] = leaf
        described = state.describe(tree)
        times = {
            "describe": lambda tree=tree: state.describe(tree),
            "match": lambda node=described: matching.match(
                node, node, lenient=False, takes_anything=lambda path: False
            ),
            "rebuild": lambda tree=tree: state.rebuild(tree, tree),
        }
        for name, call in times.items():
            seconds = statistics.median(timed(call) for _ in range(rounds))
            rows.append((f"{name}, {count} leaves", f"{seconds:.4f}", f"{1e6 * seconds / count:.2f}"))
    return Table("Work per leaf, without any file", ("what", "median s", "µs per leaf"), rows)


def _output(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
