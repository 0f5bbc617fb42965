"""Open the index of a checkpoint, which finds the values of its keys: in OCDBT databases, or in files of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.local.presence import stays_inside
from flax_ckpt_compat._core.location import Location

from . import stored_names
from .files import ByteRange, CheckpointFiles, corrupt, list_names
from .ocdbt import Entries, read_entries

_MAX_METADATA_BYTES = 1 << 20
StoredValue = bytes | ByteRange


class Index:
    """The values of a checkpoint by key: those in its OCDBT databases, or, of the subclass, in files of their own."""

    is_database = True

    def __init__(self, location: Location, entries: Entries) -> None:
        self._location, self.entries = location.unlisted(), entries  # none where values are files
        self._files = CheckpointFiles(self._location)

    def find(self, key: str) -> StoredValue | None:
        """Return the value, its byte range, or None if the key is absent."""
        return self.entries.get(key.encode())

    def get(self, key: str) -> bytes | None:
        """Read the metadata of an array; return None if the key is absent."""
        value = self.find(key)
        if not isinstance(value, ByteRange):
            return value
        file, start, length = value
        data = self._files.read(file, start, start + min(length, _MAX_METADATA_BYTES))
        if len(data) != length:
            what = f"{length} bytes of metadata were expected at offset {start}, found {len(data)}"
            raise corrupt(self._location / file, what)
        return data

    def ends(self) -> dict[str, int]:
        """Return file of a database → end of the last value in it."""
        found: dict[str, int] = {}
        for value in self.entries.values():
            if type(value) is ByteRange:
                found[value.file] = max(found.get(value.file, 0), value.offset + value.length)
        return found


class _FileIndex(Index):
    """The index of a directory of files; those of a store are listed once, and the metadata is read at once."""

    is_database = False

    def __init__(self, location: Location) -> None:
        super().__init__(location, {})
        self._location, self._files = location, CheckpointFiles(location)
        if location.is_remote:
            names = location.files_below()
            location.prefetch(name for name in names if name.rpartition("/")[2] in layout.ARRAY_METADATA_FILES)

    def find(self, key: str) -> StoredValue | None:
        size = self._files.check(key)
        if self._location.is_remote and (file := self._location / key).isfile():
            size = file.size()
        return None if size is None else ByteRange(key, 0, size)


def open_index(location: Location, names: Sequence[str], use_ocdbt: bool) -> Index:
    """Open the index of a checkpoint's directory with arrays of these stored names."""
    if not use_ocdbt:
        return _FileIndex(location)
    index = open_database(location, _unmerged_database(location, names))
    nested = _nested_entries(location, [name for name in names if "/" in name and not _has_array(index, name)])
    return Index(location, {**nested, **index.entries}) if nested else index


def open_database(location: Location, folder: str = "") -> Index:
    """Open the index of an OCDBT database in the directory ``folder`` of a checkpoint."""
    full = location / folder
    if not (full / layout.MANIFEST).isfile():
        if not process_databases(full):
            raise corrupt(full, f"the file {layout.MANIFEST} is missing, without which no array can be found")
        raise errors.IncompleteCheckpointError(
            f"{full}: the file {layout.MANIFEST} is missing, but databases of single processes are there; "
            f"the save was not finished, or the file was lost: restore it from a backup",
            path=full.path,
        )
    return Index(location, read_entries(location, f"{folder}/" if folder else ""))


def holds_array(location: Location) -> bool:
    """Return whether the database of a directory has an array ``checkpoint``, as array items of 0.3.5 to 0.5.7 do."""
    return _has_array(open_database(location), layout.SINGLE_ARRAY)


def process_databases(location: Location) -> list[str]:
    """Return the names of process databases, which a save merges at its end."""
    return [name for name in list_names(location) if name.startswith(layout.PROCESS_PREFIX)]


def _has_array(index: Index, name: str) -> bool:
    return any(index.find(stored_names.key_prefix(name) + file) is not None for file in layout.ARRAY_METADATA_FILES)


def _nested_entries(location: Location, names: Iterable[str]) -> Entries:
    """Return the entries of databases in subdirectories, for arrays that the database of the checkpoint lacks.

    Releases 0.1 to 0.4.1 took the name of an array for a path, so that the array ``a/b`` is the array ``b`` of a
    database in the directory ``a`` (measured).
    """
    parts = [name.split("/") for name in names]
    folders = {"/".join(some[:depth]) for some in parts for depth in range(1, len(some))}
    found: Entries = {}
    for folder in sorted(folders, key=len):  # what lies deeper comes first
        if stays_inside(folder) and (location / folder / layout.MANIFEST).isfile():
            below = read_entries(location, f"{folder}/")
            found |= {f"{folder}/".encode() + key: value for key, value in below.items()}
    return found


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
