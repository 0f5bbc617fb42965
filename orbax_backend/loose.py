"""Checkpoints with one file, or object, per key, as ``use_ocdbt=False`` makes Orbax write them."""

from __future__ import annotations

import os
from typing import Any

from flax_ckpt_compat._core import paths, stores

from .places import Extent, Place, Present, refuse_escape
from .sources import directory_spec

_METADATA = (".zarray", "zarr.json")


class Files:
    """Files of a local directory."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find(self, key: str) -> Place | None:
        """See `Index.find`."""
        file = self._file(key)
        return Extent(key, 0, os.path.getsize(file)) if os.path.isfile(file) else None

    def get(self, key: str) -> bytes | None:
        """See `Index.get`."""
        try:
            with open(self._file(key), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """See `Index.kvstore`."""
        return paths.local_kvstore(self._file(prefix))

    def _file(self, key: str) -> str:
        refuse_escape(key, self._path)
        return os.path.join(self._path, key)


class Objects:
    """Objects of a store, listed once; those that describe arrays are read at once too, side by side."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys = frozenset(stores.keys(url))
        self._metadata: dict[str, bytes] = {}
        stores.in_parallel(self._keep, [key for key in self._keys if key.rpartition("/")[2] in _METADATA])

    def _keep(self, key: str) -> None:
        self._metadata[key] = stores.read(f"{self._url}/{key}")

    def find(self, key: str) -> Place | None:
        """See `Index.find`; a size would cost one request for each object."""
        refuse_escape(key, self._url)
        return Present() if key in self._keys else None

    def get(self, key: str) -> bytes | None:
        """See `Index.get`."""
        if key in self._metadata:
            return self._metadata[key]
        return stores.read(f"{self._url}/{key}") if self.find(key) is not None else None

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """See `Index.kvstore`."""
        refuse_escape(prefix, self._url)
        return directory_spec(f"{self._url}/{prefix}")
