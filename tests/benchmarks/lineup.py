"""Who runs on which workload, how often, and who is compared with whom."""

import random
from collections.abc import Iterator
from typing import Any

from tests.benchmarks import peers
from tests.benchmarks.systems import (
    BLOCKED,
    COLD,
    COMPRESSED,
    FLAX,
    MAPPED,
    OTHER_MESH,
    OURS,
    RAW,
    RESTORE,
    RESTORE_NONE,
    TOUCHED,
    Raw,
)
from tests.benchmarks.workloads import Workload

ORBAX = (FLAX[1], peers.PYTREE, peers.STANDARD, *peers.V1)
FILES = (peers.SAFETENSORS, peers.SAVEZ)
_FLAX_ONLY: tuple[Any, ...] = (*OURS, *FLAX)
_ALL_PEERS: tuple[Any, ...] = (*OURS, FLAX[0], *ORBAX)
# Flax with the flag on is PyTreeCheckpointer with little around it: one of the two will do where each save takes long.
_FEWER_PEERS: tuple[Any, ...] = (*OURS, *FLAX, peers.STANDARD, *peers.V1)
SYSTEMS: dict[str, tuple[Any, ...]] = {
    "gpt2-jax": (*_ALL_PEERS, COMPRESSED, *FILES, *RAW),
    "gpt2-numpy": (*_FLAX_ONLY, *MAPPED, *RAW),
    "gpt2+adamw": (*_FEWER_PEERS, *RAW),
    "array": (*_FEWER_PEERS, *FILES, *RAW),
    "leaves-jax": (*_ALL_PEERS, *FILES, *RAW),
    "leaves-numpy": (*_FLAX_ONLY, *FILES, *RAW),
    "sharded": (*_FEWER_PEERS, *RAW),
}
BACKGROUND: dict[str, tuple[Any, ...]] = {
    "gpt2-jax": (*_FLAX_ONLY, peers.ASYNC, *peers.V1),
    "gpt2-numpy": _FLAX_ONLY,
}
_COLD: dict[str, tuple[Any, ...]] = {
    "gpt2-jax": (*_FEWER_PEERS, COMPRESSED, peers.SAFETENSORS, *RAW),
    "gpt2+adamw": (*_FLAX_ONLY, *RAW),
}
# What takes hundredths of a second is measured more often, or the minutes in which a host is slow decide who is faster;
# one save of the small leaves takes Orbax seconds.
SMALL_REPEATS, SLOW_ROUNDS = 10, 3


def rounds_of(workload: Workload, rounds: int) -> int:
    """The rounds on a workload: more of the small ones, whose systems are quick."""
    return rounds * SMALL_REPEATS if workload.kind == "small" else rounds


def in_turn(workload: Workload, number: int, *, background: bool = False) -> Iterator[Any]:
    """The systems of one round, in an order of its own, so that nobody always follows the same one."""
    systems = list((BACKGROUND if background else SYSTEMS).get(workload.name, ()))
    random.Random(number).shuffle(systems)
    slow_ones_run = workload.kind != "small" or number in range(0, SLOW_ROUNDS * SMALL_REPEATS, SMALL_REPEATS)
    return (one for one in systems if slow_ones_run or one not in ORBAX)


def restores(workload: Workload, system: Any) -> list[str]:
    """The operations that follow a save: restores from the warm page cache, and the last one perhaps from the disk."""
    found = [RESTORE]
    # Without a target a TrainState comes back as the dicts that hold it, and what is split as before in one piece.
    if system in (OURS[0], FLAX[0]) and not workload.adamw and workload.devices == 1:
        found.append(RESTORE_NONE)
    if workload.name == "gpt2-numpy" and not isinstance(system, Raw):
        found.append(TOUCHED)
    # What comes out of msgpack is in numpy arrays, whatever the mesh.
    if workload.devices > 1 and system not in (OURS[0], FLAX[0], *RAW):
        found.append(OTHER_MESH)
    return [*found, COLD] if system in _COLD.get(workload.name, ()) else found


def peers_of(system: str, operation: str) -> list[str]:
    """The systems that one of ours is compared with, by the fastest of them; none for systems of others."""
    ours = {one.name: one.orbax for one in (*OURS, COMPRESSED, *MAPPED)}
    if system not in ours:
        return []
    if operation == BLOCKED:
        return [one.name for one in (FLAX[1], peers.ASYNC, *peers.V1)]
    return [one.name for one in ORBAX] if ours[system] else [FLAX[0].name]
