"""Read databases in subdirectories of a checkpoint.

Releases 0.1 to 0.4.1 took the name of an array for a path, so that the array ``a/b`` is the array ``b`` of a database
in the directory ``a`` (measured).

Releases 0.4.3 to 0.4.7 with ``use_ocdbt=False`` still wrote the process database, never merged it, and made an empty
directory for every array; they could not read that back themselves (0.4.4, measured).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.orbax_layout import ARRAY_METADATA_FILES, MANIFEST, MSGPACK_FILE, TREE_METADATA

from .key_index import open_index, process_databases
from .stored_values import ByteRange, Index, StoredValue, stays_inside


def unmerged_database(path: str, names: Iterable[str]) -> str | None:
    """Return the name of the process database of a finished checkpoint that never merged it, or None.

    Args:
        path: directory of the checkpoint.
        names: stored names of its leaves.
    """
    if paths.isfile(os.path.join(path, MANIFEST)):
        return None
    processes = process_databases(path)
    finished = all(paths.isfile(os.path.join(path, file)) for file in (MSGPACK_FILE, TREE_METADATA))
    if len(processes) != 1 or not finished:
        return None
    folders = any(name and stays_inside(name) and paths.isdir(os.path.join(path, name)) for name in names)
    return processes[0] if folders else None


class SubdirIndex:
    """The index of a database in a subdirectory of the checkpoint."""

    def __init__(self, path: str, folder: str) -> None:
        self._folder = folder
        self._index = open_index(os.path.join(path, folder), use_ocdbt=True)

    def find(self, key: str) -> StoredValue | None:
        """See `Index.find`."""
        value = self._index.find(key)
        if not isinstance(value, ByteRange):
            return value
        return ByteRange(f"{self._folder}/{value.file}", value.offset, value.length)

    def get(self, key: str) -> bytes | None:
        """See `Index.get`."""
        return self._index.get(key)

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """See `Index.kvstore`."""
        return self._index.kvstore(prefix)


class NestedIndex:
    """The index of a checkpoint and of databases in its subdirectories."""

    def __init__(self, path: str, top: Index) -> None:
        self._path, self._top = path, top
        self._below: dict[str, Index | None] = {}

    def find(self, key: str) -> StoredValue | None:
        """See `Index.find`."""
        value = self._top.find(key)
        folder, index = self._database_of(key) if value is None else ("", None)
        return index.find(key[len(folder) + 1 :]) if index is not None else value

    def get(self, key: str) -> bytes | None:
        """See `Index.get`."""
        value = self._top.get(key)
        folder, index = self._database_of(key) if value is None else ("", None)
        return index.get(key[len(folder) + 1 :]) if index is not None else value

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """See `Index.kvstore`."""
        folder, index = self._database_of(prefix) if self._is_below(prefix) else ("", None)
        return index.kvstore(prefix[len(folder) + 1 :]) if index is not None else self._top.kvstore(prefix)

    def _is_below(self, prefix: str) -> bool:
        return all(self._top.find(prefix + name) is None for name in ARRAY_METADATA_FILES)

    def _database_of(self, key: str) -> tuple[str, Index | None]:
        """Return the deepest directory on the path of a key that holds a database, and its index."""
        parts = key.split("/")
        for depth in range(len(parts) - 1, 0, -1):
            folder = "/".join(parts[:depth])
            index = self._open(folder)
            if index is not None:
                return folder, index
        return "", None

    def _open(self, folder: str) -> Index | None:
        if folder not in self._below:
            path = os.path.join(self._path, folder)
            there = stays_inside(folder) and bool(folder) and paths.isfile(os.path.join(path, MANIFEST))
            self._below[folder] = SubdirIndex(self._path, folder) if there else None
        return self._below[folder]
