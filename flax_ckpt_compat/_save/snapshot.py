"""Convert the user's tree for a backend: validated, in stored order, and copied to the host's memory, all at once.

Of background saves every array is copied, else what lies on GPUs. New pages can cost far more than the copy, so each
manager keeps the memory of its last save for the next one, once nothing refers to the arrays in it. A GPU writes to
page-locked memory by itself, which numpy sees without a copy; into any other its driver copies ten times as slowly.
"""

from __future__ import annotations

import functools
import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.array_boxes import full_box
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Branch, Container, HostCopy, KeyData, Node, Path, Shard, first_shards, show_path
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat._trees import depth, prng_keys, state_dict
from flax_ckpt_compat.errors import MPACheckpointingRequiredError

_log = logging.getLogger("flax_ckpt_compat")
# Flax's msgpack format refuses subclasses of int, float and str, Orbax stores their values; msgpack takes buffers.
# The base classes' own methods: a subclass may override the conversion.
_BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    **dict.fromkeys((bytes, bytearray, memoryview), lambda buffer: memoryview(buffer).tobytes()),
}
_EXACT = {bool, int, float, complex, str, bytes, type(None)}
_warned: set[type] = set()
_MIN_SHARED_BYTES = 2**20  # smaller replicated arrays are left to process 0: they are written together
# Arrays that are replicated over processes, process 0 among them: which processes hold each, dtype and shape.
Replicas = dict[Path, tuple[tuple[int, ...], str, tuple[int, ...]]]
_THREADS = 4
# Below so many bytes, starting threads takes longer than copying, and a transfer to locked pages than numpy's copy.
_MIN_PARALLEL_BYTES, _MIN_LOCKED_BYTES = 4 * 2**20, 64 * 2**10
_BLOCK_BYTES = 64 * 2**20
_PAGE_LOCKED = "pinned_host"
# Bytes that one save may lock: three quarters of what jax may lock by default, as its own transfers need some, too.
# Where jax finds no memory to lock, it waits for ten seconds: no save shall meet that twice.
_most_locked = 48 * 2**30
_PACKED = ("int2", "uint2", "int4", "uint4", "float4", "float6")  # devices hold several elements in a byte

_Array = np.ndarray[Any, Any]
_BYTE = np.dtype(np.uint8)

# Manager → the blocks of memory of its last save, and what that has of each: once nothing refers to this, the block is
# free. Changed by single operations only, as a signal handler may save, too.
_kept: weakref.WeakKeyDictionary[Any, list[tuple[_Array, weakref.ref[_Array]]]] = weakref.WeakKeyDictionary()


def tree_to_save(target: Any, request: SaveRequest, replicas: Replicas | None = None) -> Node:
    """Return the neutral tree, for a background save with copies of all values; ``replicas`` gets what several hold."""
    snapshot = _Snapshot(request, replicas)
    tree = state_dict.describe(target)
    # Saving is an explicit request to move data to the host, also under jax.transfer_guard("disallow").
    with jax.transfer_guard_device_to_host("allow"):
        if isinstance(tree, Branch):
            snapshot.convert(tree, ())
        else:
            tree = snapshot.leaf(tree, ())
        depth.check(snapshot.levels, request.path)
        snapshot.copies.make()
    return tree


