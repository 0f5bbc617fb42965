"""The benchmark of many processes runs from end to end on tiny trees; what it measures is not judged here."""

from pathlib import Path

import pytest

from tests.benchmarks import team
from tests.benchmarks.team_jobs import SYSTEMS, Sizes
from tests.support.team import team_of


@pytest.mark.slow
def test_every_system_is_timed(tmp_path: Path) -> None:
    """Each operation has a table with every system, all results were compared, and nothing is left behind."""
    tables = team.measure(team_of(2), Sizes(2, (16, 8)), 1, str(tmp_path))
    assert [table.title.partition(" (")[0] for table in tables] == list(team._OPERATIONS.values())
    for table in tables:
        assert [row[0] for row in table.rows] == [system.name for system in SYSTEMS]
    assert not list(tmp_path.iterdir())
