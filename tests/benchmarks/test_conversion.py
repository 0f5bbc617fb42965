"""The benchmark of conversions runs from end to end on tiny arrays; what it measures is not judged here."""

from pathlib import Path

import pytest

from tests.benchmarks import conversion


@pytest.mark.slow
def test_every_system_is_timed(tmp_path: Path) -> None:
    """Each system has a row, with ratios to the fastest copy."""
    table = conversion.measure(tmp_path, 1, 1)
    assert len(table.rows) == 9 and all(len(row) == len(table.columns) for row in table.rows)
