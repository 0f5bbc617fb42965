"""Locate the values of a checkpoint's keys in an OCDBT database, or in files."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorstore as ts

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from flax_ckpt_compat._core.object_store import client
from flax_ckpt_compat._core.orbax_layout import ARRAY_METADATA_FILES, MANIFEST, PROCESS_PREFIX, SINGLE_ARRAY

from .codecs import UndecodableError
from .ocdbt_btree import BTree
from .sources import directory_spec, new_context, read_range, wait
from .stored_values import ByteRange, Index, OpaqueValue, StoredValue, refuse_escape

_MAX_METADATA_BYTES = 1 << 20


def open_index(path: str, use_ocdbt: bool, locate: Callable[[str], str] | None = None) -> Index:
    """Open the index of a checkpoint's directory.

    Args:
        path: directory of the checkpoint.
        use_ocdbt: whether it has a database.
        locate: see `BTree`; for databases with files elsewhere.

    Raises:
        CorruptCheckpointError: the database does not decode.
    """
    if not use_ocdbt:
        return ObjectIndex(path) if paths.is_url(path) else FileIndex(path)
    if locate is None and not paths.isfile(os.path.join(path, MANIFEST)):
        raise _missing_manifest(path)
    try:
        return _BTreeIndex(path, BTree(path, locate).entries())
    except UndecodableError as error:
        if locate is not None:
            raise _undecodable(path, error) from error
        return _DriverIndex(path)
    except (CorruptCheckpointError, StorageError):
        raise
    except OSError as error:
        raise _undecodable(path, error) from error


def holds_array(path: str) -> bool:
    """Return whether the database in ``path`` has an array ``checkpoint``, as array items of 0.3.5 to 0.5.7 do."""
    index = open_index(path, use_ocdbt=True)
    return any(index.find(f"{SINGLE_ARRAY}/{name}") is not None for name in ARRAY_METADATA_FILES)


def process_databases(path: str) -> list[str]:
    """Return the names of process databases, which a save merges at its end."""
    names = paths.listdir(path) if paths.isdir(path) else []
    return [name for name in names if name.startswith(PROCESS_PREFIX)]


def _missing_manifest(path: str) -> CheckpointError:
    if process_databases(path):
        return IncompleteCheckpointError(
            f"{path}: the file {MANIFEST} is missing, but databases of single processes are there; "
            f"the save was not finished, or the file was lost: restore it from a copy",
            path=path,
        )
    return CorruptCheckpointError(
        f"{path}: the file {MANIFEST} is missing, without which no array can be found; restore it from a copy",
        path=path,
    )


def ocdbt_spec(path: str, prefix: str) -> dict[str, Any]:
    """Return TensorStore's spec of the keys below ``prefix`` in the database in ``path``."""
    return {"driver": "ocdbt", "base": directory_spec(path), "path": prefix}


class _BTreeIndex:
    """The index of an OCDBT database whose B-tree we decoded."""

    def __init__(self, path: str, entries: dict[bytes, bytes | ByteRange]) -> None:
        self._path = path
        self._entries = entries

    def find(self, key: str) -> StoredValue | None:
        return self._entries.get(key.encode())

    def get(self, key: str) -> bytes | None:
        value = self._entries.get(key.encode())
        return _read_small(self._path, value) if isinstance(value, ByteRange) else value

    def kvstore(self, prefix: str) -> dict[str, Any]:
        return ocdbt_spec(self._path, prefix)


class _DriverIndex:
    """The index of an OCDBT database that only TensorStore's driver reads; it does not expose byte ranges."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._store = wait(path, ts.KvStore.open(ocdbt_spec(path, ""), context=new_context(path, 0)))
            self._keys = frozenset(wait(path, self._store.list()))
        except StorageError:
            raise
        except (ValueError, OSError) as error:
            raise _undecodable(path, error) from error

    def find(self, key: str) -> StoredValue | None:
        return OpaqueValue() if key.encode() in self._keys else None

    def get(self, key: str) -> bytes | None:
        try:
            there = key.encode() in self._keys
            return bytes(wait(self._path, self._store.read(key)).value) if there else None
        except StorageError:
            raise
        except (ValueError, OSError) as error:
            raise _undecodable(self._path, error) from error

    def kvstore(self, prefix: str) -> dict[str, Any]:
        return ocdbt_spec(self._path, prefix)


def _read_small(path: str, extent: ByteRange) -> bytes:
    """Read the metadata of an array."""
    full = os.path.join(path, extent.file)
    try:
        data = read_range(full, extent.offset, extent.offset + min(extent.length, _MAX_METADATA_BYTES))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{full}: the file is missing, but the array database refers to it; restore it from a copy", path=full
        ) from error
    if len(data) != extent.length:
        raise CorruptCheckpointError(
            f"{full}: {extent.length} bytes of metadata were expected at offset {extent.offset}, found {len(data)}; "
            f"restore the file from a copy",
            path=full,
        )
    return data


def _undecodable(path: str, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: its array database ({MANIFEST} and d/) does not decode: {error}; restore the files from a copy",
        path=path,
    )


class FileIndex:
    """The index of a local directory of files."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find(self, key: str) -> StoredValue | None:
        """See `Index.find`."""
        file = self._file(key)
        return ByteRange(key, 0, os.path.getsize(file)) if os.path.isfile(file) else None

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


class ObjectIndex:
    """The index of a folder in a store, listed once; prefetches the metadata of all arrays."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys = frozenset(client.keys(url))
        self._metadata: dict[str, bytes] = {}
        client.in_parallel(self._keep, [key for key in self._keys if key.rpartition("/")[2] in ARRAY_METADATA_FILES])

    def _keep(self, key: str) -> None:
        self._metadata[key] = client.read(f"{self._url}/{key}")

    def find(self, key: str) -> StoredValue | None:
        """See `Index.find`; byte ranges would cost one request for each object."""
        refuse_escape(key, self._url)
        return OpaqueValue() if key in self._keys else None

    def get(self, key: str) -> bytes | None:
        """See `Index.get`."""
        if key in self._metadata:
            return self._metadata[key]
        return client.read(f"{self._url}/{key}") if self.find(key) is not None else None

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """See `Index.kvstore`."""
        refuse_escape(prefix, self._url)
        return directory_spec(f"{self._url}/{prefix}")
