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
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import client, commit, uploads, visible_objects
from flax_ckpt_compat._core.object_store.writer_markers import (
    WriteLease,
    after_commit,
    is_marker,
    tag_of,
    warn_of_leftovers,
)
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.thread_pools import at_once


@dataclasses.dataclass(frozen=True, slots=True)
class MultiprocessUpload:
    """A multi-process save to a store."""

    url: str
    folder: str  # URL that all processes write below: the checkpoint's, or its GDA folder's
    marker: str  # name of the marker object in ``folder``
    replaced: str  # version of the object at ``url`` before the save, in hexadecimal

    @property
    def tag(self) -> str:
        """Return the suffix of this save's directory names."""
        return tag_of(self.marker)

    def is_part(self, key: str) -> bool:
        """Return whether a process of this save wrote an object of the folder."""
        return key.partition("/")[0].endswith(self.tag) and "/" in key

    def written(self) -> list[str]:
        """List what the processes have written so far, relative to the folder."""
        return [key for key in client.fresh_keys(self.folder) if self.is_part(key)]


def begin(url: str, *, in_gda_folder: bool) -> MultiprocessUpload:
    """Write the marker, in process 0; remove nothing."""
    folder = url + ARRAYS_POSTFIX if in_gda_folder else url
    replaced, initial = at_once(lambda: client.version(url), lambda: client.fresh_keys(folder))
    lease = WriteLease(folder, replaces=not in_gda_folder, initial=initial)
    return MultiprocessUpload(url, folder, lease.marker, replaced.hex())


def upload_files(upload: MultiprocessUpload, directory: str, names: Collection[str], last: str) -> None:
    """Upload a process's files, each `MultiprocessUpload.is_part`, as objects of the same names in the folder.

    ``last`` tells others that all are complete. Raise ConcurrentWriteError if process 0 has aborted the save."""
    uploads.upload(directory, upload.folder, [name for name in names if name != last], {})
    uploads.upload_file(posixpath.join(directory, last), f"{upload.folder}/{last}")
    check_active(upload, names)


def check_active(upload: MultiprocessUpload, written: Collection[str]) -> None:
    """Raise ConcurrentWriteError, after removing what this process wrote, if process 0 has aborted the save."""
    if client.is_object(f"{upload.folder}/{upload.marker}"):
        return
    client.delete_all(f"{upload.folder}/{name}" for name in written)
    message = f"{upload.url}: process 0 has aborted this save, or another one replaced it, so nothing was saved"
    raise ConcurrentWriteError(message, path=upload.url)


def delete_harmless(upload: MultiprocessUpload, file: str) -> None:
    """Delete an object of the save without which it is as complete as with it, if the store permits that."""
    try:
        client.delete(file)
    except StorageError as error:
        warn_of_leftovers(upload.url, "what told how far a save was", error)


def publish(upload: MultiprocessUpload, staged: str, *, new: bool) -> None:
    """Commit what all processes wrote with what process 0 has still to upload from ``staged``; see `commit.publish`."""
    lease = WriteLease(upload.folder, upload.marker)
    try:
        if upload.folder == upload.url:
            replaced = bytes.fromhex(upload.replaced)
            commit.publish_folder(staged, lease, replaced, new=new, uploaded=upload.written())
            if not new:
                with after_commit(upload.url):
                    commit.remove_arrays_beside(upload.url)
        else:
            _publish_gda(upload, lease, staged, new)
    except ConcurrentWriteError:
        abort(upload)
        raise
    atomic.delete(staged)


def _publish_gda(upload: MultiprocessUpload, lease: WriteLease, staged: str, new: bool) -> None:
    replaced = [key for key in lease.list_others() if not upload.is_part(key)]
    commit.publish_object(staged, upload.url, new=new)
    with after_commit(upload.url):
        _remove_replaced(upload, lease, replaced)


def _remove_replaced(upload: MultiprocessUpload, lease: WriteLease, replaced: Collection[str]) -> None:
    there = set(client.fresh_keys(upload.folder))
    if upload.marker not in there:  # another save ended meanwhile, and has removed the arrays
        lease.abort()
    if not lease.is_superseded(there):  # else the newer writer removes them
        client.delete_all(f"{upload.folder}/{key}" for key in commit.arrays_among(replaced))
        client.delete_all(f"{upload.folder}/{key}" for key in replaced if is_marker(key))
    lease.release_committed()


def abort(upload: MultiprocessUpload) -> None:
    """Remove what a failed save has written, unless it is committed; ignore store errors."""
    with contextlib.suppress(StorageError):
        there = set(client.fresh_keys(upload.folder))
        if COMMIT_FILE in there and upload.marker.encode() in client.read(f"{upload.folder}/{COMMIT_FILE}"):
            return
        if visible_objects.current_folder(there) == visible_objects.next_name(upload.marker):
            return
        client.delete_all(f"{upload.folder}/{key}" for key in there if upload.is_part(key))
        client.delete(f"{upload.folder}/{upload.marker}")
