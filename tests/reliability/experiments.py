"""The experiments in the order of the table, each with the figures of its long form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.reliability import kills, power
from tests.reliability.extent import Extent
from tests.reliability.tally import Tally
from tests.reliability.workloads import SCENARIOS, SYSTEMS, System


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One row of the table.

    Attributes:
        name: for ``--only``.
        title: of the row.
        run: does it for one system.
        systems: that it is for.
        needs_shim: it injects below libc.
    """

    name: str
    title: str
    run: Callable[[System, Tally, Extent], None]
    systems: tuple[System, ...] = SYSTEMS
    needs_shim: bool = True


def _calls(*injections: str) -> Callable[[System, Tally, Extent], None]:
    def run(system: System, tally: Tally, extent: Extent) -> None:
        for scenario in extent.of(SCENARIOS):
            kills.at_calls(system, scenario, injections, tally, extent)

    return run


def _random_kills(system: System, tally: Tally, extent: Extent) -> None:
    for number in range(extent.times(500)):
        if not extent.is_over:
            kills.random_time(system, number, tally)


def _power(system: System, tally: Tally, extent: Extent) -> None:
    for scenario in extent.of(SCENARIOS):
        if not extent.is_over:
            power.lose_power(system, scenario, tally, samples=extent.times(16, 2), limit=extent.times(400, 10))


EXPERIMENTS = (
    Experiment(
        "calls", "killed at a call, or in the middle of a write", _calls("killed", "killed in the middle of a write")
    ),
    Experiment("kills", "killed at a random time, saving step after step", _random_kills),
    Experiment(
        "errors",
        "a call fails once (EIO, ENOSPC), or the disk stays full from it on",
        _calls("EIO", "ENOSPC", "a disk that stays full"),
    ),
    Experiment("power", "power lost during or after a save", _power),
)
