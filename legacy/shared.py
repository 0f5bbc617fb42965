"""Writing what several processes save together: a msgpack file, and its folder of arrays."""

from __future__ import annotations

import collections
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from flax_ckpt_compat._core import arrays, files
from flax_ckpt_compat._core.backend import Share
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.tree import Shard

from .spread import SharedTree, SpreadArray
from .writer import write_tree

_METADATA = ".zarray"
# Syncing is waiting for the disk, most of all.
_THREADS = 16
# Of shards that are compressed and written at once.
_IN_FLIGHT = 2**30


def begin(path: str, prepared: SharedTree) -> None:
    """Makes the folder of arrays and all in it but the data, and syncs it; no folder where there are no arrays."""
    if not prepared.arrays:
        return
    base = os.path.join(arrays.folder_of(path), arrays.begin(path))
    made = {arrays.folder_of(path), base}
    for array in prepared.arrays:
        folder = os.path.join(base, array.subpath)
        os.makedirs(folder, exist_ok=True)
        while folder not in made:
            made.add(folder)
            folder = os.path.dirname(folder)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="flax-ckpt-write") as pool:
        _drain(pool.map(lambda array: _write_metadata(base, array), prepared.arrays))
        _drain(pool.map(files.sync_directory, made))


def write_share(path: str, prepared: SharedTree, share: Share) -> None:
    """Writes this process's shards, and in process 0 the file."""
    before = arrays.nest_in(path)
    _write_shards(os.path.join(arrays.folder_of(path), before), prepared.arrays)
    if share.index == 0:
        write_tree(path, prepared.document(before))


def end(path: str, prepared: SharedTree) -> None:
    """Checks that all chunks of all arrays are there.

    Raises:
        StorageError: some are not; names the array.
    """
    base = os.path.join(arrays.folder_of(path), arrays.nest_in(path))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="flax-ckpt-check") as pool:
        _drain(pool.map(lambda array: _check(base, array), prepared.arrays))


def _drain(results: Iterable[None]) -> None:
    """Raises what one of them raised."""
    for _ in results:
        pass


def _write_metadata(base: str, array: SpreadArray) -> None:
    path = os.path.join(base, array.subpath, _METADATA)
    with open(path, "xb") as file:
        file.write(array.metadata)
        file.flush()
        os.fsync(file.fileno())


def _write_shards(base: str, spread: Iterable[SpreadArray]) -> None:
    """Writes with TensorStore, which syncs each chunk and its name; some at once, and never all."""
    import tensorstore

    # Shards fall on whole chunks: nothing is gained by keeping them.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    waiting: collections.deque[tuple[SpreadArray, Any, int]] = collections.deque()
    total = 0
    try:
        for array in spread:
            with _translated(base, array):
                store = None
                for shard in filter(lambda shard: math.prod(shard.data.shape), array.shards()):
                    store = store or _open(tensorstore, os.path.join(base, array.subpath), array, context)
                    waiting.append((array, _begin_write(store, shard), shard.data.nbytes))
                    total += shard.data.nbytes
            while total > _IN_FLIGHT:
                total -= _finish_write(base, *waiting.popleft())
        while waiting:
            _finish_write(base, *waiting.popleft())
    finally:
        # After a failure nothing may go on writing into a folder that is about to be removed.
        for _, write, _ in waiting:
            write.exception()


def _finish_write(base: str, array: SpreadArray, write: Any, nbytes: int) -> int:
    with _translated(base, array):
        write.result()
    return nbytes


@contextmanager
def _translated(base: str, array: SpreadArray) -> Iterator[None]:
    """TensorStore's errors as ours."""
    try:
        yield
    except StorageError:
        raise
    except (ValueError, RuntimeError, OSError) as error:
        folder, name = os.path.join(base, array.subpath), array.subpath or "the array"
        message = f"{folder}: writing {name} failed: {error}; free space or choose another place"
        raise StorageError(message, path=folder, errno=getattr(error, "errno", None)) from error


def _open(tensorstore: Any, folder: str, array: SpreadArray, context: Any) -> Any:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": folder}}
    store = tensorstore.open(spec, open=True, context=context).result()
    if (tuple(store.shape), store.dtype.numpy_dtype) != (array.shape, array.dtype):
        found = f"{store.dtype.name}{tuple(store.shape)} by process 0 and {array.dtype}{array.shape} by this one"
        message = f"{folder}: {array.subpath or 'the array'} is saved as {found}; all processes have to save one tree"
        raise StorageError(message, path=folder)
    return store


def _begin_write(store: Any, shard: Shard) -> Any:
    """A future of the write having come to the disk."""
    return store[shard.index].write(shard.data, can_reference_source_data_indefinitely=True)


def _check(base: str, array: SpreadArray) -> None:
    folder = os.path.join(base, array.subpath)
    there = set(os.listdir(folder))
    # Asked for by its name as well: over a network, a list of names may be older than the file.
    lost = [name for name in _names(array) if name not in there and not os.path.exists(os.path.join(folder, name))]
    if lost:
        some = ", ".join(lost[:3])
        message = f"{folder}: {len(lost)} of the chunks of {array.subpath or 'the array'} were not written ({some}"
        raise StorageError(
            f"{message}, …); do all processes save the same tree, and into a directory that they share?", path=folder
        )


def _names(array: SpreadArray) -> Iterator[str]:
    """The names of an array's chunks; none where it has no elements."""
    counts = [math.ceil(size / chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
    for index in itertools.product(*map(range, counts)):
        yield ".".join(map(str, index)) or "0"
