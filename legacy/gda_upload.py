"""Upload the distributed arrays of a multi-process save to a store, chunk by chunk."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from flax_ckpt_compat._core.object_store import client, specs
from flax_ckpt_compat._core.object_store.multiprocess import MultiprocessUpload
from flax_ckpt_compat._core.object_store.store_errors import retry
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_METADATA
from flax_ckpt_compat._core.thread_pools import Pool
from flax_ckpt_compat._core.tree import Shard

from .gda_tree import DistributedArray

_AT_ONCE = 16
# Bytes of shards that are compressed and sent at the same time.
_IN_FLIGHT = 2**28


def write_shards(base: str, arrays: Iterable[DistributedArray], upload: MultiprocessUpload) -> list[str]:
    """Write this process's shards in parallel, and return their names relative to the folder of the save.

    Raises:
        StorageError: the store refused, or process 0 saves another shape or dtype.
    """
    pending: collections.deque[tuple[Future[None], int]] = collections.deque()
    written, total = [], 0
    with Pool(_AT_ONCE, thread_name_prefix="flax-ckpt-store") as pool:
        try:
            opened: dict[str, Future[Any]] = {}
            for array, shard in _shards(arrays):
                if array.subpath not in opened:
                    opened[array.subpath] = pool.submit(_open, _folder(base, array), array)
                pending.append((pool.submit(_write, opened[array.subpath], array, shard, base), shard.data.nbytes))
                written.append(f"{_folder(upload.tag, array)}/{array.name_of(shard)}")
                total += shard.data.nbytes
                while pending and (total > _IN_FLIGHT or pending[0][0].done()):
                    future, nbytes = pending.popleft()
                    total -= nbytes
                    future.result()
            for future, _ in pending:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return written


def _shards(arrays: Iterable[DistributedArray]) -> Iterator[tuple[DistributedArray, Shard]]:
    for array in arrays:
        for shard in array.shards():
            if math.prod(shard.data.shape):
                yield array, shard


def _folder(base: str, array: DistributedArray) -> str:
    return f"{base}/{array.subpath}" if array.subpath else base


def _write(opened: Future[Any], array: DistributedArray, shard: Shard, base: str) -> None:
    store = opened.result()[shard.index]  # submitted before this task, so this cannot deadlock the pool
    retry(_folder(base, array), "written", lambda: store.write(shard.data).commit, shard.data.nbytes)


def _open(folder: str, array: DistributedArray) -> Any:
    """Open the array that process 0 created, and check its shape and dtype."""
    import tensorstore

    # Shards are whole chunks, so a cache gains nothing.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}}, parent=specs.context())
    spec = {"driver": "zarr", "kvstore": client.spec(folder)}
    store = retry(folder, "opened", lambda: tensorstore.open(spec, open=True, context=context))
    array.check_matches(folder, tuple(store.shape), store.dtype.numpy_dtype)
    return store


def check(base: str, arrays: Iterable[DistributedArray], upload: MultiprocessUpload) -> None:
    """Check that all chunks are written; on ``gs://``, then write the commit file.

    Raises:
        StorageError: a chunk is missing; names the array.
    """
    written = set(upload.written())
    for array in arrays:
        folder = _folder(upload.tag, array)
        missing = [name for name in array.names() if f"{folder}/{name}" not in written]
        if missing or f"{folder}/{ZARR2_METADATA}" not in written:
            raise array.incomplete(_folder(base, array), missing or [ZARR2_METADATA])
    if upload.folder.startswith("gs://"):  # real Flax and jax look for the file before they read arrays
        text = f"Checkpoint commit was successful to {upload.folder}"
        client.write(f"{upload.folder}/{COMMIT_FILE}", text.encode())
