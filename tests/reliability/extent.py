"""How much of the long form of an experiment is done."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

_Case = TypeVar("_Case")
_FEW = 0.05  # below this, of a few scenarios only: preparing each takes longer than its cases


@dataclasses.dataclass
class Extent:
    """How much to do.

    Attributes:
        scale: 1 is the long form.
    """

    scale: float = 1.0

    def times(self, count: int, least: int = 1) -> int:
        """Return how often instead of a count of the long form."""
        return max(least, round(count * self.scale))

    def of(self, cases: Sequence[_Case]) -> Sequence[_Case]:
        """Return the cases, or, in the short form, every third from the third on."""
        return cases if self.scale >= _FEW else cases[2::3]

    def through(self, batches: Sequence[_Case]) -> Iterator[_Case]:
        """Yield batches of cases in an order of chance, which is the same each time."""
        yield from random.Random(len(batches)).sample(batches, len(batches))
