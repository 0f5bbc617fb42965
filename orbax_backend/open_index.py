"""Open the index of a checkpoint, which finds the values of its keys: in OCDBT databases, or in files of their own."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import tensorstore as ts

from flax_ckpt_compat._core import errors, paths
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.local.safe_open import stays_inside
from flax_ckpt_compat._core.object_store import client
from flax_ckpt_compat._core.storage_errors import read_errors
from flax_ckpt_compat._core.thread_pools import in_parallel

from .files import (
    ByteRange,
    CheckpointFiles,
    corrupt,
    list_names,
    read_existing,
    refuse_escape,
    tensorstore_context,
    wait,
)
from .ocdbt import read_entries
from .ocdbt_encoding import UndecodableError
from .ocdbt_nodes import Entries, RowEntries, ends_of

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
        """Read the metadata of an array; return None if the key is absent."""
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


def open_index(path: str, names: Sequence[str], use_ocdbt: bool) -> Index:
    """Open the index of a checkpoint's directory with arrays of these stored names."""
    if not use_ocdbt:
        return _StoreIndex(path) if paths.is_url(path) else _FileIndex(path)
    index = open_database(path, _unmerged_database(path, names), lookups=len(names))
    return _NestedIndex(path, index) if any("/" in name for name in names) else index


def open_database(path: str, folder: str = "", locate: Callable[[str], str] | None = None, lookups: int = 0) -> Index:
    """Open the index of an OCDBT database in the directory ``folder`` of a checkpoint; see `read_entries`."""
    full = os.path.join(path, folder) if folder else path
    if locate is None and not paths.isfile(os.path.join(full, layout.MANIFEST)):
        raise _missing_manifest(full)
    try:
        return _DatabaseIndex(path, full, read_entries(path, f"{folder}/" if folder else "", locate, lookups))
    except UndecodableError as error:
        if locate is not None:
            raise _undecodable(full, error) from error
        return _DriverIndex(full)


def holds_array(path: str) -> bool:
    """Return whether the database in ``path`` has an array ``checkpoint``, as array items of 0.3.5 to 0.5.7 do."""
    index = open_database(path)
    return any(index.find(f"{layout.SINGLE_ARRAY}/{name}") is not None for name in layout.ARRAY_METADATA_FILES)


def process_databases(path: str) -> list[str]:
    """Return the names of process databases, which a save merges at its end."""
    return [name for name in list_names(path) if name.startswith(layout.PROCESS_PREFIX)]


def _unmerged_database(path: str, names: Sequence[str]) -> str:
    """Return the name of the process database of a finished checkpoint that never merged it, or "".

    Releases 0.4.3 to 0.4.7 with ``use_ocdbt=False`` still wrote the process database, never merged it, and made an
    empty directory for every array; they could not read that back themselves (0.4.4, measured).
    """
    if paths.isfile(os.path.join(path, layout.MANIFEST)):
        return ""
    processes = process_databases(path)
    finished = all(paths.isfile(os.path.join(path, file)) for file in (layout.MSGPACK_FILE, layout.TREE_METADATA))
    if len(processes) != 1 or not finished:
        return ""
    folders = any(name and stays_inside(name) and paths.isdir(os.path.join(path, name)) for name in names)
    return processes[0] if folders else ""


def _missing_manifest(path: str) -> errors.CheckpointError:
    if process_databases(path):
        return errors.IncompleteCheckpointError(
            f"{path}: the file {layout.MANIFEST} is missing, but databases of single processes are there; "
            f"the save was not finished, or the file was lost: restore it from a backup",
            path=path,
        )
    what = f"the file {layout.MANIFEST} is missing, without which no array can be found"
    return corrupt(path, what, "restore it from a backup")


def _tensorstore_errors(path: str) -> contextlib.AbstractContextManager[None]:
    """Translate TensorStore's errors about a database."""
    return read_errors(path, functools.partial(_undecodable, path), (ValueError, OSError))


def _undecodable(path: str, error: Exception) -> errors.CorruptCheckpointError:
    what = f"its array database ({layout.MANIFEST} and d/) does not decode: {error}"
    return corrupt(path, what, "restore the files from a copy")


def _database_spec(path: str, prefix: str) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": paths.storage_of(path).kvstore(path), "path": prefix}


class _DatabaseIndex(Index):
    """The index of an OCDBT database whose B-tree we decoded."""

    def __init__(self, path: str, database: str, entries: Entries) -> None:
        self._path, self._database, self._entries = path, database, entries

    def find(self, key: str) -> StoredValue | None:
        return self._entries.get(key.encode())

    def find_all(self, keys: Sequence[str]) -> list[StoredValue | None]:
        return list(map(self._entries.get, map(str.encode, keys)))

    def get(self, key: str) -> bytes | None:
        value = self._entries.get(key.encode())
        return _read_small(self._path, value) if isinstance(value, ByteRange) else value

    def kvstore(self, prefix: str) -> dict[str, Any]:
        return _database_spec(self._database, prefix)

    def keys(self) -> Collection[bytes]:
        return self._entries.keys()

    def holds(self, prefix: str, names: Any) -> bool:
        quickly = isinstance(self._entries, RowEntries) and self._entries.holds(prefix.encode(), names)
        return quickly or super().holds(prefix, names)

    def ends(self) -> dict[str, int]:
        return ends_of(self._entries)


