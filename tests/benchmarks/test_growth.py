"""Slopes are computed as said, charts are whole SVG files, and the speed check counts what happens."""

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import charts, check, growth
from tests.benchmarks.systems import OURS, SAVE


@pytest.mark.parametrize("power", [1.0, 1.2, 2.0])
def test_slope_of_a_power(power: float) -> None:
    """Time that is a power of the size has that slope, and the cost of one grows by the rest of it."""
    slope, factor = growth.worst_step([(10**n, 10.0 ** (power * n)) for n in (3, 1, 2)])
    assert slope == pytest.approx(power)
    assert factor == pytest.approx(10 ** (power - 1))


def test_start_up_does_not_count() -> None:
    """A constant cost hides the first steps, and what grows only within it has no slope."""
    assert growth.worst_step([(10, 1.0), (100, 1.9)]) == (None, None)
    slope, _ = growth.worst_step([(10, 1.0), (100, 1.5), (1000, 15.0)])
    assert slope == pytest.approx(1.0)


def test_every_figure_has_a_chart(tmp_path: Path) -> None:
    """Each chart is well-formed, names every system, and has room for all that is drawn."""
    systems = ["ours, msgpack", "ours, orbax format", "a <b> & c"]
    results = {
        "machine": {"CPUs": "2", "memory": "24 GiB"},
        "workloads": {"gpt2-jax": {"title": "GPT-2", "nbytes": 1, "leaves": 1}},
        "seconds": [
            {"workload": "gpt2-jax", "operation": operation, "system": system, "seconds": [n + 0.5], "unsynced": 0}
            for operation in ("save", "restore")
            for n, system in enumerate([*systems, "raw, 1 thread"])
        ],
        "peaks": [
            {"workload": "gpt2-jax", "operation": "save", "system": system, "bytes": nbytes}
            for system, nbytes in zip(systems, (-1, 2**20, None), strict=True)
        ],
        "growth": [
            {"by": by, "at": at, "operation": "save", "system": system, "seconds": [at / 1000]}
            for by in ("leaves", "bytes")
            for at in (10_000, 300_000)
            for system in systems
        ],
    }
    files = charts.write(results, tmp_path / "charts")
    assert {file.stem for file in files} == {
        *("save-by-leaves", "save-by-bytes", "save-gpt2-jax", "restore-gpt2-jax", "memory-save")
    }
    for file in files:
        root = ET.parse(file).getroot()
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        texts = [element for element in root if element.tag.endswith("text")]
        names = {element.text for element in texts}
        assert {name for name in systems if "memory" not in file.stem or "<" not in name} <= names
        for element in texts:
            assert 0 <= float(element.attrib["x"]) <= width
            assert 0 <= float(element.attrib["y"]) <= height


def test_charts_of_nothing(tmp_path: Path) -> None:
    """A run of which parts were left out makes the other charts only."""
    assert charts.write({"machine": {}, "workloads": {}, "seconds": [], "peaks": []}, tmp_path) == []


def test_calls_are_counted() -> None:
    """Python calls in a block are counted as they are made, and nothing after it."""

    def nothing() -> None:
        pass

    with check.counted() as some:
        for _ in range(100):
            nothing()
    with check.counted() as more:
        for _ in range(350):
            nothing()
    assert more.calls - some.calls == 250


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="this system does not count bytes")
def test_bytes_are_counted(tmp_path: Path) -> None:
    """Bytes that pass through system calls are counted in both directions."""
    path = tmp_path / "file"
    with check.counted() as count:
        path.write_bytes(np.ones(2**20, np.uint8))
        path.read_bytes()
    assert count.moved is not None
    assert all(2**20 <= moved < 2**20 + 2**14 for moved in count.moved)


def test_every_figure_of_the_check_has_a_limit(tmp_path: Path) -> None:
    """What one operation costs is looked up under names that the table of limits has."""
    small = check.Workload("small", "small", "Small leaves", check.SMALL.shapes, on_device=False)
    assert small == check.SMALL
    names = {one.name for one in check._counts_of(OURS[0], check.SMALL, str(tmp_path))}
    assert names <= check.LIMITS.keys()
    assert any(SAVE in name for name in names)
