"""The experiments on a network file system, whose rules network.c has."""

from __future__ import annotations

import dataclasses

from tests.reliability import concurrent, kills
from tests.reliability.extent import Extent
from tests.reliability.shim import Network
from tests.reliability.tally import Tally
from tests.reliability.workloads import System


def at_calls(system: System, tally: Tally, extent: Extent) -> None:
    """Kill each kind of save at each of its calls."""
    kills.at_calls(dataclasses.replace(system, network=Network.ONE_MACHINE), ["killed"], tally, extent)


def reader(system: System, tally: Tally, extent: Extent) -> None:
    """Restore beside a process that saves, first on the same machine, then on another."""
    for rules in (Network.ONE_MACHINE, Network.OTHER_MACHINE):
        half = dataclasses.replace(extent, scale=extent.scale / 2)
        concurrent.reader(dataclasses.replace(system, network=rules), tally, half)


def overwrites(system: System, tally: Tally, extent: Extent) -> None:
    """Restore beside a process that overwrites the latest step, on the same machine."""
    concurrent.overwrites(dataclasses.replace(system, network=Network.ONE_MACHINE), tally, extent)
