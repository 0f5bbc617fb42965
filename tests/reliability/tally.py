"""Count the outcomes of injections into one system."""

from __future__ import annotations

import collections
import dataclasses

GOOD = ("", "found", "same", "skipped", "value", "verify")
_SHOWN = 5


@dataclasses.dataclass
class Tally:
    """The outcomes of one experiment with one system.

    Attributes:
        prints: the first examples of what goes wrong are printed at once.
        counts: outcome → how often; those of `GOOD` are right.
    """

    prints: bool = False
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
