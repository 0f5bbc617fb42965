"""Databases below the checkpoint's own: releases 0.1 to 0.4.1 made one for every key with a ``/`` (measured).

They took the name of an array for a path: the array ``a/b`` is the array ``b`` of a database in the directory ``a``.
"""

from __future__ import annotations

import os
from typing import Any

from .index import MANIFEST, Extent, Index, Place, open_index, stays_inside


class Nested:
    """The index of a checkpoint, and of the databases below it."""

    def __init__(self, path: str, top: Index) -> None:
        self._path, self._top = path, top
        self._below: dict[str, Index | None] = {}

    def find(self, key: str) -> Place | None:
        """See `Index.find`."""
        place = self._top.find(key)
        folder, index = self._database_of(key) if place is None else ("", None)
        if index is None:
            return place
        place = index.find(key[len(folder) + 1 :])
        return Extent(f"{folder}/{place.file}", place.offset, place.length) if isinstance(place, Extent) else place

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
        return all(self._top.find(prefix + name) is None for name in (".zarray", "zarr.json"))

    def _database_of(self, key: str) -> tuple[str, Index | None]:
        """The deepest directory on the way to a key that holds a database."""
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
            there = stays_inside(folder) and bool(folder) and os.path.isfile(os.path.join(path, MANIFEST))
            self._below[folder] = open_index(path, use_ocdbt=True) if there else None
        return self._below[folder]
