"""The benchmark of saves in a training loop runs from end to end on tiny trees; what it measures is not judged here."""

from pathlib import Path

import pytest

from tests.benchmarks import training_loop
from tests.benchmarks.training_loop import Loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-numpy", training_loop.TRAINED])
def test_every_system_trains(name: str, tmp_path: Path) -> None:
    """Each has a row, what was saved last is what the state was, and nothing is left behind."""
    found = training_loop.measure(name, 1, str(tmp_path), quick=True)
    assert [row[0] for row in training_loop.table(name, found).rows] == [
        system.name for system in training_loop.SYSTEMS
    ]
    assert not list(tmp_path.iterdir())


def test_ratios_are_to_orbaxs_best() -> None:
    """Of medians; a call that blocks for too long does not meet the goal, whatever is lost."""
    lost = {"ours, msgpack": 0.1, "ours, orbax format": 0.1, "flax, msgpack": 9.0, "orbax AsyncCheckpointer": 0.5}
    # Older releases of Orbax have no v1.
    names = [system.name for system in training_loop.SYSTEMS]
    found = {name: [Loss(0.05, lost.get(name, 0.8))] * 3 for name in names}
    found["ours, orbax format"] = [Loss(0.3, 0.1)] * 3
    rows = {row[0]: row for row in training_loop.table("gpt2-jax", found).rows}
    assert rows["ours, msgpack"][-2:] == ("5.00", "yes")
    assert rows["ours, orbax format"][-2:] == ("5.00", "no")
    assert rows["flax, msgpack"][-2:] == ("0.06", "")
