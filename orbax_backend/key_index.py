"""Define the index of a checkpoint, which locates the values of its keys, and those of directories of files."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from flax_ckpt_compat._core import errors, paths
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.object_store import client
from flax_ckpt_compat._core.thread_pools import in_parallel

from .files import ByteRange, CheckpointFiles, corrupt, read_existing, refuse_escape

_MAX_METADATA_BYTES = 1 << 20


class OpaqueValue:
    """A value that only TensorStore can locate."""


StoredValue = bytes | ByteRange | OpaqueValue


class Index(Protocol):
    """The values of a checkpoint by key."""

    def find(self, key: str) -> StoredValue | None:
        """Return the value, its byte range, or None if the key is absent."""
        ...

    def find_all(self, keys: Sequence[str]) -> list[StoredValue | None]:
        """Return what `find` returns for each key."""
        return [self.find(key) for key in keys]

    def get(self, key: str) -> bytes | None:
        """Read a small value; return None if the key is absent."""
        ...

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Return TensorStore's spec of the keys below ``prefix``."""
        ...

    def keys(self) -> Collection[bytes]:
        """Return all keys of a database; none where values are files."""
        return ()

    def holds(self, prefix: str, names: Any) -> bool:
        """Return whether all keys are there that consist of a prefix and one of an array of ascending names."""
        return all(self.find(prefix + name.decode()) is not None for name in names.tolist())

    def ends(self) -> dict[str, int]:
        """Return file of a database → end of the last value in it."""
        return {}


def read_small(path: str, extent: ByteRange) -> bytes:
    """Read the metadata of an array."""
    full = os.path.join(path, extent.file)
    missing = errors.CorruptCheckpointError(
        f"{full}: the file is missing, but the array database refers to it; restore it from a backup", path=full
    )
    data = read_existing(full, extent.offset, extent.offset + min(extent.length, _MAX_METADATA_BYTES), missing)
    if len(data) != extent.length:
        what = f"{extent.length} bytes of metadata were expected at offset {extent.offset}, found {len(data)}"
        raise corrupt(full, what)
    return data


def open_files(path: str) -> Index:
    """Open the index of a directory that stores each value in a file, or object, of its own."""
    return _StoreIndex(path) if paths.is_url(path) else _FileIndex(path)


class _FileIndex(Index):
    """The index of a local directory of files."""

    def __init__(self, path: str) -> None:
        self._path, self._files = path, CheckpointFiles(path)

    def find(self, key: str) -> ByteRange | None:
        size = self._files.check(key)
        return None if size is None else ByteRange(key, 0, size)

    def get(self, key: str) -> bytes | None:
        extent = self.find(key)
        return None if extent is None else read_small(self._path, extent)

    def kvstore(self, prefix: str) -> dict[str, Any]:
        refuse_escape(prefix, self._path)
        return paths.storage_of(self._path).kvstore(os.path.join(self._path, prefix))


class _StoreIndex(Index):
    """The index of a folder in a store, listed once; prefetches the metadata of all arrays."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys = frozenset(client.keys(url))
        found = [key for key in self._keys if key.rpartition("/")[2] in layout.ARRAY_METADATA_FILES]
        self._metadata = dict(zip(found, in_parallel(self._read, found), strict=True))

    def _read(self, key: str) -> bytes:
        return client.read(f"{self._url}/{key}")

    def find(self, key: str) -> StoredValue | None:
        # Byte ranges would cost one request for each object.
        refuse_escape(key, self._url)
        return OpaqueValue() if key in self._keys else None

    def get(self, key: str) -> bytes | None:
        if key in self._metadata:
            return self._metadata[key]
        return self._read(key) if self.find(key) is not None else None

    def kvstore(self, prefix: str) -> dict[str, Any]:
        refuse_escape(prefix, self._url)
        return client.spec(f"{self._url}/{prefix}")
