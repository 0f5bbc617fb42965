"""Open a checkpoint's files, local or in an object store, for TensorStore and for ranged reads."""

from __future__ import annotations

import os
from typing import Any

import tensorstore as ts

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.object_store import client, specs, store_errors
from flax_ckpt_compat._core.thread_pools import Pool

# TensorStore retries by itself for this long, beside the time for the bytes.
_TIMEOUT = 60.0  # seconds
_SLOWEST_RATE = 2**20  # bytes/s
_SIZES_AT_ONCE = 16


def directory_spec(path: str) -> dict[str, Any]:
    """Return TensorStore's spec of the directory ``path``."""
    return client.spec(path) if paths.is_url(path) else paths.local_kvstore(os.path.join(path, ""))


def new_context(path: str, cache_bytes: int) -> Any:
    """Return a TensorStore context with its own cache: nodes are cached by path, and paths are reused."""
    parent = specs.context() if paths.is_url(path) else None
    return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}}, parent=parent)


def wait(path: str, future: Any, nbytes: int = 0) -> Any:
    """Return the result of a TensorStore future about ``path``; if it is in a store, wait a limited time.

    Raises:
        StorageError: the store refused, or did not answer in time; all other errors are TensorStore's.
    """
    if not paths.is_url(path):
        return future.result()
    try:
        return future.result(timeout=_TIMEOUT + nbytes / _SLOWEST_RATE)
    except (ValueError, OSError, TimeoutError) as error:
        if isinstance(error, TimeoutError) or store_errors.is_store_error(error):
            raise store_errors.translate_error(path, "read", error) from error
        raise


def read_range(file: str, start: int, stop: int) -> bytes:
    """Read a range of a file; return fewer bytes if it ends before ``stop``.

    Raises:
        FileNotFoundError: there is no such file.
        OSError, StorageError: the system, or the store, refused.
    """
    if paths.is_url(file):
        return client.read_range(file, start, stop)
    with open(file, "rb") as opened:
        opened.seek(start)
        return opened.read(stop - start)


def sizes_of(files: list[str]) -> list[int | OSError]:
    """Return the size of each file, or the error; query stores concurrently."""
    if len(files) < 2 or not paths.is_url(files[0]):
        return list(map(_size, files))
    with Pool(min(_SIZES_AT_ONCE, len(files))) as pool:
        return list(pool.map(_size, files))


def _size(file: str) -> int | OSError:
    try:
        return paths.getsize(file)
    except OSError as error:
        return error
