"""How much of an experiment is done, and what came of it in one system."""

import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import TypeVar

GOOD = ("", "found", "same", "skipped", "value", "verify")
_SHOWN = 5


@dataclasses.dataclass
class Tally:
    """The outcomes of one experiment with one system."""

    prints: bool = False  # the first examples of what goes wrong, at once
    # By outcome; those of `GOOD` are right.
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def wrong(self) -> int:
        """In how many cases something was wrong."""
        return self.counts.total() - sum(self.counts[outcome] for outcome in GOOD)

    def shown(self) -> str:
        """Return the cell of the table."""
        seen = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(self.counts.items()) if outcome)
        return f"{self.wrong:,} of {self.counts.total():,}" + (f" ({seen})" if seen else "")

    def add(self, wrong: str, where: str, times: int = 1) -> None:
        """Count an outcome.

        Args:
            wrong: one of `GOOD`, or text that begins with the outcome and a colon.
            where: how to find it again.
            times: how often it was seen.
        """
        outcome = wrong.partition(":")[0] if wrong else ""
        outcome = "other" if " " in outcome or len(outcome) > 20 else outcome
        if self.prints and outcome not in GOOD and self.counts[outcome] < _SHOWN:
            print(f"    {where}: {wrong}", flush=True)
        self.counts[outcome] += times


_Case = TypeVar("_Case")
_FEW = 0.05  # below this, of a few scenarios only: preparing each takes longer than its cases


@dataclasses.dataclass
class Extent:
    """How much to do."""

    scale: float = 1.0  # 1 is the long form

    def times(self, count: int, least: int = 1) -> int:
        """Return how often instead of a count of the long form."""
        return max(least, round(count * self.scale))

    def of(self, cases: Sequence[_Case]) -> Sequence[_Case]:
        """Return the cases, or, in the short form, every third from the third on."""
        return cases if self.scale >= _FEW else cases[2::3]

    def some(self, cases: Sequence[_Case], seed: object, least: int = 1) -> list[_Case]:
        """Return the cases, or some of them by chance, the same for a seed, in an order of chance."""
        return random.Random(str(seed)).sample(cases, self.times(len(cases), least))
