"""Access a checkpoint's files, in a local directory or an object store; raise `StorageError` for OSErrors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax_ckpt_compat._core.errors import CheckpointError, CorruptCheckpointError, MissingPathError
from flax_ckpt_compat._core.local.presence import ContainedFiles, stays_inside
from flax_ckpt_compat._core.local.syncing import write_file
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Path, show_path

AT_ONCE = 16  # requests to a store
_BACKUP = "restore the files from a backup"
# Raises if a file of the checkpoint, by name and content, is damaged.
Check = Callable[[str, bytes], object]


class ByteRange(NamedTuple):
    """A range of bytes in a file of the checkpoint."""

    file: str  # relative to the checkpoint's directory
    offset: int  # in bytes, like the next
    length: int


def list_names(folder: Location) -> list[str]:
    """Return the names in a directory in order, none if there is no directory; raise StorageError if it is refused."""
    return sorted(folder.listdir()) if folder.isdir() else []


class CheckpointFiles:
    """The files of a checkpoint's directory, which its index and its links may not leave."""

    def __init__(self, location: Location) -> None:
        self._location, self._path = location, location.path
        self._local = None if location.is_remote else ContainedFiles(location.path)

    def check(self, relative: str) -> int | None:
        """Return the size of a local file, None for all else; raise if its path leads out, or it is not regular."""
        if not stays_inside(relative):
            what = f"it refers to {relative!r:.300}, which lies outside its directory; it was tampered with"
            raise CorruptCheckpointError(f"{self._path}: {what}: do not use it", path=self._path)
        return None if self._local is None else self._local.check(relative)

    def read(self, relative: str, start: int, stop: int | None) -> bytes:
        """Read a range of a file of the array database, or less where it ends before; a missing file is damage."""
        self.check(relative)
        file = self._location / relative
        try:
            return file.read(start, stop)
        except MissingPathError as error:
            raise corrupt(file, "this file of the array database is missing") from error


def write_files(contents: Mapping[str, bytes]) -> None:
    """Write and sync new files at once; the file system may sync them together."""
    in_parallel(lambda path: write_file(path, contents[path]), contents)


def read_json(folder: Location, name: str, check: Check | None = None) -> dict[str, Any] | None:
    """Return the checked JSON object in a file of a directory, None without a file; raise if it does not decode."""
    file = folder / name
    if not file.isfile():
        return None
    CheckpointFiles(folder).check(name)
    text = file.read()
    if check is not None:
        check(name, text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt(file, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise corrupt(file, f"it holds a {type(value).__name__} where an object was expected")
    return value


def corrupt(file: Location | str, what: str, remedy: str = _BACKUP) -> CorruptCheckpointError:
    """Return the error for a file that is damaged or missing."""
    return CorruptCheckpointError(f"{file}: {what}; {remedy}", path=str(file))


def corrupt_leaf(
    folder: str, path: Path, what: str, kind: type[CheckpointError] = CorruptCheckpointError, remedy: str = _BACKUP
) -> CheckpointError:
    """Return the error for a leaf, of the checkpoint in a folder, that cannot be read."""
    leaf = show_path(path)
    return kind(f"{folder}: the leaf {leaf!r} cannot be read: {what}; {remedy}", path=folder, leaf=leaf)
