"""Save a folder to a store, which has no rename. It is written in this order:

1. a marker ``_begun…`` with the names of the data. Of several writers that with the highest goes on, others give up;
2. data, under names that no other save uses. Several processes write it below names that end in the marker's tag;
3. a list, which tells what is there, and whether a later writer has begun;
4. the commit file of what is replaced goes. From here on the folder has a marker and no commit file: it is unfinished;
5. all other files, each on the condition that it is as it was listed;
6. another list, ``commit_success.txt``, which Orbax too writes last in stores, and a last list. If anything else has
   changed, all begins again at step 3;
7. what was replaced goes, and the marker.

An overwrite of the same tree changes nothing but the index, times and checksums, and the folder stays complete: the
commit file is replaced in step 4, and the index, which is written first, switches to the new arrays. The checksums of
the old one go before that, and the new ones come when all else is there.
"""

from __future__ import annotations

import posixpath
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.errors import ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.object_store import commit
from flax_ckpt_compat._core.object_store.client import ABSENT, ConflictError
from flax_ckpt_compat._core.object_store.commit import AT_ONCE, Files, lost
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, MANIFEST, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.storage import Location
from flax_ckpt_compat._core.thread_pools import in_parallel

_ROUNDS, _PAUSE = 8, 0.5  # of a writer to which others give way, and seconds between them
_COMMITTED = "All objects of this checkpoint were written before this one.\n{}\n"


