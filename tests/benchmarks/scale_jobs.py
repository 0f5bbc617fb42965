"""What the processes of a team do for ``tests.benchmarks.scale``: one save or restore, with everything counted."""

from __future__ import annotations

import collections
import contextlib
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax_ckpt_compat.legacy import BACKEND as MSGPACK
from jax.sharding import NamedSharding, PartitionSpec

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._save import key_value_store
from tests.benchmarks import scale_costs
from tests.benchmarks.systems import timed_twice
from tests.multiprocess.jobs import mesh, use
from tests.support.orbax_trees import BACKEND as ORBAX

# Divides by 16 devices, and is small enough to be stored inside of the index of Orbax's format.
LENGTH = 64
# A process that is alone has ``write`` for the last three.
_STAGES = ("prepare", "begin_multiprocess", "write_process_part", "finish_multiprocess", "write")


class Counting:
    """Stands for jax's client of the key-value store, and counts by name what is asked of it.

    Attributes:
        counts: method → how often it was called.
        sent, received: bytes of keys and values.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.counts: collections.Counter[str] = collections.Counter()
        self.sent = self.received = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def counted(*args: Any) -> Any:
            self.counts[name] += 1
            self.sent += sum(len(arg) for arg in args if isinstance(arg, str))
            result = method(*args)
            texts = [text for pair in result for text in pair] if isinstance(result, list) else [result or ""]
            self.received += sum(map(len, texts))
            return result

        return counted


def arrays(number: int, start: float) -> dict[str, Any]:
    """Small float32 arrays, split over all devices, that differ from each other."""
    sharding = NamedSharding(mesh("flat"), PartitionSpec("x"))
    where = sharding.addressable_devices_indices_map((LENGTH,)).items()
    values = [np.arange(LENGTH, dtype=np.float32) + start + item for item in range(number)]
    parts = [jax.device_put([value[index] for value in values], device) for device, index in where]
    made = (
        jax.make_array_from_single_device_arrays((LENGTH,), sharding, list(shards))
        for shards in zip(*parts, strict=True)
    )
    return {f"leaf_{item:06}": array for item, array in enumerate(made)}


def save(folder: str, orbax: bool, leaves: int, step: int) -> dict[str, Any]:
    """Saves so many arrays.

    Returns:
        ``messages`` (by method), ``sent`` and ``received`` (bytes), ``seconds`` by stage, and ``cpu``, those of the
        processor in all threads.
    """
    use(orbax)
    tree = {"params": arrays(leaves, step)}
    counting, seconds = Counting(key_value_store._client()), dict[str, float]()
    backend = ORBAX if orbax else MSGPACK
    start, cpu = time.perf_counter(), time.process_time()
    with contextlib.ExitStack() as stack, config.override(coordination_timeout=300.0):
        stack.enter_context(mock.patch.object(key_value_store, "_client", lambda: counting))
        for stage in _STAGES:
            stack.enter_context(_timed(backend, stage, seconds))
        checkpoints.save_checkpoint_multiprocess(folder, tree, step, keep=2)
    seconds["all"] = time.perf_counter() - start
    return {
        "messages": dict(counting.counts),
        "sent": counting.sent,
        "received": counting.received,
        "seconds": seconds,
        "cpu": time.process_time() - cpu,
    }


@contextlib.contextmanager
def _timed(backend: Any, stage: str, seconds: dict[str, float]) -> Iterator[None]:
    method: Callable[..., Any] = getattr(backend, stage)

    def timed(_: Any, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args)
        finally:
            seconds[stage] = time.perf_counter() - start

    with mock.patch.object(type(backend), stage, timed):
        yield


def restore(folder: str, leaves: int, step: int) -> dict[str, Any]:
    """Restores and checks them.

    Returns:
        ``messages``, ``read`` (bytes), ``calls`` (reads from files), ``seconds`` and ``cpu``.
    """
    wanted = arrays(leaves, step)
    target = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in wanted.items()}
    counting = Counting(key_value_store._client())
    with mock.patch.object(key_value_store, "_client", lambda: counting):
        before, got = _reads(), dict[str, Any]()
        seconds, cpu = timed_twice(lambda: got.update(_restored(folder, target, step)))
        after = _reads()
    for name, array in wanted.items():
        for mine, theirs in zip(got[name].addressable_shards, array.addressable_shards, strict=True):
            assert np.array_equal(mine.data, theirs.data), name
    return {
        "messages": dict(counting.counts),
        "read": after.bytes - before.bytes,
        "calls": after.calls - before.calls,
        "seconds": seconds,
        "cpu": cpu,
    }


def _restored(folder: str, target: dict[str, Any], step: int) -> dict[str, Any]:
    restored: dict[str, dict[str, Any]] = checkpoints.restore_checkpoint(folder, {"params": target}, step)
    return jax.block_until_ready(restored)["params"]


def _reads() -> types.SimpleNamespace:
    """What this process has read from files and pipes, as the kernel counts it."""
    with open("/proc/self/io", encoding="ascii") as file:
        fields = dict(line.split(": ") for line in file.read().splitlines())
    return types.SimpleNamespace(bytes=int(fields["rchar"]), calls=int(fields["syscr"]))


def sharding_bytes(names: list[str]) -> int:
    """`scale_costs.shardings` of the arrays that `save` saves."""
    return scale_costs.shardings(names, NamedSharding(mesh("flat"), PartitionSpec("x")))
