"""The benchmarks run from end to end on tiny trees, and keep to their page and README's table; no time is judged."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.benchmarks import report, rounds, training_loop
from tests.benchmarks.rounds import Series
from tests.benchmarks.systems import SAVE
from tests.benchmarks.training_loop import Loss
from tests.benchmarks.workloads import Workload, gpt2_shapes, workloads
from tests.support import peers

ROOT = Path(__file__).parents[2]
RESULTS = json.loads(report.DATA.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_command_prints_every_system(tmp_path: Path) -> None:
    """The command measures, compares and prints every system, and leaves nothing behind."""
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--only", "gpt2-jax"]
    done = subprocess.run([*command, "--workdir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for system in rounds.SYSTEMS["gpt2-jax"]:
        assert f" {system.name} " in done.stdout
    assert not list(tmp_path.iterdir())


def test_gpt2_has_its_published_size() -> None:
    """The large tree has the 124,439,808 parameters that GPT-2 small is published with, in 12 x 12 + 4 arrays."""
    sizes = [shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in gpt2_shapes().values()]
    assert (sum(sizes), len(sizes)) == (124_439_808, 148)


@pytest.mark.slow
@pytest.mark.parametrize("workload", workloads(quick=True), ids=lambda one: one.name)
def test_workloads_are_as_they_say(workload: Workload) -> None:
    """The tree has the leaves and bytes that the tables show, and the target its structure."""
    tree, target = workload.tree(), workload.target()
    leaves = jax.tree.leaves(tree)
    assert (len(leaves), sum(leaf.nbytes for leaf in leaves)) == (workload.leaves, workload.nbytes)
    assert jax.tree.structure(tree) == jax.tree.structure(target)
    assert not any(leaf.any() for leaf in jax.tree.leaves(target))


def test_ratios_are_those_within_a_round() -> None:
    """A host that slows down in some rounds decides nothing; who ran less often is compared by medians."""
    series = Series("any")
    for ours, theirs in ((0.5, 1.0), (1.0, 2.0), (1.0, 2.0), (0.5, 1.0), (1.0, 1.0)):
        series.add("ours", SAVE, ours)
        series.add("theirs", SAVE, theirs)
    series.add("slow", SAVE, 30)
    assert series.ratio(SAVE, "theirs", "ours") == 2  # the ratio of medians is 1
    assert series.ratio(SAVE, "slow", "ours") == 30
    assert series.ratio(SAVE, "nobody", "ours") is None


@pytest.mark.slow
def test_every_system_trains(tmp_path: Path) -> None:
    """Each has a figure, what was saved last is what the state was, and nothing is left behind."""
    found = training_loop.measure("gpt2-numpy", 1, str(tmp_path), quick=True)
    assert found.keys() == {system.name for system in training_loop.SYSTEMS} and all(found.values())
    assert not list(tmp_path.iterdir())


def test_ratios_are_to_orbaxs_best() -> None:
    """Of medians; a call that blocks for too long does not meet the goal, whatever is lost."""
    lost = {"ours, msgpack": 0.1, "ours, orbax format": 0.1, "flax, msgpack": 9.0, "orbax AsyncCheckpointer": 0.5}
    # Older releases of Orbax have no v1.
    found = {system.name: [Loss(0.05, lost.get(system.name, 0.8))] * 3 for system in training_loop.SYSTEMS}
    found["ours, orbax format"] = [Loss(0.3, 0.1)] * 3
    entries = training_loop._entries("gpt2-jax", found)
    rows = {row[0]: row for row in report.losses_table(entries, RESULTS["workloads"]["gpt2-jax"]).rows}
    assert rows["ours, msgpack"][-2:] == ("5.00", "yes")
    assert rows["ours, orbax format"][-2:] == ("5.00", "no")
    assert rows["flax, msgpack"][-2:] == ("0.06", "")


def test_pages_show_the_results() -> None:
    """The page and README's table are of the results, and a cell is the median of what was measured."""
    readme = report.README.read_text(encoding="utf-8")
    assert report.as_text(RESULTS) == report.DATA.read_text(encoding="utf-8")
    assert readme == report.updated(readme, RESULTS)
    if not isinstance(peers.ocp_v1, peers._Missing):  # the page has a row for each interface of the release
        assert report.PAGE.read_text(encoding="utf-8") == report.page(RESULTS)
    [entry] = [
        one for one in RESULTS["seconds"]
        if (one["workload"], one["operation"], one["system"]) == ("gpt2-jax", "save", "flax, msgpack")
    ]  # fmt: skip
    [row] = [line for line in readme.splitlines() if line.startswith("| save 0.5 GB")]
    assert float(row.split("|")[3]) == pytest.approx(statistics.median(entry["seconds"]), rel=0.01)