class Upload:
    """A save of a folder, in one of its processes: of a checkpoint, or of the arrays beside a msgpack file."""

    def __init__(self, url: str, folder: str = "", marker: str = ""):
        """Take the name of the marker if process 0 has begun the save."""
        self.url, self.folder, self.marker, self._client = url, folder or url, marker, commit.client_for(url)
        # Real Flax, and jax, look for ``commit_success.txt`` before they read arrays.
        self.needs_commit_file = self._client.needs_commit_file
        self._expected: dict[str, str] = {}  # name of a file that other saves have, too → version that is there
        self._has_begun = False  # such files may be there, or those of another save are gone

    def begin(self, *, new: bool = False, data: Collection[str] = ()) -> None:
        """Write the marker, with the names of the data; with ``new``, only where no checkpoint is."""
        found = self._client.list(self.folder)
        is_there, needs_it = COMMIT_FILE in found, self.needs_commit_file
        is_copy = bool(found) and not (is_there or needs_it or commit.is_unfinished(found))  # of a local checkpoint
        if new and (is_there or is_copy):
            raise lost(self.url)
        if is_copy and not self.folder.endswith(ARRAYS_POSTFIX):  # it would be unfinished beside a marker
            with suppress(ConflictError):
                self._put_commit_file(ABSENT)
        if not self._client.shares_names:
            self._client.delete(self.folder)
        self.marker = commit.new_marker(max(int(time.time()), commit.time_of(commit.last_marker(found)) + 1))
        self._put_marker(data)

    def _put_marker(self, data: Collection[str]) -> None:
        self.write(self.marker, "\n".join(data).encode())

    def _put_commit_file(self, version: str) -> None:
        text = _COMMITTED.format(self.marker or uuid.uuid4().hex)
        self._expected[COMMIT_FILE] = self._client.put(f"{self.folder}/{COMMIT_FILE}", text.encode(), version)

    # What each of several processes does.

    @property
    def tag(self) -> str:
        """Return the suffix of the names of directories that no other save uses."""
        return f".{commit.tag_of(self.marker)}"

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
        self._send(directory, [name for name in names if name != last], meter)
        self._send(directory, [last], meter)
        self.check_active(names)

    def _send(self, directory: str, names: Collection[str], meter: Meter) -> None:
        def put(name: str) -> None:
            self._client.put(f"{self.folder}/{name}", Path(directory, name), meter=meter)

        in_parallel(put, names, AT_ONCE)

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
        in_parallel(lambda name: self._client.delete(f"{self.folder}/{name}"), names, AT_ONCE)

    def abort(self) -> None:
        """Remove what a save that has not been published has written; ignore refusals."""
        with suppress(StorageError):
            self._delete([*self.written(), self.marker])

    # The commit.

    def publish(self, staged: str, *, new: bool = False, meter: Meter = OFF) -> None:
        """Commit a local file or directory, with what all processes have written; see `Location.publish`."""
        if self.folder != self.url:
            self._publish_file(staged, new)
            return
        uploaded = self.written() if self.marker else []
        names = [name for name in presence.files_below(staged) if name not in {COMMIT_FILE, *uploaded}]
        data = [name for name in names if not commit.is_fixed(name)]
        parts, fixed = [*data, *uploaded], sorted(filter(commit.is_fixed, names))
        if not self.marker:
            self.begin(new=new, data=data)
        try:
            # Looked for once the marker is there: one of two new saves sees the other.
            found = commit.object_at(self.url, new=new)
            self._send(staged, data, meter)
            there = self._commit(staged, fixed, parts, new, meter)
        except BaseException:
            begun, self.marker = self.marker, commit.new_marker(commit.time_of(self.marker) - 1)
            with suppress(StorageError):  # of another name, which removers have not listed; the first may be gone
                self._put_marker(data)
            if not self._has_begun:  # else others may count on what is there
                with suppress(StorageError):
                    self._delete([*parts, begun])
                    self._delete([self.marker])
            raise
        with commit.after_commit(self.url):
            if found is not None:
                self._client.delete(self.url, found.version)
            ours = {*names, *uploaded, COMMIT_FILE, self.marker}
            commit.delete(self.url, {name: stat for name, stat in there.items() if name not in ours})
        self.delete_harmless(self.marker)
        if not new:
            commit.remove_arrays_beside(self.url)

    def _commit(self, staged: str, fixed: list[str], parts: list[str], new: bool, meter: Meter) -> Files:
        """Replace the files that other saves have, too, and commit them with the parts; return all that is there."""
        for _ in range(_ROUNDS):
            there = self._look(parts)
            with suppress(ConflictError):  # others change them meanwhile
                if not (new and COMMIT_FILE in there):
                    self._expected = commit.fixed(there)
                    return self._replace(staged, fixed, parts, meter)
            time.sleep(_PAUSE)
        raise lost(self.url)

    def _replace(self, staged: str, fixed: list[str], parts: list[str], meter: Meter) -> Files:
        def put(name: str) -> None:
            path, version = Path(staged, name), self._expected.get(name, ABSENT)
            self._expected[name] = self._client.put(f"{self.url}/{name}", path, version, meter)

        indexes = [name for name in fixed if posixpath.basename(name) == MANIFEST]
        sums = [name for name in fixed if name == layout.CHECKSUMS]
        rest = [name for name in fixed if name not in (*indexes, *sums)]
        switches = len(indexes) == 1 and self._is_same_tree(staged, fixed)
        self._has_begun = True
        if switches:  # other writers find another commit file, and so no more what they listed
            self._put_commit_file(self._expected[COMMIT_FILE])
        gone = layout.CHECKSUMS if switches else COMMIT_FILE
        if gone in self._expected and not self._client.delete(f"{self.url}/{gone}", self._expected.pop(gone)):
            raise ConflictError(self.url)
        # The first file decides who writes. Beside its sums, a file of other bytes would count as damaged.
        for group in [indexes, rest, sums] if switches else [rest[:1], [*rest[1:], *sums], indexes]:
            in_parallel(put, group, AT_ONCE)
        if not switches:
            self._check(parts)
            self._put_commit_file(ABSENT)
        try:
            return self._check(parts)
        except (ConflictError, ConcurrentWriteError):  # another writer has begun to replace files just before
            self._client.delete(f"{self.url}/{COMMIT_FILE}", self._expected[COMMIT_FILE])
            raise

    def _look(self, parts: Collection[str] = ()) -> Files:
        """List the folder; raise ConcurrentWriteError if a later writer has begun, or removed parts of this save."""
        there = self._client.list(self.folder)
        if commit.last_marker(there) != self.marker or not set(parts) <= there.keys():
            raise lost(self.url)
        return there

    def _check(self, parts: Collection[str]) -> Files:
        """List the folder; raise ConflictError if another writer has changed what this one expects."""
        there = self._look(parts)
        if commit.fixed(there) != self._expected:
            raise ConflictError(self.url)
        return there

    def _is_same_tree(self, staged: str, fixed: list[str]) -> bool:
        """Return whether nothing but indexes, checksums, times and blanks tell the new checkpoint from the old one."""

        def is_same(name: str) -> bool:
            if name in (layout.CHECKSUMS, layout.STEP_METADATA) or posixpath.basename(name) == MANIFEST:
                return True
            found = self._client.read(f"{self.url}/{name}")
            return Path(staged, name).read_bytes().rstrip() == found.rstrip()

        with suppress(FileNotFoundError):  # another writer removes it
            return self._expected.keys() == {*fixed, COMMIT_FILE} and all(in_parallel(is_same, fixed, AT_ONCE))
        return False

    def _publish_file(self, staged: str, new: bool) -> None:
        """Commit the msgpack file that refers to the arrays in the folder."""
        try:
            there = self._look()
            commit.publish_object(staged, self.url, new=new)
        except ConcurrentWriteError:
            self.abort()
            raise
        old = [key for key in there if key != self.marker and not self._is_part(key)]
        with commit.after_commit(self.url):
            self._delete([*commit.arrays_among(old), *filter(is_upload_marker, old)])
        self.delete_harmless(self.marker)


def begin(location: Location, *, in_gda_folder: bool) -> Upload | None:
    """Begin a save by several processes, in process 0; None where all write to one local temporary."""
    url = location.path
    if not location.is_remote:
        return None
    if not commit.client_for(url).shares_names:
        message = f"{url}: several processes cannot save one checkpoint to this store, which has no conditional writes"
        raise StorageError(f"{message}; save to a shared disk, s3:// or gs://, and copy that", path=url)
    upload = Upload(url, url + ARRAYS_POSTFIX if in_gda_folder else "")
    upload.begin()
    return upload
