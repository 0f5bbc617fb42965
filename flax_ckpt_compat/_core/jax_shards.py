"""Find the shards of jax arrays that are saved, without importing jax."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_SHARD_TRIES, _SHARD_PAUSE = 1000, 0.001  # s; until another thread has listed the shards of an array


def normalize_index(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return an index without steps as start and stop on every axis; jax omits them for whole axes."""
    return tuple(slice(*side.indices(length)[:2]) for side, length in zip(index, shape, strict=True))


@functools.lru_cache(maxsize=256)  # leaves share few shardings and shapes
def first_replicas(sharding: Any, shape: tuple[int, ...]) -> list[tuple[int, Any, tuple[slice, ...]]]:
    """Return position, device and index of the shards with ``replica_id`` 0 that this process holds."""
    found, seen, position = [], set[str](), 0
    for device, index in sharding.devices_indices_map(shape).items():
        box = normalize_index(index, shape)
        is_first, is_here = str(box) not in seen, device in sharding.addressable_devices
        if is_first and is_here:
            found.append((position, device, box))
        position += is_here
        seen.add(str(box))
    return found


def first_shards(array: Any) -> Iterator[tuple[tuple[slice, ...], Any]]:
    """Yield index and data of each of an array's `first_replicas`."""
    for position, device, index in first_replicas(array.sharding, array.shape):
        yield index, _shard_on(array, device, position)


def _shard_on(array: Any, device: Any, position: int) -> Any:
    """Return the data of an array's shard on a device, which should be at this position.

    jax lists the shards of an array on first use, without a lock: if two threads ask for them at once, one finds some
    of them only, and then some are there twice, at other positions (0.4.38 to 0.10.2, measured)."""
    is_whole = array.is_fully_replicated  # each of its shards is the whole array
    for _ in range(_SHARD_TRIES):
        try:
            for at in itertools.chain([position], itertools.count()):
                data = array.addressable_data(at)
                if is_whole or device in data.devices():
                    return data
        except IndexError:
            time.sleep(_SHARD_PAUSE)
    raise RuntimeError(f"jax lists no shard on {device} of an array of shape {array.shape}")


def start_transfer(array: Any) -> None:
    """Start the copy of a ``jax.Array`` from accelerators to the host."""
    with suppress(IndexError):  # see `first_shards`: the shards are then copied one after another
        array.copy_to_host_async()
