"""What was measured on one workload, and the same as plain data for results.json."""

import statistics
from typing import Any

from tests.benchmarks.systems import RAW, SAVE

# An entry of results.json: workload, operation, system, seconds (of each round), unsynced (bytes, of saves; None
# where the kernel does not say).
Entry = dict[str, Any]


class Series:
    """Everything measured on one workload.

    Attributes:
        seconds: (system, operation) → seconds of each round.
        unsynced: system → the most bytes that were not on the disk when a save returned, or None if unknown.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.unsynced: dict[str, int | None] = {}

    def add(self, system: str, operation: str, seconds: float) -> None:
        """Notes one round."""
        self.seconds.setdefault((system, operation), []).append(seconds)

    def add_unsynced(self, system: str, dirty: int | None) -> None:
        """Notes what one save left in memory only."""
        before = self.unsynced.get(system, 0)
        self.unsynced[system] = None if dirty is None or before is None else max(dirty, before)

    def median(self, system: str, operation: str) -> float | None:
        """Median seconds, or None where it was not measured."""
        seconds = self.seconds.get((system, operation))
        return statistics.median(seconds) if seconds else None

    def ratio(self, operation: str, system: str, other: str) -> float | None:
        """How many times the other's time a system took, or None where one was not measured.

        The host of a virtual machine may slow down by half from one second to the next, so systems that ran in every
        round are compared within each, and the median of those ratios counts. Otherwise it is the ratio of medians.
        """
        ours, theirs = (self.seconds.get((name, operation), []) for name in (system, other))
        if not ours or not theirs:
            return None
        if len(ours) == len(theirs):
            return statistics.median(one / beside for one, beside in zip(ours, theirs, strict=True))
        return statistics.median(ours) / statistics.median(theirs)

    def fastest(self, systems: list[str], operation: str) -> tuple[float, str] | None:
        """Least median of some systems and whose it is, or None where none was measured."""
        medians = ((self.median(system, operation), system) for system in systems)
        return min(((median, system) for median, system in medians if median is not None), default=None)

    def raw(self, operation: str) -> float | None:
        """Median of the fastest raw system, or None where raw has no such operation."""
        found = self.fastest([system.name for system in RAW], operation)
        return found[0] if found else None

    def entries(self, workload: str) -> list[Entry]:
        """All of it for results.json."""
        return [
            {
                "workload": workload,
                "operation": operation,
                "system": system,
                "seconds": [round(one, 6) for one in seconds],
                "unsynced": self.unsynced.get(system) if operation == SAVE else None,
            }
            for (system, operation), seconds in self.seconds.items()
        ]

    @classmethod
    def of(cls, entries: list[Entry]) -> "Series":
        """What `entries` made plain."""
        series = cls()
        for entry in entries:
            series.seconds[entry["system"], entry["operation"]] = list(entry["seconds"])
            if entry["operation"] == SAVE:
                series.unsynced[entry["system"]] = entry["unsynced"]
        return series
