"""The files of a checkpoint for TensorStore and for ranged reads, in a local directory or in an object store."""

from __future__ import annotations

import os
from typing import Any

import tensorstore as ts

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.object_store import client, specs, store_errors
from flax_ckpt_compat._core.thread_pools import Pool

# Of waiting for TensorStore, which tries again by itself: seconds, beside the time that the bytes may take.
_TIMEOUT = 60.0
_SLOWEST_RATE = 2**20  # bytes/s
_SIZES_AT_ONCE = 16


def directory_spec(path: str) -> dict[str, Any]:
    """How TensorStore opens the directory ``path``."""
    return client.spec(path) if paths.is_url(path) else paths.local_kvstore(os.path.join(path, ""))


def new_context(path: str, cache_bytes: int) -> Any:
    """A TensorStore context with a cache of its own, because nodes are cached by path and paths are used again."""
    parent = specs.context() if paths.is_url(path) else None
    return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}}, parent=parent)


def wait(path: str, future: Any, nbytes: int = 0) -> Any:
    """The result of TensorStore's future about the files of ``path``, in bounded time where those are in a store.

    Raises:
        StorageError: the store refused, or did not answer in time; all other errors are TensorStore's.
    """
    if not paths.is_url(path):
        return future.result()
    try:
        return future.result(timeout=_TIMEOUT + nbytes / _SLOWEST_RATE)
    except (ValueError, OSError, TimeoutError) as error:
        if isinstance(error, TimeoutError) or store_errors.is_refusal(error):
            raise store_errors.refused(path, "read", error) from error
        raise


def read_range(file: str, start: int, stop: int) -> bytes:
    """Bytes of a file; fewer where it ends before ``stop``.

    Raises:
        FileNotFoundError: there is none.
        OSError, StorageError: the system, or the store, refused.
    """
    if paths.is_url(file):
        return client.read_range(file, start, stop)
    with open(file, "rb") as opened:
        opened.seek(start)
        return opened.read(stop - start)


def sizes_of(files: list[str]) -> list[int | OSError]:
    """Bytes in each file, or why that cannot be told; those in stores are asked for side by side."""
    if len(files) < 2 or not paths.is_url(files[0]):
        return list(map(_size, files))
    with Pool(min(_SIZES_AT_ONCE, len(files))) as pool:
        return list(pool.map(_size, files))


def _size(file: str) -> int | OSError:
    try:
        return paths.getsize(file)
    except OSError as error:
        return error
