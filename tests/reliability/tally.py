"""Count the outcomes of injections, by system and experiment."""

from __future__ import annotations

import collections
import dataclasses

from tests.reliability.workloads import System

GOOD = ("", "found", "same", "value")


@dataclasses.dataclass
class Tally:
    """The outcomes of one experiment.

    Attributes:
        name: what was injected, as the table says it.
        counts: system → outcome → how often; those of `GOOD` are right.
        examples: system → what went wrong first, by outcome.
    """

    name: str
    counts: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=dict)
    examples: dict[str, dict[str, list[str]]] = dataclasses.field(default_factory=dict)

    def add(self, system: System, wrong: str, where: str, times: int = 1) -> None:
        """Count an outcome.

        Args:
            system: that was hit.
            wrong: one of `GOOD`, or text that begins with the outcome and a colon.
            where: how to find it again.
            times: how often it was seen.
        """
        outcome = wrong.partition(":")[0] if wrong else ""
        outcome = "other" if " " in outcome or len(outcome) > 20 else outcome
        self.counts.setdefault(system.name, collections.Counter())[outcome] += times
        if outcome not in GOOD:
            shown = self.examples.setdefault(system.name, {}).setdefault(outcome, [])
            if len(shown) < 5:
                shown.append(f"{where}: {wrong}")
