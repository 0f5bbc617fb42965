"""Open the index of a checkpoint, which finds the values of its keys: in OCDBT databases, or in files of their own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import tensorstore as ts

from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.local.safe_open import stays_inside
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import read_errors
from flax_ckpt_compat._core.thread_pools import in_parallel

from .files import ByteRange, CheckpointFiles, corrupt, list_names, read_existing, refuse_escape, tensorstore_context
from .ocdbt import read_entries
from .ocdbt_nodes import Entries, UndecodableError

_MAX_METADATA_BYTES = 1 << 20


class OpaqueValue:
    """A value that only TensorStore can locate."""


StoredValue = bytes | ByteRange | OpaqueValue


class Index(Protocol):
    """The values of a checkpoint by key.

    Attributes:
        is_database: they are in OCDBT databases, not in files of their own.
    """

    is_database: bool = True

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

    def ends(self) -> dict[str, int]:
        """Return file of a database → end of the last value in it."""
        return {}


def open_index(location: Location, names: Sequence[str], use_ocdbt: bool) -> Index:
    """Open the index of a checkpoint's directory with arrays of these stored names."""
    if not use_ocdbt:
        return _StoreIndex(location) if location.is_remote else _FileIndex(location)
    index = open_database(location, _unmerged_database(location, names))
    return _NestedIndex(location, index) if any("/" in name for name in names) else index


def open_database(location: Location, folder: str = "", locate: Callable[[str], Location] | None = None) -> Index:
    """Open the index of an OCDBT database in the directory ``folder`` of a checkpoint; see `read_entries`."""
    full = location / folder
    if locate is None and not (full / layout.MANIFEST).isfile():
        raise _missing_manifest(full)
    try:
        return _DatabaseIndex(location, full, read_entries(location, f"{folder}/" if folder else "", locate))
    except UndecodableError as error:
        if locate is not None:
            raise _undecodable(full, error) from error
        return _DriverIndex(full)


def holds_array(location: Location) -> bool:
    """Return whether the database of a directory has an array ``checkpoint``, as array items of 0.3.5 to 0.5.7 do."""
    index = open_database(location)
    return any(index.find(f"{layout.SINGLE_ARRAY}/{name}") is not None for name in layout.ARRAY_METADATA_FILES)


def process_databases(location: Location) -> list[str]:
    """Return the names of process databases, which a save merges at its end."""
    return [name for name in list_names(location) if name.startswith(layout.PROCESS_PREFIX)]


def _unmerged_database(location: Location, names: Sequence[str]) -> str:
    """Return the name of the process database of a finished checkpoint that never merged it, or "".

    Releases 0.4.3 to 0.4.7 with ``use_ocdbt=False`` still wrote the process database, never merged it, and made an
    empty directory for every array; they could not read that back themselves (0.4.4, measured).
    """
    if (location / layout.MANIFEST).isfile():
        return ""
    processes = process_databases(location)
    finished = all((location / file).isfile() for file in (layout.MSGPACK_FILE, layout.TREE_METADATA))
    if len(processes) != 1 or not finished:
        return ""
    folders = any(name and stays_inside(name) and (location / name).isdir() for name in names)
    return processes[0] if folders else ""


def _missing_manifest(location: Location) -> errors.CheckpointError:
    if process_databases(location):
        return errors.IncompleteCheckpointError(
            f"{location}: the file {layout.MANIFEST} is missing, but databases of single processes are there; "
            f"the save was not finished, or the file was lost: restore it from a backup",
            path=location.path,
        )
    what = f"the file {layout.MANIFEST} is missing, without which no array can be found"
    return corrupt(location, what, "restore it from a backup")


def _tensorstore_errors(location: Location) -> contextlib.AbstractContextManager[None]:
    """Translate TensorStore's errors about a database."""
    return read_errors(location.path, functools.partial(_undecodable, location), (ValueError, OSError))


def _undecodable(location: Location, error: Exception) -> errors.CorruptCheckpointError:
    what = f"its array database ({layout.MANIFEST} and d/) does not decode: {error}"
    return corrupt(location, what, "restore the files from a copy")


def _database_spec(location: Location, prefix: str) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": location.kvstore(), "path": prefix}


