"""The kinds of random cases: for each a strategy that draws a case, and a check of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.orbax_backend import test_random_differential as orbax
from tests.random_cases import proposals, restores, saves


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of random cases.

    Attributes:
        name: for the command line.
        cases: draws the arguments of the check, a tuple.
        check: raises where a case fails.
    """

    name: str
    cases: st.SearchStrategy[tuple[Any, ...]]
    check: Callable[..., None]

    def run(self, number: int, examples: int) -> None:
        """Check this many cases, the same for the same number; the smallest failing one is raised, printed above."""

        @seed(number)
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=self.cases)
        def checked(case: tuple[Any, ...]) -> None:
            self.check(*case)

        checked()


def _inner(test: Any) -> Callable[..., None]:
    """The function behind a test of hypothesis."""
    function: Callable[..., None] = test.hypothesis.inner_test
    return function


KINDS = (
    Kind("restore-against-flax", restores.CASES, restores.check),
    Kind("plan-against-restore", restores.PLANS, restores.check_plan),
    Kind("saves-against-flax", saves.SEPARATE, saves.check_separate),
    Kind("saves-of-overlapping-prefixes", saves.OVERLAPPING, saves.check_overlapping),
    Kind("orbax-and-ours", st.tuples(orbax.TREES), _inner(orbax.test_real_orbax_and_we_read_each_other)),
    Kind("certain-proposals", proposals.CASES, proposals.check),
)
