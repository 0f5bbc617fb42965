"""Copy arrays from accelerators to host memory, all of them at once.

A GPU writes to page-locked memory by itself. Into any other memory its driver copies through small buffers: 0.5 GB of
an H200 took 12 to 15 ms one way, and 150 to 330 ms the other (jax 0.11.2, measured). jax keeps the page-locked memory
for the next transfers, up to 64 GB (``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB``). numpy sees it without a copy, and jax
remembers no second copy of the values, as it does for ``np.asarray`` of an array on a device.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core import jax_shards
from flax_ckpt_compat._core.array_boxes import full_box
from flax_ckpt_compat._core.tree import HostCopy, Shard

# Transfers of less take longer to start than numpy takes for a copy.
_MIN_BYTES = 64 * 2**10
# So many bytes are allocated together: if no memory can be locked, those before keep theirs.
_GROUP_BYTES = 2**30
_PAGE_LOCKED = "pinned_host"
# Share of the memory that jax may lock, of which its own transfers need some, too.
_SHARE = 0.75
# Dtypes of which devices hold several elements in a byte.
_PACKED = ("int2", "uint2", "int4", "uint4", "float4", "float6")


def _limit_of_jax() -> float:
    try:
        return float(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")) * 2**30
    except ValueError:
        return 0


@dataclasses.dataclass(slots=True)
class _Budget:
    nbytes: float  # of page-locked memory that one save may take


# Where jax finds no memory to lock, it waits for ten seconds (measured): no save shall meet that twice.
_budget = _Budget(_SHARE * _limit_of_jax())


class Transfers:
    """A batch of copies of arrays on accelerators: `add` the arrays, then `make` all copies at once."""

    def __init__(self) -> None:
        self._shards: list[tuple[HostCopy, tuple[slice, ...], Any]] = []

    def add(self, array: jax.Array, *, is_whole: bool) -> HostCopy:
        """Return the copy of an array, or of the shards that this process holds; `make` gives it its shards."""
        copy = HostCopy(array.shape, np.dtype(array.dtype), (), array.sharding)
        if is_whole:
            self._shards.append((copy, full_box(array.shape), array.addressable_data(0)))
        else:
            self._shards += [(copy, index, data) for index, data in jax_shards.first_shards(array)]
        return copy

    def make(self) -> None:
        """Make all copies. The caller blocks until the arrays have been computed and copied, and may donate them."""
        shards, self._shards = self._shards, []
        values = to_host([data for _, _, data in shards])
        for (copy, index, _), value in zip(shards, values, strict=True):
            copy.shards = (*copy.shards, Shard(index, value))


def can_lock_pages(sharding: Any) -> bool:
    """Return whether all devices of a sharding are GPUs, and the arrays lie in their own memory."""
    return sharding.memory_kind in (None, "device") and all(device.platform == "gpu" for device in sharding.device_set)


def is_on_host(sharding: Any) -> bool:
    """Return whether numpy sees the memory of the arrays without a copy."""
    if sharding.memory_kind in (_PAGE_LOCKED, "unpinned_host"):
        return True
    return all(device.platform == "cpu" for device in sharding.device_set)


def to_host(arrays: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Return the values of arrays, each of which lies on one device, in C order and read-only."""
    lockable = [at for at, array in enumerate(arrays) if _is_lockable(array)]
    values: dict[int, np.ndarray[Any, Any]] = {}
    used = 0
    for group in _groups(arrays, lockable):
        end = used + sum(arrays[at].nbytes for at in group)
        if end > _budget.nbytes:
            break
        try:
            values |= zip(group, _page_locked([arrays[at] for at in group]), strict=True)
        except jax.errors.JaxRuntimeError:  # no memory to lock; if it is another error, numpy's copy meets it, too
            _budget.nbytes = used
            break
        used = end
    rest = {at: array for at, array in enumerate(arrays) if at not in values}
    for array in rest.values():
        array.copy_to_host_async()
    values |= {at: np.asarray(array, order="C") for at, array in rest.items()}
    return [values[at] for at in range(len(arrays))]


def _is_lockable(array: Any) -> bool:
    """Return whether an array is large, and has elements of whole bytes: numpy has no others."""
    is_packed = array.dtype.name.startswith(_PACKED)
    return array.nbytes >= _MIN_BYTES and not is_packed and can_lock_pages(array.sharding)


def _groups(arrays: Sequence[Any], numbers: list[int]) -> Iterator[list[int]]:
    group: list[int] = []
    nbytes = 0
    for at in numbers:
        group.append(at)
        nbytes += arrays[at].nbytes
        if nbytes >= _GROUP_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _page_locked(arrays: list[Any]) -> list[np.ndarray[Any, Any]]:
    placed = jax.device_put(arrays, [array.sharding.with_memory_kind(_PAGE_LOCKED) for array in arrays])
    return [np.asarray(array, order="C") for array in jax.block_until_ready(placed)]