class _Snapshot:
    """Converter of one tree; caches which types of leaves need no conversion."""

    def __init__(self, request: SaveRequest, replicas: Replicas | None = None):
        self._request, self._replicas = request, replicas
        self.levels = 0  # depth of the tree so far
        # The arrays to copy: all in the background. In the foreground those of GPUs, but of several processes none:
        # each copies what it writes, and no more, while it writes.
        self.copies, self._in_background = Copies(request.async_manager), bool(request.async_manager)
        self._in_order = request.multiprocess and backend_for(request.format).uses_gda_folder
        # Types of leaves that are saved as they are, and of jax arrays that need no check if fully addressable.
        self._simple_types: set[type] = set()
        self._array_types: set[type] = set()
        self._addressable = functools.cache(operator.attrgetter("is_fully_addressable"))  # by sharding
        self._traits_of = functools.cache(_traits_of)

    def convert(self, branch: Branch, path: Path) -> None:
        """Convert all leaves below a branch, in place."""
        self.levels = max(self.levels, len(path) + 1)
        if self._in_order:  # as text: '10' before '2', in lists too
            branch.children = {name: branch.children[name] for name in sorted(branch.children)}
            branch.container = Container.DICT
        children, is_addressable = branch.children, self._addressable
        if self._simple_types.issuperset(map(type, children.values())):
            return
        for name, child in children.items():
            kind = type(child)
            if kind in self._simple_types:
                continue
            if kind in self._array_types and is_addressable(child.sharding) and not child.is_deleted():
                children[name] = self._array(child)
            elif kind is Branch:
                self.convert(child, (*path, name))
            else:
                children[name] = self.leaf(child, (*path, name))

    def leaf(self, leaf: Any, path: Path) -> Any:
        """Return a leaf as it is saved."""
        value = _checked(path, plain(leaf, path), self._request)
        if self._replicas is not None and value is not leaf and isinstance(leaf, jax.Array):
            holders = tuple(sorted(_owners(leaf.sharding)))
            if len(holders) > 1 and not prng_keys.is_prng_key(leaf) and leaf.nbytes >= _MIN_SHARED_BYTES:
                self._replicas[path] = holders, str(leaf.dtype), leaf.shape
        split = prng_keys.split_key(value)
        if split is value and type(value) is type(leaf):  # so are others of this type
            if isinstance(value, jax.Array):
                self._array_types.add(type(value))
            elif not self._in_background or not isinstance(value, np.ndarray):
                self._simple_types.add(type(value))
        if isinstance(split, jax.Array):  # copies on the host are filled in by `make`
            return self._array(split)
        if isinstance(split, KeyData) and isinstance(split.data, jax.Array):
            return KeyData(split.impl, self._array(split.data))
        # For an array of another process, no memory is held.
        if not self._in_background or not isinstance(split, np.ndarray) or isinstance(leaf, jax.Array):
            return split
        return self.copies.add(split) if type(split) is np.ndarray and not split.dtype.hasobject else split.copy()

    def _array(self, array: jax.Array) -> jax.Array | HostCopy:
        is_whole, is_on_host, is_quick = self._traits_of(array.sharding)
        if self._in_background or (is_quick and not is_on_host and not self._request.multiprocess):
            return self.copies.add_jax_array(array, is_whole=is_whole, is_on_host=is_on_host)
        return array


def _traits_of(sharding: Any) -> tuple[bool, bool, bool]:
    """Return whether one device here holds a whole array, whether numpy sees it, and whether a GPU may copy it."""
    is_whole = sharding.is_fully_replicated and sharding.is_fully_addressable
    return is_whole, is_on_host(sharding), can_lock_pages(sharding)