class _DriverIndex(Index):
    """The index of an OCDBT database that only TensorStore's driver reads; it does not expose byte ranges."""

    def __init__(self, path: str) -> None:
        self._path = path
        for folder in ("", layout.DATA_DIRECTORY):
            CheckpointFiles(path).check_folder(folder)
        with _tensorstore_errors(path):
            self._store = wait(path, ts.KvStore.open(_database_spec(path, ""), context=tensorstore_context(path, 0)))
            self._keys = frozenset(wait(path, self._store.list()))

    def find(self, key: str) -> StoredValue | None:
        return OpaqueValue() if key.encode() in self._keys else None

    def get(self, key: str) -> bytes | None:
        with _tensorstore_errors(self._path):
            there = key.encode() in self._keys
            return bytes(wait(self._path, self._store.read(key)).value) if there else None

    def kvstore(self, prefix: str) -> dict[str, Any]:
        return _database_spec(self._path, prefix)

    def keys(self) -> Collection[bytes]:
        return self._keys


class _NestedIndex(Index):
    """The index of a database and of databases in subdirectories.

    Releases 0.1 to 0.4.1 took the name of an array for a path, so that the array ``a/b`` is the array ``b`` of a
    database in the directory ``a`` (measured).
    """

    def __init__(self, path: str, top: Index) -> None:
        self._path, self._top = path, top
        self._below: dict[str, Index | None] = {}

    def find(self, key: str) -> StoredValue | None:
        index, rest = self._owner(key)
        return index.find(rest)

    def get(self, key: str) -> bytes | None:
        index, rest = self._owner(key)
        return index.get(rest)

    def kvstore(self, prefix: str) -> dict[str, Any]:
        there = (name for name in layout.ARRAY_METADATA_FILES if self._top.find(prefix + name) is not None)
        name = next(there, layout.ARRAY_METADATA_FILES[0])
        index, rest = self._owner(prefix + name)
        return index.kvstore(rest.removesuffix(name))

    def keys(self) -> Collection[bytes]:
        return self._top.keys()

    def _owner(self, key: str) -> tuple[Index, str]:
        """Return the index with a key, which may be the one of the deepest database on its path, and its key there."""
        if self._top.find(key) is None:
            parts = key.split("/")
            for depth in range(len(parts) - 1, 0, -1):
                index = self._open("/".join(parts[:depth]))
                if index is not None:
                    return index, "/".join(parts[depth:])
        return self._top, key

    def _open(self, folder: str) -> Index | None:
        if folder not in self._below:
            manifest = os.path.join(self._path, folder, layout.MANIFEST)
            there = bool(folder) and stays_inside(folder) and paths.isfile(manifest)
            self._below[folder] = open_database(self._path, folder) if there else None
        return self._below[folder]


class _FileIndex(Index):
    """The index of a local directory of files."""

    def __init__(self, path: str) -> None:
        self._path, self._files = path, CheckpointFiles(path)

    def find(self, key: str) -> ByteRange | None:
        size = self._files.check(key)
        return None if size is None else ByteRange(key, 0, size)

    def get(self, key: str) -> bytes | None:
        extent = self.find(key)
        return None if extent is None else _read_small(self._path, extent)

    def kvstore(self, prefix: str) -> dict[str, Any]:
        refuse_escape(prefix, self._path)
        return paths.storage_of(self._path).kvstore(os.path.join(self._path, prefix))


class _StoreIndex(Index):
    """The index of a folder in a store, listed once; prefetches the metadata of all arrays."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys = frozenset(client.keys(url))
        found = [key for key in self._keys if key.rpartition("/")[2] in layout.ARRAY_METADATA_FILES]
        self._metadata = dict(zip(found, in_parallel(lambda key: client.read(f"{url}/{key}"), found), strict=True))

    def find(self, key: str) -> StoredValue | None:
        # Byte ranges would cost one request for each object.
        refuse_escape(key, self._url)
        return OpaqueValue() if key in self._keys else None

    def get(self, key: str) -> bytes | None:
        if key not in self._metadata and self.find(key) is None:
            return None
        return self._metadata[key]

    def kvstore(self, prefix: str) -> dict[str, Any]:
        refuse_escape(prefix, self._url)
        return client.spec(f"{self._url}/{prefix}")


def _read_small(path: str, extent: ByteRange) -> bytes:
    """Read the metadata of an array."""
    full = os.path.join(path, extent.file)
    missing = corrupt(full, "the file is missing, but the array database refers to it", "restore it from a backup")
    data = read_existing(full, extent.offset, extent.offset + min(extent.length, _MAX_METADATA_BYTES), missing)
    if len(data) != extent.length:
        what = f"{extent.length} bytes of metadata were expected at offset {extent.offset}, found {len(data)}"
        raise corrupt(full, what)
    return data
