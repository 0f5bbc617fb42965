"""Reach the path classes that are registered with `etils.epath`, through the methods of ``pathlib``.

Such a store can list, read, write and delete files, and no more: files are copied whole, and no write has a condition.
A folder is published by a marker, all files, and ``commit_success.txt``; then the marker goes. A replaced one is
incomplete meanwhile. Saves warn of that once.
"""

from __future__ import annotations

import logging
import os
import posixpath
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.local import atomic, presence
from flax_ckpt_compat._core.local.presence import files_below
from flax_ckpt_compat._core.object_store import commit
from flax_ckpt_compat._core.object_store.remote_storage import RemoteLocation, is_unfinished
from flax_ckpt_compat._core.orbax_layout import BEGUN, COMMIT_FILE, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.storage import HEAD_BYTES, Source, Stat
from flax_ckpt_compat._core.storage_errors import not_found, translated
from flax_ckpt_compat._core.thread_pools import in_parallel

_log = logging.getLogger("flax_ckpt_compat")
_AT_ONCE, _PIECE = 16, 2**24
_warned: set[str] = set()  # schemes


def is_known(scheme: str) -> bool:
    """Return whether a path class of a scheme is registered with epath."""
    from etils import epath

    try:
        epath.Path(f"{scheme}://x")
    except (KeyError, NotImplementedError):
        return False
    return True


class EpathLocation(RemoteLocation):
    """A URL of a scheme of epath."""

    __slots__ = ()

    @classmethod
    def normal(cls, path: str) -> str:
        scheme, _, rest = path.partition("://")
        bucket, _, key = rest.partition("/")
        if not bucket:
            raise StorageError(f"{path} names no bucket; write {scheme.lower()}://bucket/folder", path=path)
        return f"{scheme.lower()}://{bucket}{posixpath.normpath('/' + key.lstrip('/'))}".rstrip("/")

    @property
    def _scheme(self) -> str:
        return self.path.partition("://")[0]

    def _path(self, path: str) -> Any:
        from etils import epath

        return epath.Path(path)

    def list_files(self, path: str) -> dict[str, Stat]:
        return dict(sorted(_walk(self._path(path), "")))

    def find(self, path: str) -> Stat | None:
        there = self._path(path)
        return None if there.is_dir() or not there.exists() else _stat(there)

    def read_range(self, path: str, start: int, stop: int | None) -> bytes:
        if self.find(path) is None:
            raise not_found(path)
        with self._path(path).open("rb") as file:
            file.seek(start)
            return bytes(file.read(-1 if stop is None else stop - start))

    def open_file(self) -> Source:
        return OpenedFile(self.unlisted())

    def delete(self, path: str) -> None:
        """Delete a file; a missing one is no error."""
        if self.find(path) is not None:
            with suppress(FileNotFoundError):
                self._path(path).unlink()

    # Checkpoints.

    def prepare_directory(self) -> None:
        if self._scheme not in _warned:
            _warned.add(self._scheme)
            _log.warning(
                "%s: saves to %s:// have no conditional writes and no atomic replacement: let one process write a "
                "checkpoint, and do not overwrite a directory that others read (migration_guide/object_stores.md)",
                self,
                self._scheme,
            )
        self.remove_leftovers(list(commit.leftovers(self._inside())))

    def leftovers(self) -> dict[str, bool]:
        return commit.leftovers(self.list_files(self.path))

    def remove_leftovers(self, names: Collection[str]) -> None:
        files = self.list_files(self.path)
        folders = commit.by_folder(files)
        for name in set(names).intersection(commit.leftovers(files)):
            keys = [key for key in folders[name] if is_unfinished(folders[name]) or is_upload_marker(key)]
            self._remove_files(f"{self}/{name}", keys)

    def publish(self, temporary: str, *, new: bool = False, meter: Meter = OFF) -> None:
        path = self.path
        inside, file = list(self.list_files(path)), self.find(path)
        if new and ((file is not None and file.size) or (inside and not is_unfinished(inside))):
            message = f"{path}: another process wrote this checkpoint, and it stays; pass overwrite=True to replace it"
            raise ConcurrentWriteError(message, path=path)
        with translated(path, "written"):
            if not presence.isdir(temporary):
                self._remove_files(path, inside)
                self._put(temporary, path, meter)
            else:
                self.delete(path)
                names = [name for name in files_below(temporary) if name != COMMIT_FILE]
                marker = f"{path}/{_new_marker()}"
                self._write(marker, "")
                self._remove_files(path, [name for name in inside if name not in names], keep=True)
                in_parallel(
                    lambda name: self._put(os.path.join(temporary, name), f"{path}/{name}", meter), names, _AT_ONCE
                )
                text = f"All files of this checkpoint were written before this one.\n{path}\n"
                self._write(f"{path}/{COMMIT_FILE}", text)
                self.delete(marker)
            self._remove_arrays(path)
        atomic.delete(temporary)

    def _put(self, local: str, path: str, meter: Meter = OFF) -> None:
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(local, "rb") as file, target.open("wb") as to:
            while piece := file.read(_PIECE):
                to.write(piece)
                meter.add(len(piece), path)

    def _write(self, path: str, text: str) -> None:
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.write(text.encode())

    def remove(self, path: str) -> None:
        with translated(path, "removed"):
            self.delete(path)
            if inside := list(self.list_files(path)):
                self._write(f"{path}/{_new_marker()}", "")
                self._remove_files(path, [*inside, *filter(is_upload_marker, self.list_files(path))])
            self._remove_arrays(path)

    def _remove_files(self, path: str, keys: Iterable[str], *, keep: bool = False) -> None:
        """Delete files of a folder, the commit file first and markers last; and the folder, but for ``keep``."""
        keys = set(keys)
        if COMMIT_FILE in keys:
            self.delete(f"{path}/{COMMIT_FILE}")
        rest = [key for key in keys if not is_upload_marker(key) and key != COMMIT_FILE]
        in_parallel(lambda key: self.delete(f"{path}/{key}"), rest, _AT_ONCE)
        for key in filter(is_upload_marker, keys):
            self.delete(f"{path}/{key}")
        if not keep:
            _prune(self._path(path))

    def _remove_arrays(self, path: str) -> None:
        arrays = path + ARRAYS_POSTFIX
        self._remove_files(arrays, commit.arrays_among(list(self.list_files(arrays))))


