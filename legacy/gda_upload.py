"""The arrays of a save by several processes, written chunk by chunk into a store."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from flax_ckpt_compat._core.object_store import client, specs
from flax_ckpt_compat._core.object_store.multiprocess import MultiprocessUpload
from flax_ckpt_compat._core.object_store.store_errors import attempt
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_METADATA
from flax_ckpt_compat._core.thread_pools import Pool
from flax_ckpt_compat._core.tree import Shard

from .gda_tree import SpreadArray

_AT_ONCE = 16
# Of shards that are compressed and sent at once.
_IN_FLIGHT = 2**28


def write_shards(base: str, spread: Iterable[SpreadArray], upload: MultiprocessUpload) -> list[str]:
    """Writes this process's shards, several at once, and returns their names relative to the folder of the save.

    Raises:
        StorageError: the store refused, or process 0 has described another array.
    """
    waiting: collections.deque[tuple[Future[None], int]] = collections.deque()
    written, total = [], 0
    with Pool(_AT_ONCE, thread_name_prefix="flax-ckpt-store") as pool:
        try:
            opened: dict[str, Future[Any]] = {}
            for array, shard in _all(spread):
                if array.subpath not in opened:
                    opened[array.subpath] = pool.submit(_open, _folder(base, array), array)
                waiting.append((pool.submit(_write, opened[array.subpath], array, shard, base), shard.data.nbytes))
                written.append(f"{_folder(upload.tag, array)}/{array.name_of(shard)}")
                total += shard.data.nbytes
                while waiting and (total > _IN_FLIGHT or waiting[0][0].done()):
                    future, nbytes = waiting.popleft()
                    total -= nbytes
                    future.result()
            for future, _ in waiting:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return written


def _all(spread: Iterable[SpreadArray]) -> Iterator[tuple[SpreadArray, Shard]]:
    for array in spread:
        for shard in array.shards():
            if math.prod(shard.data.shape):
                yield array, shard


def _folder(base: str, array: SpreadArray) -> str:
    return f"{base}/{array.subpath}" if array.subpath else base


def _write(opened: Future[Any], array: SpreadArray, shard: Shard, base: str) -> None:
    store = opened.result()[shard.index]  # was begun before this, so it is not waited for in vain
    attempt(_folder(base, array), "written", lambda: store.write(shard.data).commit, shard.data.nbytes)


def _open(folder: str, array: SpreadArray) -> Any:
    """The array as process 0 has described it."""
    import tensorstore

    # Shards fall on whole chunks: nothing is gained by keeping them.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}}, parent=specs.context())
    spec = {"driver": "zarr", "kvstore": client.spec(folder)}
    store = attempt(folder, "opened", lambda: tensorstore.open(spec, open=True, context=context))
    array.check_same(folder, tuple(store.shape), store.dtype.numpy_dtype)
    return store


def check(base: str, spread: Iterable[SpreadArray], upload: MultiprocessUpload) -> None:
    """Raises if a chunk is missing; where readers want a sign that all is there, it is written.

    Raises:
        StorageError: names the array.
    """
    there = set(upload.written())
    for array in spread:
        inside = _folder(upload.tag, array)
        lost = [name for name in array.names() if f"{inside}/{name}" not in there]
        if lost or f"{inside}/{ZARR2_METADATA}" not in there:
            raise array.incomplete(_folder(base, array), lost or [ZARR2_METADATA])
    if upload.folder.startswith("gs://"):  # real Flax and jax look for the file before they read arrays
        text = f"Checkpoint commit was successful to {upload.folder}"
        client.write(f"{upload.folder}/{COMMIT_FILE}", text.encode())