def _checked(path: Path, leaf: Any, request: SaveRequest) -> Any:
    """Return the leaf if it has values that this process can read, alone or, in a multi-process save, in part."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        why = "is abstract (a ShapeDtypeStruct): it has no values to save"
        raise _unsupported(path, f"{why}; pass the arrays, not the result of jax.eval_shape")
    if isinstance(leaf, jax.core.Tracer):
        why = "save_checkpoint was called inside of jit or another transformation"
        remedy = "return the state from it, and save outside of it"
        raise _unsupported(path, f"has no value yet (a Tracer): {why}; {remedy}")
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.is_deleted():
        raise _unsupported(path, "was deleted, most likely donated to a jitted function; save before that call")
    if leaf.is_fully_addressable:
        return leaf
    if request.multiprocess:
        return _from_processes(path, leaf)
    if leaf.is_fully_replicated and leaf.sharding.addressable_devices:
        return leaf.addressable_data(0)
    name = show_path(path)
    what = f"{name} is spread over several processes and this one sees only a part of it"
    remedy = "use save_checkpoint_multiprocess, called by all processes."
    raise MPACheckpointingRequiredError(f"{request.refusal}: {what}; {remedy}", path=request.path, leaf=name)


def _unsupported(path: Path, why: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(f"{show_path(path)} {why}", leaf=show_path(path))


@functools.lru_cache(maxsize=64)
def _owners(sharding: Any) -> frozenset[int]:
    """Return the indices of the processes that hold parts of an array of this sharding."""
    return frozenset(int(device.process_index) for device in sharding.device_set)


def _from_processes(path: Path, leaf: jax.Array) -> Any:
    """Return what this process saves of an array that spans processes; process 0 alone writes what it has whole."""
    owners = _owners(leaf.sharding)
    if 0 in owners and (leaf.is_fully_replicated or len(owners) == 1):
        return leaf.addressable_data(0) if leaf.sharding.addressable_devices else prng_keys.placeholder(leaf)
    if len(owners) == 1:
        remedy = "spread or replicate it over several processes, or put it on process 0, before saving"
        blind = f"process {jax.process_index()} sees nothing of it"
        raise _unsupported(path, f"lies wholly on the devices of process {min(owners)}, and {blind}; {remedy}")
    return leaf


def plain(leaf: Any, path: Path) -> Any:
    """Convert a leaf of a subclass of a Python type, or a buffer, to the plain value; warn once per type."""
    kind = type(leaf)
    if kind in _EXACT or not isinstance(leaf, tuple(_BASES)) or isinstance(leaf, np.generic):
        return leaf
    value = next(convert for base, convert in _BASES.items() if isinstance(leaf, base))(leaf)
    if kind not in _warned:
        _warned.add(kind)
        _log.warning(
            "%s: a %s.%s is saved as the plain %s %.100r, and restored as that",
            show_path(path), kind.__module__, kind.__qualname__, type(value).__name__, value
        )  # fmt: skip
    return value


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
        shards = first_shards(array)
        if is_whole:
            shards = iter([(full_box(array.shape), array if is_on_host else array.addressable_data(0))])
        if is_on_host:
            copy.shards = tuple(Shard(index, self.add(np.asarray(data))) for index, data in shards)
        else:
            self._shards += [(copy, index, data) for index, data in shards]
        return copy

    def _next_block(self, nbytes: int) -> _Array:
        at = next((number for number, block in enumerate(self._free) if block.nbytes >= nbytes), None)
        block = memory.empty((max(_BLOCK_BYTES, nbytes),), _BYTE, memory.PAGE) if at is None else self._free.pop(at)
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
            _freeze(target)
        with suppress(TypeError):
            _kept[self._manager] = self._used
        self._bytes, self._free, self._used = np.empty(0, _BYTE), [], []
        shards, self._shards = self._shards, []
        for (copy, index, _), value in zip(shards, to_host([data for _, _, data in shards]), strict=True):
            copy.shards = (*copy.shards, Shard(index, value))


def _freeze(array: Any) -> None:
    """Make an array and the memory that it is in read-only, so that for `memory.may_change` nobody changes it."""
    while isinstance(array, np.ndarray):
        array.flags.writeable = False
        array = array.base


def _copy_all(pairs: list[tuple[_Array, _Array]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


def can_lock_pages(sharding: Any) -> bool:
    """Return whether all devices of a sharding are GPUs, and the arrays lie in their own memory."""
    return sharding.memory_kind in (None, "device") and all(device.platform == "gpu" for device in sharding.device_set)


def is_on_host(sharding: Any) -> bool:
    """Return whether numpy sees the memory of the arrays without a copy."""
    kinds = (_PAGE_LOCKED, "unpinned_host")
    return sharding.memory_kind in kinds or all(device.platform == "cpu" for device in sharding.device_set)


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
