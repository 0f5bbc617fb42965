"""The guide's table of releases is the one of the results."""

from tests.readers_matrix import table
from tests.readers_matrix.table import RELEASES


def test_the_guide_has_the_table() -> None:
    """`python -m tests.readers_matrix --write` wrote it last; no row is of a release that is not pinned."""
    assert table.text() in table.GUIDE.read_text()
    assert table.results().keys() <= RELEASES.keys()
