"""The benchmark runs from end to end on tiny trees; what it measures is not judged here."""

import subprocess
import sys
from pathlib import Path

from tests.benchmarks.peak import above_tree
from tests.benchmarks.systems import SAVE, SYSTEMS
from tests.benchmarks.workloads import gpt2_shapes, workloads

ROOT = Path(__file__).parents[2]


def test_command_prints_every_system(tmp_path: Path) -> None:
    """The command measures, compares and prints every system, and leaves nothing behind."""
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--no-memory", "--only", "gpt2-jax"]
    done = subprocess.run([*command, "--workdir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for system in [*(system.name for system in SYSTEMS), "raw, 1 thread", "raw, 2 threads"]:
        assert f" {system} " in done.stdout
    assert not list(tmp_path.iterdir())


def test_peak_memory_of_a_fresh_process(tmp_path: Path) -> None:
    """A fresh process tells how far memory rose during one save."""
    first, *_ = workloads(quick=True)
    peak = above_tree(first, SYSTEMS[0], SAVE, str(tmp_path), quick=True)
    assert peak is None or 0 <= peak < 2**30


def test_gpt2_has_its_published_size() -> None:
    """The large tree has the 124,439,808 parameters that GPT-2 small is published with."""
    sizes = (shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in gpt2_shapes().values())
    assert sum(sizes) == 124_439_808
