"""Reach the path classes that are registered with `etils.epath`, through the methods of ``pathlib``.

Such a store can list, read, write and delete files, and no more: files are copied whole, whatever is there.
"""

from __future__ import annotations

import os
import posixpath
import shutil
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from flax_ckpt_compat._core.object_store.client import ABSENT, Client, replaced, split
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.storage import Stat
from flax_ckpt_compat._core.storage_errors import not_found, translated


def is_known(scheme: str) -> bool:
    """Return whether a path class of a scheme is registered with epath."""
    try:
        _path(f"{scheme}://x")
    except (KeyError, NotImplementedError):
        return False
    return True


class EpathClient(Client):
    """Requests to the stores of schemes of epath."""

    shares_names = False

    def list(self, url: str) -> dict[str, Stat]:
        return dict(sorted(_walk(_path(url), "")))

    def find(self, url: str) -> Stat | None:
        path = _path(url)
        with suppress(FileNotFoundError):  # removed between two looks
            return None if path.is_dir() or not path.exists() else _stat(path)
        return None

    def read(self, url: str, start: int = 0, stop: int | None = None, version: str | None = None) -> bytes:
        if self.find(url) is None:  # path classes have other errors of their own
            raise not_found(url)
        with _path(url).open("rb") as file:
            file.seek(start)
            data = bytes(file.read(-1 if stop is None else stop - start))
        if version is not None and ((found := self.find(url)) is None or found.version != version):
            raise replaced(url)
        return data

    def write(self, url: str, file: BinaryIO, version: str | None, meter: Meter) -> str:
        path = _path(url)
        with translated(url, "written"):
            # Such a store may be a disk, where no file and folder share a name.
            inside = list(self.list(url))
            if version == ABSENT and (COMMIT_FILE in inside or self.find(url) is not None):
                raise replaced(url)
            for name in inside:
                self.delete(f"{url}/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as there:
                shutil.copyfileobj(file, there)
            meter.add(file.tell(), url)
            return _stat(path).version

    def delete(self, url: str, version: str | None = None) -> bool:
        with translated(url, "removed"):
            found, path = self.find(url), _path(url)
            if found is None or version not in (None, found.version):
                return False
            with suppress(FileNotFoundError):
                path.unlink()
            with suppress(OSError):  # others write there
                while split(os.fspath(path.parent))[2] and not list(path.parent.iterdir()):
                    path = path.parent
                    path.rmdir()
            return True


def _path(url: str) -> Any:
    from etils import epath

    return epath.Path(url)


def _walk(folder: Any, inside: str) -> Iterator[tuple[str, Stat]]:
    if not folder.is_dir():
        return
    for child in folder.iterdir():
        name = posixpath.join(inside, child.name)
        if child.is_dir():
            yield from _walk(child, name)
        else:
            yield name, _stat(child)


def _stat(path: Any) -> Stat:
    found = path.stat()  # of `os`, or of epath
    size = int(getattr(found, "length", None) or getattr(found, "st_size", 0) or 0)
    changed = getattr(found, "st_mtime_ns", None) or getattr(found, "mtime", None)
    return Stat(size, f"{size}|{changed}|{getattr(found, 'st_ino', '')}")