class OpenedFile(Source):
    """A file whose version is compared after each read."""

    def __init__(self, location: EpathLocation):
        self.path, self._location = location.path, location
        self._found = location._stat()
        self.size = self._found.size
        self.head = self.read(0, HEAD_BYTES)

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        found = self._location.read_range(self.path, start, stop)
        if len(found) != stop - start or self._location._stat() != self._found:
            message = f"{self.path} was replaced or removed since it was opened; read it again"
            raise StorageError(message, path=self.path)
        return found


def _new_marker() -> str:
    return f"{BEGUN}.{int(time.time())}.{uuid.uuid4().hex}"


def _walk(folder: Any, inside: str) -> Iterator[tuple[str, Stat]]:
    if not folder.is_dir():
        return
    for child in folder.iterdir():
        name = posixpath.join(inside, child.name)
        if child.is_dir():
            yield from _walk(child, name)
        else:
            yield name, _stat(child)


def _prune(folder: Any) -> None:
    if not folder.is_dir():
        return
    for child in list(folder.iterdir()):
        _prune(child)
    if not list(folder.iterdir()):
        with suppress(FileNotFoundError):
            folder.rmdir()


def _stat(path: Any) -> Stat:
    status = path.stat()
    size = getattr(status, "length", None)
    size = status.st_size if size is None else size
    changed = getattr(status, "st_mtime_ns", None) or getattr(status, "mtime", None)
    return Stat(int(size or 0), f"{size}|{changed}|{getattr(status, 'st_ino', '')}")
