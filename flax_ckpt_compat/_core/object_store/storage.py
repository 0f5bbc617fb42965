"""Reach ``s3://``, ``gs://`` and ``az://`` URLs, where a folder exists while it holds an object."""

from __future__ import annotations

import errno
from collections.abc import Collection

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import client, commit
from flax_ckpt_compat._core.object_store.remote_storage import RemoteLocation
from flax_ckpt_compat._core.object_store.request_errors import ConflictError
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import HEAD_BYTES, Source, Stat


class ObjectLocation(RemoteLocation):
    """A URL of a store that fsspec has a client for."""

    __slots__ = ()

    @classmethod
    def normal(cls, path: str) -> str:
        return client.normal(path)

    def list_files(self, path: str) -> dict[str, Stat]:
        return commit.client_for(path).list(path)

    def find(self, path: str) -> Stat | None:
        return commit.client_for(path).find(path)

    def read_range(self, path: str, start: int, stop: int | None) -> bytes:
        return commit.client_for(path).read(path, start, stop)

    def needs_commit_file(self) -> bool:
        return commit.client_for(self.path).needs_commit_file

    def open_file(self) -> OpenedObject:
        return OpenedObject(self.path)

    def remove(self, path: str) -> None:
        commit.remove(path)

    def prepare_directory(self) -> None:
        for name in commit.leftovers(self._inside()):
            try:
                self.remove_leftovers([name])
            except StorageError as error:  # it must not prevent a save
                commit.warn_of_leftovers(f"{self}/{name}", "what an interrupted save left", error)

    def leftovers(self) -> dict[str, bool]:
        # Parts that are no object yet are in no list; an object of that name, which is complete, stays.
        parts = {name: self.find(f"{self}/{name}") is None for name in commit.stale_uploads(self.path)}
        return parts | commit.leftovers(self.list_files(self.path))

    def remove_leftovers(self, names: Collection[str]) -> None:
        files, uploads = self.list_files(self.path), commit.stale_uploads(self.path)
        folders = commit.by_folder(files)
        for name in set(names).intersection(commit.leftovers(files)):
            commit.remove_leftovers(f"{self}/{name}", folders[name])
        for name in set(names).intersection(uploads):
            commit.client_for(self.path).abort_unfinished(f"{self}/{name}")

    def publish(self, temporary: str, *, new: bool = False, meter: Meter = OFF) -> None:
        commit.publish(temporary, self.path, new=new, meter=meter)
        atomic.delete(temporary)


class OpenedObject(Source):
    """One version of an object, read in parts."""

    def __init__(self, url: str):
        self.path = url
        self._client = commit.client_for(url)
        self.head, (self.size, self._version, _) = self._client.open(url, HEAD_BYTES)

    def read(self, start: int, stop: int) -> bytes:
        """Read from ``start`` to ``stop`` or the end; raise StorageError if the object was replaced or removed."""
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        try:
            found = self._client.read(self.path, start, stop, self._version)
        except (ConflictError, FileNotFoundError) as error:
            message = f"{self.path} was replaced or removed since it was opened; open it again"
            raise ConflictError(message, path=self.path, errno=errno.ESTALE) from error
        if len(found) != stop - start:
            raise StorageError(f"{self.path} could not be read: the answer has fewer bytes", path=self.path)
        return found
