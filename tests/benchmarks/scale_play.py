"""One process that plays many, a device for each: no machine here can run a thousand."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_ckpt_compat._core.backend import ProcessInfo, ProcessSave, WriteOptions
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import Branch, HostCopy, Shard
from tests.benchmarks.systems import timed_twice
from tests.support.orbax_trees import BACKEND

# Elements of a shard, of float32: just too large to be stored inside of the index.
ELEMENTS = 260
Seconds = tuple[float, float]  # of the clock, and of the processor


class _Over(NamedSharding):
    """A sharding of which every device is another process's."""

    is_fully_addressable = False  # type: ignore[assignment]


def merge(folder: str, leaves: int) -> dict[str, Seconds]:
    """A save in Orbax's format by as many processes as there are devices, with one shard of every array each.

    Returns:
        Seconds by stage, of the clock and of the processor; ``share`` is that of one process other than process 0.
    """
    first, shares = written_parts(folder, leaves)
    wall, cpu = (float(np.median(some)) for some in zip(*shares[1:], strict=True))
    return {
        "share": (wall, cpu),
        "end": timed_twice(lambda: BACKEND.finish_multiprocess(first)),
        "open": timed_twice(lambda: BACKEND.open(location_of(first.path)).close()),
    }


def written_parts(folder: str, leaves: int) -> tuple[ProcessSave, list[Seconds]]:
    """The part of each process of that save, written; returns what process 0 finishes it by, and how long each took."""
    count, options = len(jax.devices()), WriteOptions()
    sharding = _Over(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    path, shares = os.path.join(folder, "checkpoint_2"), list[Seconds]()

    def save_of(index: int) -> ProcessSave:
        process = ProcessInfo(index, count)
        return ProcessSave(path, BACKEND.prepare(_tree(index, count, leaves, sharding), process), options, process)

    first = save_of(0)
    BACKEND.begin_multiprocess(first)
    for index in range(count):  # one at a time: all plans of a thousand processes would take their memory
        own = save_of(index) if index else first
        shares.append(timed_twice(functools.partial(BACKEND.write_process_part, own)))
    return first, shares


def _tree(index: int, count: int, leaves: int, sharding: Any) -> Branch:
    box, shape = (slice(index * ELEMENTS, (index + 1) * ELEMENTS),), (count * ELEMENTS,)
    values = np.random.default_rng(index).random(ELEMENTS, np.float32)
    return Branch(
        {
            f"leaf_{item:06}": HostCopy(shape, values.dtype, (Shard(box, values + np.float32(item)),), sharding)
            for item in range(leaves)
        }
    )
