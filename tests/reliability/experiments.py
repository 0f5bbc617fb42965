"""The experiments in the order of the table, each with the figures of its long form."""

import dataclasses
from collections.abc import Callable
from functools import partial

from tests.reliability import concurrent, damage, fuzz, kills, power, processes, reads
from tests.reliability.tally import Extent, Tally
from tests.reliability.workloads import SHARED_SYSTEMS, SYSTEMS, System


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One row of the table."""

    name: str  # for ``--only``
    title: str  # of the row
    run: Callable[[System, Tally, Extent], None]  # does it for one system
    systems: tuple[System, ...] = SYSTEMS


WITH_SHIM = (
    Experiment(
        "calls",
        "killed at a call, or in the middle of a write",
        partial(kills.at_calls, names=("killed", "killed in the middle of a write")),
    ),
    Experiment("kills", "killed at a random time, saving step after step", kills.random_times),
    Experiment(
        "errors",
        "a call fails once (EIO, ENOSPC), or the disk stays full from it on",
        partial(kills.at_calls, names=("EIO", "ENOSPC", "a disk that stays full")),
    ),
    Experiment(
        "reads",
        "a call that reads fails once (EIO, ESTALE): the latest is restored, or steps are listed",
        reads.at_calls,
    ),
    Experiment("power", "power lost during or after a save", power.lose_power),
    Experiment(
        "team calls",
        "two processes save; one is killed at a call, or the call fails",
        processes.at_calls,
        SHARED_SYSTEMS[:2],
    ),
    Experiment("team power", "two processes save; power is lost", processes.lose_power, SHARED_SYSTEMS),
)
WITHOUT_SHIM = (
    Experiment("reader", "restored while another process saves with keep=2", concurrent.reader),
    Experiment(
        "overwrites", "restored while another process overwrites the latest of two steps", concurrent.overwrites
    ),
    Experiment("writers", "two processes save the same steps, overwrite=True", concurrent.writers),
    Experiment(
        "bytes",
        "a small checkpoint: each byte flipped, each file cut to each length",
        damage.every_byte,
    ),
    Experiment("flips", "a larger checkpoint: bits flipped at random", damage.random_flips),
    Experiment("fuzz", "files mutated at random: a value, or an error of ours", fuzz.fuzz),
    Experiment("soak", "saves and restores in one process: memory, descriptors, threads", concurrent.soak),
)
EXPERIMENTS = (*WITH_SHIM, *WITHOUT_SHIM)
