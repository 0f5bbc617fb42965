"""A few random cases of every kind, the same in every run; ``python -m tests.random_cases`` draws others."""

import pytest

from tests.random_cases.kinds import KINDS, Kind
from tests.random_cases.models import DEVELOPED, HELD_OUT, Family
from tests.random_cases.proposals import case, followed, verdict


@pytest.mark.parametrize("kind", KINDS[:4], ids=lambda kind: kind.name)
def test_a_few_cases(kind: Kind) -> None:
    """Five of each kind; those against Orbax have more in a test of their own."""
    kind.run(9, 5)


@pytest.mark.slow
@pytest.mark.parametrize("families", [DEVELOPED, HELD_OUT], ids=["developed", "held-out"])
def test_certain_proposals_are_right_when_pasted(families: dict[str, Family]) -> None:
    """Ports of well-known models: what is certain is right, also when it is pasted into a restore of either format."""
    certain = 0
    for seed in range(400):
        one = case(seed, families)
        found, suggestion, wrong = verdict(one)
        assert found != "certain wrong", (seed, one.title, wrong, str(suggestion))
        if found == "certain right" and suggestion is not None:
            certain += 1
            wrong = followed(one, suggestion)
            assert not wrong, (seed, one.title, wrong, str(suggestion))
    assert certain > 100  # of 400: else the cases are no test
