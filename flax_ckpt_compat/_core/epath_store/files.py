"""Define `Files`, the few operations that a store of `EpathStorage` needs: list, read, write, delete.

`FsspecFiles` has those of ``az://`` and ``hf://``, which epath itself reaches through fsspec, whose interface also
reads parts of files and tells their versions. `PathFiles` has those of any path class that is registered with epath.
"""

from __future__ import annotations

import abc
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from flax_ckpt_compat._core.errors import CheckpointError, StorageError
from flax_ckpt_compat._core.signal_handler_errors import is_of_handler
from flax_ckpt_compat._core.storage_errors import not_found

_PACKAGES = {"az": "adlfs", "hf": "huggingface_hub"}
_CONTAINERS = {"az": ("container", 1), "hf": ("repository", 2)}  # what holds files, and how many names it has
READ_ONLY = frozenset(["hf"])
_MISSING = re.compile(r"(Resource|(Remote)?Entry|Revision|Repository)NotFoundError")
_VERSIONS = ("etag", "ETag", "blob_id", "oid", "last_modified", "mtime", "created")  # what fsspec may tell of a file


class FileInfo(NamedTuple):
    """Size of a file in bytes, and text that changes when it is replaced."""

    size: int
    version: str


class Files(abc.ABC):
    """The files below one scheme; paths are normalized URLs. A missing file is a FileNotFoundError.

    Attributes:
        holds_both: a file and a folder may have one name.
    """

    holds_both: bool

    @abc.abstractmethod
    def below(self, path: str) -> dict[str, FileInfo]:
        """Return all files below a folder, by their paths relative to it; none if there is no such folder."""

    @abc.abstractmethod
    def info(self, path: str) -> FileInfo:
        """Return size and version of a file."""

    @abc.abstractmethod
    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read a file from ``start`` to ``stop``; fewer bytes if it ends before."""

    @abc.abstractmethod
    def put(self, local: str, path: str, *, new: bool) -> None:
        """Write a whole file from a local one; raise FileExistsError with ``new`` if there is one."""

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file, if there is one; a folder of that name stays."""

    def prune(self, path: str) -> None:  # noqa: B027  (most stores have no folders without files)
        """Remove a folder if there is no file below it."""


def files_of(scheme: str) -> Files | None:
    """Return the files of a scheme that epath knows; None for any other."""
    from etils import epath

    if scheme in _PACKAGES:
        return FsspecFiles(scheme)
    try:
        epath.Path(f"{scheme}://x")
    except (KeyError, NotImplementedError):
        return None
    return PathFiles()


@contextmanager
def _telling(path: str, operation: str) -> Iterator[None]:
    """Make a StorageError of what clients of stores raise, which is of no common class; OSErrors stay."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        if is_of_handler(error):
            raise
        if _MISSING.fullmatch(type(error).__name__):
            raise not_found(path) from error
        what = str(error).partition("\n")[0] or type(error).__name__
        message = f"{path} could not be {operation}: {what:.300}; check the path, the network and the credentials"
        raise StorageError(message, path=path) from error


class FsspecFiles(Files):
    """Files of a scheme of fsspec; nothing is answered from its caches, which outlive what others change."""

    holds_both = True

    def __init__(self, scheme: str):
        """Keep the scheme; its client is opened on first use."""
        self._scheme = scheme

    def _client(self, path: str) -> Any:
        package = _PACKAGES[self._scheme]
        try:
            import fsspec

            client = fsspec.filesystem(self._scheme)  # which fsspec keeps
        except ImportError as error:
            message = f"{path}: {self._scheme}:// needs the package {package}: pip install {package}"
            raise StorageError(message, path=path) from error
        client.invalidate_cache()
        return client

    def below(self, path: str) -> dict[str, FileInfo]:
        with _telling(path, "listed"):
            client = self._client(path)
            prefix = client._strip_protocol(path).rstrip("/") + "/"
            try:
                found = client.find(path, detail=True)
            except FileNotFoundError:
                found = {}
            found = found if isinstance(found, dict) else {}  # adlfs gives a list for a file, and for nothing
            if not found:
                self._check_bucket(client, path)
        return {
            name[len(prefix) :]: _info(entry)
            for name, entry in found.items()
            if name.startswith(prefix) and name[-1] != "/" and entry.get("type") == "file"
        }

    def _check_bucket(self, client: Any, path: str) -> None:
        """Raise StorageError if the container itself is missing: a run that looks there would begin from scratch."""
        kind, names = _CONTAINERS[self._scheme]
        container = "/".join(path.partition("://")[2].split("/")[:names])
        if not client.exists(container):
            message = (
                f"{path}: there is no {kind} {container!r}, or no access to it; check the name, and the credentials"
            )
            raise StorageError(message, path=path)

    def info(self, path: str) -> FileInfo:
        with _telling(path, "found"):
            entry = self._client(path).info(path)
        if entry.get("type") != "file":
            raise not_found(path)
        return _info(entry)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        with _telling(path, "read"):
            try:
                return bytes(self._client(path).cat_file(path, start, stop))
            except OSError:
                raise
            except Exception:
                if start >= self.info(path).size:  # a range beyond the end is refused
                    return b""
                raise

    def put(self, local: str, path: str, *, new: bool) -> None:
        with _telling(path, "written"):
            self._client(path).put_file(local, path, overwrite=not new)

    def delete(self, path: str) -> None:
        with _telling(path, "deleted"):
            try:
                self._client(path).rm_file(path)
            except FileNotFoundError:
                return


def _info(entry: dict[str, Any]) -> FileInfo:
    version = "|".join(str(entry[name]) for name in _VERSIONS if entry.get(name))
    return FileInfo(int(entry["size"] or 0), f"{entry['size']}|{version}")


class PathFiles(Files):
    """Files of a path class that is registered with epath, by the methods of ``pathlib``."""

    holds_both = False

    def _path(self, path: str) -> Any:
        from etils import epath

        return epath.Path(path)

    def below(self, path: str) -> dict[str, FileInfo]:
        with _telling(path, "listed"):
            return dict(_walk(self._path(path), ""))

    def info(self, path: str) -> FileInfo:
        with _telling(path, "found"):
            there = self._path(path)
            if there.is_dir() or not there.exists():
                raise not_found(path)
            return _stat(there)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        with _telling(path, "read"), self._path(path).open("rb") as file:
            file.seek(start)
            return bytes(file.read(-1 if stop is None else stop - start))

    def put(self, local: str, path: str, *, new: bool) -> None:
        with _telling(path, "written"):
            target = self._path(path)
            if new and target.exists():
                raise FileExistsError(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(local, "rb") as file, target.open("wb") as to:
                while piece := file.read(2**24):
                    to.write(piece)

    def delete(self, path: str) -> None:
        with _telling(path, "deleted"):
            there = self._path(path)
            if there.exists() and not there.is_dir():
                with suppress(FileNotFoundError):
                    there.unlink()

    def prune(self, path: str) -> None:
        with _telling(path, "removed"):
            _prune(self._path(path))


def _walk(folder: Any, inside: str) -> Iterator[tuple[str, FileInfo]]:
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


def _stat(path: Any) -> FileInfo:
    status = path.stat()
    size = getattr(status, "length", None)
    size = status.st_size if size is None else size
    changed = getattr(status, "st_mtime_ns", None) or getattr(status, "mtime", None)
    return FileInfo(int(size or 0), f"{size}|{changed}|{getattr(status, 'st_ino', '')}")
