"""Upload a checkpoint from several processes, below names that are unique to this save until it is committed.

Process 0 writes a marker. All processes then write below names that end in the marker's tag, which no other save uses.
So a checkpoint to be replaced stays whole until process 0 has seen all of the new one. The commit is that of a save
by one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from pathlib import Path

from flax_ckpt_compat._core.errors import ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import commit
from flax_ckpt_compat._core.object_store.client import SCHEMES, Client
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.storage import Location
from flax_ckpt_compat._core.thread_pools import in_parallel


@dataclasses.dataclass(frozen=True)
class Upload:
    """The files of one save that its processes write below unique names, until process 0 commits them."""

    url: str  # of the checkpoint
    folder: str  # that all write below: the checkpoint's, or that of its arrays
    marker: str  # name of the marker object in ``folder``

    @property
    def _client(self) -> Client:
        return commit.client_for(self.folder)

    @property
    def needs_commit_file(self) -> bool:
        """Return whether real Flax, and jax, look for ``commit_success.txt`` before they read arrays."""
        return self._client.needs_commit_file

    @property
    def tag(self) -> str:
        """Return the suffix of the names of directories that no other save uses."""
        return f".{commit.tag_of(self.marker)}"

    def fields(self) -> dict[str, str]:
        """Return the arguments with which other processes make this object."""
        return dataclasses.asdict(self)

    def written(self) -> list[str]:
        """List what the processes have written so far, relative to the folder."""
        return list(filter(self._is_part, self._client.list(self.folder)))

    def _is_part(self, key: str) -> bool:
        return f".{commit.tag_of(key)}" == self.tag and key != self.marker

    def write(self, name: str, data: bytes) -> None:
        """Write one file below the folder."""
        self._client.put(f"{self.folder}/{name}", data)

    def upload_files(self, directory: str, names: Collection[str], last: str, meter: Meter = OFF) -> None:
        """Upload this process's files under the same names; ``last`` tells others that all are complete.

        Raise ConcurrentWriteError if process 0 has aborted the save."""

        def put(name: str) -> None:
            self._client.put(f"{self.folder}/{name}", Path(directory, name), meter=meter)

        in_parallel(put, [name for name in names if name != last], commit.AT_ONCE)
        put(last)
        self.check_active(names)

    def check_active(self, written: Collection[str]) -> None:
        """Raise ConcurrentWriteError, after removing what this process wrote, if process 0 has aborted the save."""
        if self._client.find(f"{self.folder}/{self.marker}") is None:
            self._delete(written)
            message = f"{self.url}: process 0 has aborted this save, or another one replaced it, so nothing was saved"
            raise ConcurrentWriteError(message, path=self.url)

    def delete_harmless(self, name: str) -> None:
        """Delete a file below the folder without which the save is as complete as with it, if that is permitted."""
        with commit.harmless(self.url, "what told how far a save was"):
            self._delete([name])

    def _delete(self, names: Collection[str]) -> None:
        in_parallel(lambda name: self._client.delete(f"{self.folder}/{name}"), names, commit.AT_ONCE)

    def publish(self, staged: str, *, new: bool) -> None:
        """Commit what all processes wrote, with what process 0 has still in ``staged``; see `Location.publish`."""
        save = commit.FolderSave(self.url, self.marker)
        try:
            if self.folder != self.url:
                self._publish_gda(staged, new)
            else:
                save.publish(staged, new=new, uploaded=self.written())
                if not new:
                    commit.remove_arrays_beside(self.url)
        except ConcurrentWriteError:
            if not save.has_begun:  # else the marker tells that what is there is not complete
                self.abort()
            raise
        atomic.remove_temporary(staged)

    def _publish_gda(self, staged: str, new: bool) -> None:
        there = self._client.list(self.folder)
        if commit.last_marker(there) != self.marker:
            raise commit.lost(self.url)
        commit.publish_object(staged, self.url, new=new)
        old = [key for key in there if key != self.marker and not self._is_part(key)]
        with commit.after_commit(self.url):
            self._delete([*commit.arrays_among(old), *filter(is_upload_marker, old)])
        self.delete_harmless(self.marker)

    def abort(self) -> None:
        """Remove what a failed save has written, unless it is committed; ignore refusals."""
        with contextlib.suppress(StorageError):
            there = self._client.list(self.folder)
            with contextlib.suppress(FileNotFoundError):  # another writer has removed it since
                if COMMIT_FILE in there and self.marker.encode() in self._client.read(f"{self.folder}/{COMMIT_FILE}"):
                    return
            self._delete([*filter(self._is_part, there), self.marker])


def begin(location: Location, *, in_gda_folder: bool) -> Upload | None:
    """Begin a save by writing the marker, in process 0; None where all processes write to one local temporary."""
    url = location.path
    if not location.is_remote:
        return None
    if (scheme := url.partition("://")[0]) not in SCHEMES:
        message = f"{url}: several processes cannot save one checkpoint to {scheme}://, which has no conditional writes"
        raise StorageError(f"{message}; save to a shared disk, s3:// or gs://, and copy that", path=url)
    folder = url + ARRAYS_POSTFIX if in_gda_folder else url
    save = commit.FolderSave(folder)
    save.begin()
    return Upload(url, folder, save.marker)
