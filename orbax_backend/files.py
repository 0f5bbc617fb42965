"""Write small files and directories, synced to disk; raise `StorageError` for OSErrors."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Iterator
from typing import Self

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.thread_pools import Pool

_WRITES_AT_ONCE = 4


@contextlib.contextmanager
def storage_errors(path: str, doing: str) -> Iterator[None]:
    """Translate an OSError; ``doing`` completes "could not be …"."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} could not be {doing}: {error.strerror or error}; check the disk's space and permissions",
            path=path,
            errno=error.errno,
        ) from error


def make_directory(path: str) -> None:
    """Create a directory in an existing one."""
    with storage_errors(path, "created"):
        os.mkdir(path)


def write_file(path: str, data: bytes) -> None:
    """Write and sync a new file."""
    with storage_errors(path, "written"), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class ConcurrentWrites:
    """Writes and syncs new files concurrently; leaving the block waits for them."""

    def __enter__(self) -> Self:
        self._pool = Pool(_WRITES_AT_ONCE, thread_name_prefix="flax-ckpt-write")
        self._pending: list[concurrent.futures.Future[None]] = []
        return self

    def add(self, path: str, data: bytes) -> None:
        """Start to write a file."""
        self._pending.append(self._pool.submit(write_file, path, data))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown()
        for write in self._pending if kind is None else ():
            write.result()


def sync_directory(path: str) -> None:
    """Sync the entries of a directory."""
    with storage_errors(path, "synced"):
        atomic.sync_directory(path)
