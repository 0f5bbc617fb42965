"""How much of the long form of an experiment is done."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tests.reliability.tally import Tally

_Place = TypeVar("_Place")
_Case = TypeVar("_Case")
_FEW = 0.05  # below this, of a few scenarios only: preparing each takes longer than its cases


@dataclasses.dataclass
class Extent:
    """How much to do.

    Attributes:
        scale: 1 is the long form.
        until: on the monotonic clock; no new case begins after that.
    """

    scale: float = 1.0
    until: float = float("inf")

    def times(self, count: int, least: int = 1) -> int:
        """Return how often instead of a count of the long form."""
        return max(least, round(count * self.scale))

    def of(self, cases: Sequence[_Case]) -> Sequence[_Case]:
        """Return the cases, or, in the short form, every third from the third on."""
        return cases if self.scale >= _FEW else cases[2::3]

    def through(
        self, batches: Sequence[tuple[_Place, Sequence[_Case]]], tally: Tally
    ) -> Iterator[tuple[_Place, Sequence[_Case]]]:
        """Yield the batches of a whole row in an order of chance until the time is over, so that what ran is a sample.

        The order is the same each time. A tally that already holds cases of this plan goes on after them.

        Args:
            batches: cases, with what they have in common; all outcomes of one are counted before the next is asked for.
            tally: told how many cases are planned.
        """
        skipped = tally.plan(sum(len(cases) for _, cases in batches))
        for place, cases in random.Random(len(batches)).sample(batches, len(batches)):
            if skipped > 0:
                skipped -= len(cases)
            elif time.monotonic() > self.until:
                return
            else:
                yield place, cases
