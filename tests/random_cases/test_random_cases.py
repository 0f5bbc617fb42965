"""A few random cases of every kind, the same in every run; ``python -m tests.random_cases`` draws others."""

import pytest

from tests.random_cases.kinds import KINDS, Kind


@pytest.mark.parametrize("kind", KINDS[:4], ids=lambda kind: kind.name)
def test_a_few_cases(kind: Kind) -> None:
    """Five of each kind; those against Orbax have more in a test of their own."""
    kind.run(9, 5)
