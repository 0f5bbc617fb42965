"""Small files and directories, synced to disk; operating-system errors become ours."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from flax_ckpt_compat._core import files
from flax_ckpt_compat._core.errors import StorageError


@contextlib.contextmanager
def storage_errors(path: str, doing: str) -> Iterator[None]:
    """Translates an OSError; ``doing`` completes "could not be …"."""
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
    """Creates a directory; its parent exists."""
    with storage_errors(path, "created"):
        os.mkdir(path)


def write_file(path: str, data: bytes) -> None:
    """Writes a new file and syncs it."""
    with storage_errors(path, "written"), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: str, value: Any) -> None:
    """Writes a value as JSON to a new file and syncs it."""
    write_file(path, json.dumps(value).encode())


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable."""
    with storage_errors(path, "synced"):
        files.sync_directory(path)