class _DatabaseIndex(Index):
    """The index of an OCDBT database whose B-tree we decoded."""

    def __init__(self, location: Location, database: Location, entries: Entries) -> None:
        self._location, self._database, self._entries = location.unlisted(), database.unlisted(), entries

    def find(self, key: str) -> StoredValue | None:
        return self._entries.get(key.encode())

    def find_all(self, keys: Sequence[str]) -> list[StoredValue | None]:
        return list(map(self._entries.get, map(str.encode, keys)))

    def get(self, key: str) -> bytes | None:
        value: Any = self._entries.get(key.encode())
        return _read_small(self._location, value) if type(value) is ByteRange else value

    def kvstore(self, prefix: str) -> dict[str, Any]:
        return _database_spec(self._database, prefix)

    def keys(self) -> Collection[bytes]:
        return self._entries.keys()

    def ends(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for value in self._entries.values():
            if type(value) is ByteRange:
                found[value.file] = max(found.get(value.file, 0), value.offset + value.length)
        return found


class _DriverIndex(Index):
    """The index of an OCDBT database that only TensorStore's driver reads; it does not expose byte ranges."""

    def __init__(self, location: Location) -> None:
        self._location = location = location.unlisted()
        for folder in ("", layout.DATA_DIRECTORY):
            CheckpointFiles(location).check_folder(folder)
        with _tensorstore_errors(location):
            opened = ts.KvStore.open(_database_spec(location, ""), context=tensorstore_context(location, 0))
            self._store = location.wait(opened)
            self._keys = frozenset(location.wait(self._store.list()))

    def find(self, key: str) -> StoredValue | None:
        return OpaqueValue() if key.encode() in self._keys else None

    def get(self, key: str) -> bytes | None:
        with _tensorstore_errors(self._location):
            there = key.encode() in self._keys
            return bytes(self._location.wait(self._store.read(key)).value) if there else None

    def kvstore(self, prefix: str) -> dict[str, Any]:
        return _database_spec(self._location, prefix)

    def keys(self) -> Collection[bytes]:
        return self._keys


class _NestedIndex(Index):
    """The index of a database and of databases in subdirectories.

    Releases 0.1 to 0.4.1 took the name of an array for a path, so that the array ``a/b`` is the array ``b`` of a
    database in the directory ``a`` (measured).
    """

    def __init__(self, location: Location, top: Index) -> None:
        self._location, self._top = location, top
        self._below: dict[str, Index | None] = {}

    def find(self, key: str) -> StoredValue | None:
        found = self._top.find(key)
        if found is None:
            index, rest = self._owner(key)
            found = None if index is self._top else index.find(rest)
        return found

    def get(self, key: str) -> bytes | None:
        found = self._top.get(key)
        if found is None:
            index, rest = self._owner(key)
            found = None if index is self._top else index.get(rest)
        return found

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
            manifest = self._location / folder / layout.MANIFEST
            there = bool(folder) and stays_inside(folder) and manifest.isfile()
            self._below[folder] = open_database(self._location, folder) if there else None
        return self._below[folder]


class _FileIndex(Index):
    """The index of a local directory of files."""

    is_database = False

    def __init__(self, location: Location) -> None:
        self._location, self._files = location, CheckpointFiles(location)

    def find(self, key: str) -> ByteRange | None:
        size = self._files.check(key)
        return None if size is None else ByteRange(key, 0, size)

    def get(self, key: str) -> bytes | None:
        extent = self.find(key)
        return None if extent is None else _read_small(self._location, extent)

    def kvstore(self, prefix: str) -> dict[str, Any]:
        refuse_escape(prefix, self._location.path)
        return (self._location / prefix).kvstore()


class _StoreIndex(Index):
    """The index of a folder in a store, listed once; prefetches the metadata of all arrays."""

    is_database = False

    def __init__(self, location: Location) -> None:
        self._location = location.unlisted()
        self._keys = frozenset(location.files_below())
        found = [key for key in self._keys if key.rpartition("/")[2] in layout.ARRAY_METADATA_FILES]
        self._metadata = dict(zip(found, in_parallel(lambda key: (location / key).read(), found), strict=True))

    def find(self, key: str) -> StoredValue | None:
        # Byte ranges would cost one request for each object.
        refuse_escape(key, self._location.path)
        return OpaqueValue() if key in self._keys else None

    def get(self, key: str) -> bytes | None:
        if key not in self._metadata and self.find(key) is None:
            return None
        return self._metadata[key]

    def kvstore(self, prefix: str) -> dict[str, Any]:
        refuse_escape(prefix, self._location.path)
        return (self._location / prefix).kvstore()


def _read_small(location: Location, extent: ByteRange) -> bytes:
    """Read the metadata of an array."""
    full = location / extent.file
    missing = corrupt(full, "the file is missing, but the array database refers to it", "restore it from a backup")
    data = read_existing(full, extent.offset, extent.offset + min(extent.length, _MAX_METADATA_BYTES), missing)
    if len(data) != extent.length:
        what = f"{extent.length} bytes of metadata were expected at offset {extent.offset}, found {len(data)}"
        raise corrupt(full, what)
    return data
