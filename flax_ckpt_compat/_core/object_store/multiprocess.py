"""Upload a checkpoint from several processes, below names that are unique to this save until it is committed.

Process 0 writes a marker. All processes then write below names that end in the marker's tag, which no other save uses.
So a checkpoint to be replaced stays whole until process 0 has seen all of the new one. The commit is that of a save
by one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import posixpath
from collections.abc import Collection

from flax_ckpt_compat._core.errors import ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.listing import AfterCommit
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import client, commit, uploads, visible_objects
from flax_ckpt_compat._core.object_store.writer_markers import (
    WriteLease,
    after_commit,
    tag_of,
    warn_of_leftovers,
)
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.thread_pools import at_once
from flax_ckpt_compat._core.upload import Upload


@dataclasses.dataclass(frozen=True)
class MultiprocessUpload(Upload):
    """A multi-process save to a store; see `Upload`."""

    url: str
    folder: str
    marker: str  # name of the marker object in ``folder``
    replaced: str  # version of the object at ``url`` before the save, in hexadecimal

    @property
    def needs_commit_file(self) -> bool:  # type: ignore[override]
        """Return whether real Flax, and jax, look for ``commit_success.txt`` before they read arrays."""
        return client.scheme_of(self.folder).needs_commit_file

    @property
    def tag(self) -> str:
        """Return the suffix of this save's directory names."""
        return tag_of(self.marker)

    def fields(self) -> dict[str, str]:
        return dataclasses.asdict(self)

    def is_part(self, key: str) -> bool:
        """Return whether a process of this save wrote an object of the folder."""
        return key.partition("/")[0].endswith(self.tag) and "/" in key

    def written(self) -> list[str]:
        return [key for key in client.fresh_keys(self.folder) if self.is_part(key)]

    def write(self, name: str, data: bytes) -> None:
        client.write(f"{self.folder}/{name}", data)

    def upload_files(self, directory: str, names: Collection[str], last: str, meter: Meter = OFF) -> None:
        uploads.upload(directory, self.folder, [name for name in names if name != last], {}, meter)
        uploads.upload_file(posixpath.join(directory, last), f"{self.folder}/{last}")
        self.check_active(names)

    def check_active(self, written: Collection[str]) -> None:
        if client.is_object(f"{self.folder}/{self.marker}"):
            return
        client.delete_all(f"{self.folder}/{name}" for name in written)
        message = f"{self.url}: process 0 has aborted this save, or another one replaced it, so nothing was saved"
        raise ConcurrentWriteError(message, path=self.url)

    def delete_harmless(self, name: str) -> None:
        try:
            client.delete(f"{self.folder}/{name}")
        except StorageError as error:
            warn_of_leftovers(self.url, "what told how far a save was", error)

    def publish(self, staged: str, *, new: bool, after: AfterCommit | None = None) -> None:
        lease = WriteLease(self.folder, self.marker)
        lease.after = after
        try:
            if self.folder == self.url:
                replaced = bytes.fromhex(self.replaced)
                commit.publish_folder(staged, lease, replaced, new=new, uploaded=self.written())
                if not new:
                    with after_commit(self.url):
                        commit.remove_arrays_beside(self.url)
            else:
                self._publish_gda(lease, staged, new, after)
        except ConcurrentWriteError:
            self.abort()
            raise
        atomic.delete(staged)

    def _publish_gda(self, lease: WriteLease, staged: str, new: bool, after: AfterCommit | None) -> None:
        replaced = [key for key in lease.list_others() if not self.is_part(key)]
        commit.publish_object(staged, self.url, new=new, after=after)
        with after_commit(self.url):
            self._remove_replaced(lease, replaced)

    def _remove_replaced(self, lease: WriteLease, replaced: Collection[str]) -> None:
        there = set(client.fresh_keys(self.folder))
        if self.marker not in there:  # another save ended meanwhile, and has removed the arrays
            lease.abort()
        if not lease.is_superseded(there):  # else the newer writer removes them
            client.delete_all(f"{self.folder}/{key}" for key in commit.arrays_among(replaced))
            client.delete_all(f"{self.folder}/{key}" for key in replaced if is_upload_marker(key))
        lease.release_committed()

    def abort(self) -> None:
        with contextlib.suppress(StorageError):
            there = set(client.fresh_keys(self.folder))
            if COMMIT_FILE in there and self.marker.encode() in client.read(f"{self.folder}/{COMMIT_FILE}"):
                return
            if visible_objects.current_folder(there) == visible_objects.next_name(self.marker):
                return
            client.delete_all(f"{self.folder}/{key}" for key in there if self.is_part(key))
            client.delete(f"{self.folder}/{self.marker}")


def begin(url: str, *, in_gda_folder: bool) -> MultiprocessUpload:
    """Write the marker, in process 0; remove nothing."""
    folder = url + ARRAYS_POSTFIX if in_gda_folder else url
    replaced, initial = at_once(lambda: client.version(url), lambda: client.fresh_keys(folder))
    lease = WriteLease(folder, replaces=not in_gda_folder, initial=initial)
    return MultiprocessUpload(url, folder, lease.marker, replaced.hex())
