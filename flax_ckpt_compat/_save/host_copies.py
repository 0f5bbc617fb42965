"""Copy arrays to host memory before a save, all at once: of background saves every array, else what lies on GPUs.

New pages can cost far more than the copy, so each manager keeps the memory of its last save for the next one, once
nothing refers to the arrays in it. A GPU writes to page-locked memory by itself, which numpy sees without a copy; into
any other memory its driver copies through small buffers, which takes ten times as long.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core import jax_shards, memory
from flax_ckpt_compat._core.array_boxes import full_box
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import HostCopy, Shard

_THREADS = 4
# Below so many bytes, starting threads takes longer than copying, and a transfer to locked pages than numpy's copy.
_MIN_PARALLEL_BYTES, _MIN_LOCKED_BYTES = 4 * 2**20, 64 * 2**10
_BLOCK_BYTES = 64 * 2**20
_PAGE_LOCKED = "pinned_host"
# Bytes that one save may lock: three quarters of what jax may lock by default, as its own transfers need some, too.
# Where jax finds no memory to lock, it waits for ten seconds: no save shall meet that twice.
_most_locked = 48 * 2**30
# Dtypes of which devices hold several elements in a byte.
_PACKED = ("int2", "uint2", "int4", "uint4", "float4", "float6")

_Array = np.ndarray[Any, Any]
_BYTE = np.dtype(np.uint8)


# Manager → the blocks of memory of its last save, and what that has of each: once nothing refers to this, the block is
# free. Changed by single operations only, as a signal handler may save, too.
_kept: weakref.WeakKeyDictionary[Any, list[tuple[_Array, weakref.ref[_Array]]]] = weakref.WeakKeyDictionary()


class Copies:
    """A batch of array copies: add the arrays, then `make` all copies at once."""

    def __init__(self, manager: Any) -> None:
        """Use the memory of the manager's last save, if that save has ended."""
        self._manager, self._free = manager, list[_Array]()
        self._used: list[tuple[_Array, weakref.ref[_Array]]] = []
        with suppress(TypeError):  # an object that has no weak references, or no hash
            self._free = [block for block, lent in _kept.pop(manager, ()) if lent() is None]
        self._pairs: list[tuple[_Array, _Array]] = []
        self._shards: list[tuple[HostCopy, tuple[slice, ...], Any]] = []
        self._bytes, self._offset = np.empty(0, _BYTE), 0

    def add(self, source: _Array) -> _Array:
        """Return the copy of an array of numpy, in C order; its values are undefined until `make` has returned."""
        # At a page, the disk can take a large array from here past the page cache.
        alignment = memory.PAGE if source.nbytes >= memory.PAGED_FROM else memory.ALIGNMENT
        self._offset += -self._offset % alignment
        if self._offset + source.nbytes > self._bytes.nbytes:
            self._bytes, self._offset = self._next_block(source.nbytes), 0
        target = np.ndarray(source.shape, source.dtype, self._bytes, self._offset)
        self._offset += source.nbytes
        self._pairs.append((target, source))
        return target

    def add_jax_array(self, array: jax.Array, *, is_whole: bool, is_on_host: bool) -> HostCopy:
        """Return the copy of an array of jax: of the shards that this process holds, or of one that has it whole."""
        copy = HostCopy(array.shape, np.dtype(array.dtype), (), array.sharding)
        shards = jax_shards.first_shards(array)
        if is_whole:
            shards = iter([(full_box(array.shape), array if is_on_host else array.addressable_data(0))])
        if is_on_host:
            copy.shards = tuple(Shard(index, self.add(np.asarray(data))) for index, data in shards)
        else:
            self._shards += [(copy, index, data) for index, data in shards]
        return copy

    def _next_block(self, nbytes: int) -> _Array:
        found = next((number for number, block in enumerate(self._free) if block.nbytes >= nbytes), None)
        block = memory.empty_pages(max(_BLOCK_BYTES, nbytes)) if found is None else self._free.pop(found)
        lent: _Array = np.frombuffer(block.data, _BYTE)  # the base of views of it, and of views of these
        self._used.append((block, weakref.ref(lent)))
        return lent

    def make(self) -> None:
        """Make all copies; the caller may then change or donate the arrays. Nobody changes the copies any more."""
        pairs, self._pairs = self._pairs, []
        if sum([target.nbytes for target, _ in pairs]) < _MIN_PARALLEL_BYTES:
            _copy_all(pairs)
        else:
            in_parallel(_copy_all, [pairs[start::_THREADS] for start in range(_THREADS)], _THREADS)
        for target, _ in pairs:
            memory.freeze(target)
        with suppress(TypeError):
            _kept[self._manager] = self._used
        self._bytes, self._free, self._used = np.empty(0, _BYTE), [], []
        shards, self._shards = self._shards, []
        for (copy, index, _), value in zip(shards, to_host([data for _, _, data in shards]), strict=True):
            copy.shards = (*copy.shards, Shard(index, value))


def _copy_all(pairs: list[tuple[_Array, _Array]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


def can_lock_pages(sharding: Any) -> bool:
    """Return whether all devices of a sharding are GPUs, and the arrays lie in their own memory."""
    return sharding.memory_kind in (None, "device") and all(device.platform == "gpu" for device in sharding.device_set)


def is_on_host(sharding: Any) -> bool:
    """Return whether numpy sees the memory of the arrays without a copy."""
    if sharding.memory_kind in (_PAGE_LOCKED, "unpinned_host"):
        return True
    return all(device.platform == "cpu" for device in sharding.device_set)


def to_host(arrays: Sequence[Any]) -> list[_Array]:
    """Return the values of arrays, each of which lies on one device, in C order and read-only."""
    global _most_locked
    found, locked, used = list(arrays), list[int](), 0
    for at, array in enumerate(arrays):
        if _is_lockable(array) and used + array.nbytes <= _most_locked:
            locked.append(at)
            used += array.nbytes
    try:
        shardings = [arrays[at].sharding.with_memory_kind(_PAGE_LOCKED) for at in locked]
        placed = jax.block_until_ready(jax.device_put([arrays[at] for at in locked], shardings)) if locked else []
        for at, array in zip(locked, placed, strict=True):
            found[at] = array
    except jax.errors.JaxRuntimeError:  # no memory to lock; if it is another error, numpy's copy meets it, too
        _most_locked = 0
    for array in found:
        if not is_on_host(array.sharding):
            array.copy_to_host_async()
    return [np.asarray(array, order="C") for array in found]


def _is_lockable(array: Any) -> bool:
    """Return whether an array is large, and has elements of whole bytes: numpy has no others."""
    is_packed = array.dtype.name.startswith(_PACKED)
    return array.nbytes >= _MIN_LOCKED_BYTES and not is_packed and can_lock_pages(array.sharding)
