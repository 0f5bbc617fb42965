"""Reach ``hf://``, and path classes that are registered with `etils.epath`, each by a package of its own.

Hugging Face's copies files to its local cache. A path class can list, read, write and delete files, and no more: files
are copied whole, whatever is there.
"""

from __future__ import annotations

import functools
import os
import posixpath
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from flax_ckpt_compat._core.byte_reads import Source
from flax_ckpt_compat._core.errors import CheckpointError, StorageError, is_of_handler, not_found, translated
from flax_ckpt_compat._core.object_store.client import ABSENT, Client, imported, replaced
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.storage import Location, Stat, split_url

_package = functools.partial(imported, package="huggingface_hub")
# An entry that is not in the local cache is no missing one, but a network that is.
_MISSING = ("FileNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError")


class HubClient(Client):
    """Requests to ``hf://organization/model[@revision]/path``, for reads alone."""

    access = "HF_TOKEN, the name and revision of the repository"

    def list(self, url: str) -> dict[str, Stat]:
        at, entries = _resolve(url), list[Any]()
        start = len(at["path"]) + 1 if at["path"] else 0
        with suppress(FileNotFoundError), self._telling(url):
            entries = [*_package(url).HfApi().list_repo_tree(recursive=True, path_in_repo=at.pop("path") or None, **at)]
        files = {one.path[start:]: Stat(one.size, one.blob_id) for one in entries if hasattr(one, "blob_id")}
        return dict(sorted(files.items()))

    def find(self, url: str) -> Stat | None:
        at = _resolve(url)
        with suppress(FileNotFoundError), self._telling(url):
            found = _package(url).HfApi().get_paths_info(paths=[name], **at) if (name := at.pop("path")) else []
            return next((Stat(one.size, one.blob_id) for one in found if hasattr(one, "blob_id")), None)
        return None

    def read(self, url: str, start: int = 0, stop: int | None = None, version: str | None = None) -> bytes:  # noqa: ARG002
        return Location(self._local_copy(url)).read(start, stop)

    def open(self, url: str) -> Source:
        source = Location(self._local_copy(url)).open_file()
        source.path = url
        return source

    def _local_copy(self, url: str) -> str:
        at = _resolve(url)
        with self._telling(url):
            return str(_package(url).hf_hub_download(filename=at.pop("path"), **at))

    def prepare(self, url: str, *_: object) -> Any:
        raise StorageError(f"{url}: hf:// is only read; save to a disk or to another store, and upload that", path=url)

    write = delete = prepare  # type: ignore[assignment]

    @contextmanager
    def _telling(self, url: str) -> Iterator[None]:
        """Make a StorageError of what the hub's client raises, which is of no common class; a missing file is none."""
        try:
            yield
        except Exception as error:
            if isinstance(error, CheckpointError) or is_of_handler(error):
                raise
            kind, name = type(error).__name__, _resolve(url)["repo_id"]
            lost = f"there is no repository {name!r} or revision, or no access to it: check the name and HF_TOKEN"
            remedy = lost if kind in ("RepositoryNotFoundError", "RevisionNotFoundError") else ""
            raise not_found(url) if kind in _MISSING else self.failure(error, url, "read", remedy) from error


def _resolve(path: str) -> dict[str, Any]:
    """Return kind, name and revision of a repository, and the path of a file in it."""
    first, *parts = path.partition("://")[2].split("/")
    kind = {"datasets": "dataset", "spaces": "space", "models": "model"}.get(first)
    names = parts if kind else [first, *parts]
    name, _, revision = "/".join(names[:2]).partition("@")
    return {"repo_type": kind, "repo_id": name, "revision": revision or None, "path": "/".join(names[2:])}


class EpathClient(Client):
    """Requests to the stores of schemes of epath."""

    shares_names = False

    def list(self, url: str) -> dict[str, Stat]:
        return dict(sorted(_walk(path_of(url), "")))

    def find(self, url: str) -> Stat | None:
        path = path_of(url)
        with suppress(FileNotFoundError):  # removed between two looks
            return None if path.is_dir() or not path.exists() else _stat(path)
        return None

    def read(self, url: str, start: int = 0, stop: int | None = None, version: str | None = None) -> bytes:
        if self.find(url) is None:  # path classes have other errors of their own
            raise not_found(url)
        with path_of(url).open("rb") as file:
            file.seek(start)
            data = bytes(file.read(-1 if stop is None else stop - start))
        if version is not None and ((found := self.find(url)) is None or found.version != version):
            raise replaced(url)
        return data

    def write(self, url: str, file: BinaryIO, version: str | None, meter: Meter) -> str:
        path = path_of(url)
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
            found, path = self.find(url), path_of(url)
            if found is None or version not in (None, found.version):
                return False
            with suppress(FileNotFoundError):
                path.unlink()
            with suppress(OSError):  # others write there
                while split_url(os.fspath(path.parent))[2] and not list(path.parent.iterdir()):
                    path = path.parent
                    path.rmdir()
            return True


def path_of(url: str) -> Any:
    """Return epath's path of a URL; raise KeyError or NotImplementedError if none is registered with its scheme."""
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
