"""Arrays that several processes hold, played by one: each `HostCopy` has the shards of one process."""

import types
from typing import Any

import numpy as np
from flax_ckpt_compat.legacy import BACKEND

from flax_ckpt_compat._core.backend import ProcessInfo, ProcessSave, WriteOptions
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import HostCopy, KeyData, Shard, iter_leaves
from tests.support.trees import to_branches

OPTIONS = WriteOptions()
_DEVICES = tuple(types.SimpleNamespace(process_index=index, id=index) for index in (0, 1))


class Halves:
    """A sharding that gives each of two processes half of the first axis."""

    is_fully_addressable = False
    is_fully_replicated = False
    device_set = _DEVICES

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] // 2, *shape[1:])


def whole(data: np.ndarray[Any, Any], sharding: Any) -> HostCopy:
    """A copy with one shard."""
    return HostCopy(data.shape, data.dtype, (Shard(tuple(slice(0, size) for size in data.shape), data),), sharding)


def half(whole: np.ndarray[Any, Any], process: int) -> HostCopy:
    """What one of two processes has of an array of which each holds half of the first axis."""
    middle = whole.shape[0] // 2
    index = (slice(process * middle, (process + 1) * middle), *(slice(0, size) for size in whole.shape[1:]))
    return HostCopy(whole.shape, whole.dtype, (Shard(index, whole[index]),), Halves())


class Spread:
    """Stands for an array that is spread, in trees for `save`."""

    def __init__(self, whole: Any):
        self.whole = np.asarray(whole)


def _of_process(tree: Any, process: int) -> Any:
    if isinstance(tree, dict):
        return {name: _of_process(child, process) for name, child in tree.items()}
    if isinstance(tree, KeyData):
        return KeyData(tree.impl, _of_process(tree.data, process))
    return half(tree.whole, process) if isinstance(tree, Spread) else tree


def write(temporary: str, tree: Any, options: WriteOptions = OPTIONS) -> None:
    """Writes what two processes save together, up to its publishing."""
    prepared = [BACKEND.prepare(to_branches(_of_process(tree, index)), ProcessInfo(index, 2)) for index in (0, 1)]
    BACKEND.begin_multiprocess(ProcessSave(temporary, prepared[0], options, ProcessInfo(0, 2)))
    for index in (1, 0):
        BACKEND.write_process_part(ProcessSave(temporary, prepared[index], options, ProcessInfo(index, 2)))
    BACKEND.finish_multiprocess(ProcessSave(temporary, prepared[0], options, ProcessInfo(0, 2)))


def save(path: Any, tree: Any, options: WriteOptions = OPTIONS) -> None:
    """Saves as two processes."""
    temporary = atomic.temporary_path(str(path))
    write(temporary, tree, options)
    atomic.publish(temporary, str(path))


def load(path: Any) -> dict[tuple[str, ...], Any]:
    """Every leaf by its key path."""
    reader = BACKEND.open(location_of(path))
    try:
        return {names: leaf.read() for names, leaf in iter_leaves(reader.tree) if leaf is not None}
    finally:
        reader.close()
