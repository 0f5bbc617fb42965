"""What the processes of ``tests.benchmarks.team`` do: timed saves and restores, ours and real Flax's and Orbax's."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.training import checkpoints as flax_checkpoints
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import NamedSharding, PartitionSpec

from flax_ckpt_compat import checkpoints
from tests.multiprocess.jobs import barrier, mesh, put, use

# The mesh of a save, and another one to restore onto, whose shards are cut across those.
SAME, OTHER = "plain", "turned"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A tree of float32 arrays, each split over all devices.

    Attributes:
        number: of arrays.
        shape: of each.
    """

    number: int
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return 4 * self.number * self.shape[0] * self.shape[1]


@dataclasses.dataclass(frozen=True)
class System:
    """A way to save together.

    Attributes:
        name: for the tables.
        peer: the system of others that it is compared with; empty for those themselves.
        save: of (folder, tree); returns once all is committed.
        restore: of (folder, target).
    """

    name: str
    peer: str
    save: Callable[[str, Any], Any]
    restore: Callable[[str, Any], Any]


def _save_ours(orbax: bool, folder: str, tree: Any) -> None:
    use(orbax)
    checkpoints.save_checkpoint_multiprocess(folder, tree, 1)


def _restore_ours(folder: str, target: Any) -> Any:
    return checkpoints.restore_checkpoint(folder, target)


def _save_flax(folder: str, tree: Any) -> None:
    use(False)
    manager = GlobalAsyncCheckpointManager()
    flax_checkpoints.save_checkpoint_multiprocess(folder, tree, 1, gda_manager=manager)
    manager.wait_until_finished()


def _restore_flax(folder: str, target: Any) -> Any:
    return flax_checkpoints.restore_checkpoint(folder, target, gda_manager=GlobalAsyncCheckpointManager())


def _save_orbax(folder: str, tree: Any) -> None:
    ocp.PyTreeCheckpointer().save(os.path.join(folder, "checkpoint_1"), tree)


def _restore_orbax(folder: str, target: Any) -> Any:
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    path = os.path.join(folder, "checkpoint_1")
    return ocp.PyTreeCheckpointer().restore(path, item=target, restore_args=arguments)


SYSTEMS = (
    System("ours, orbax format", "orbax", functools.partial(_save_ours, True), _restore_ours),
    System("ours, msgpack", "flax, msgpack", functools.partial(_save_ours, False), _restore_ours),
    System("orbax", "", _save_orbax, _restore_orbax),
    System("flax, msgpack", "", _save_flax, _restore_flax),
)


@functools.lru_cache(maxsize=2)
def _trees(sizes: Sizes, kind: str) -> tuple[Any, Any]:
    """What is saved, on this mesh, and a target of zeros; random values, as those of trained weights."""
    sharding, random = NamedSharding(mesh(kind), PartitionSpec("x", "y")), np.random.default_rng(0)
    tree: dict[str, Any] = {}
    target: dict[str, Any] = {}
    for number in range(sizes.number):
        values, name = random.standard_normal(sizes.shape, np.float32), f"layer_{number:05}"
        tree[name] = {"kernel": put(values, sharding)}
        target[name] = {"kernel": put(np.zeros_like(values), sharding)}
    return tree, target


def save(folder: str, system: int, sizes: Sizes) -> tuple[float, float]:
    """Saves as step 1.

    Returns:
        When this process began and when it could go on, on a clock that all processes share.
    """
    tree, _ = _trees(sizes, SAME)
    return _timed(lambda: SYSTEMS[system].save(folder, tree))[:2]


def restore(folder: str, system: int, sizes: Sizes, kind: str) -> tuple[float, float]:
    """Restores it onto a mesh, and then compares every bit that this process holds.

    Returns:
        As `save`.
    """
    wanted, target = _trees(sizes, kind)
    began, ended, got = _timed(lambda: jax.block_until_ready(SYSTEMS[system].restore(folder, target)))
    for name, leaves in wanted.items():
        mine, theirs = got[name]["kernel"], leaves["kernel"]
        assert mine.sharding.is_equivalent_to(theirs.sharding, 2), name
        for a, b in zip(mine.addressable_shards, theirs.addressable_shards, strict=True):
            assert a.index == b.index, name
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes(), name
    return began, ended


def _timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    gc.collect()
    barrier("begin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.monotonic()
        result = call()
        return began, time.monotonic(), result
