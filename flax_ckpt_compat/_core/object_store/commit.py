"""Publish and remove checkpoints of stores, which have no rename: msgpack files, which appear whole, and folders.

A folder is written in this order:

1. a marker ``_begun…`` with the names of the data. Of several writers that with the highest goes on, others give up;
2. data, under names that no other save uses. Several processes write it below names that end in the marker's tag;
3. a list, which tells what is there, and whether a later writer has begun;
4. the commit file of what is replaced goes. From here on the folder has a marker and no commit file: it is unfinished;
5. all other files, each on the condition that it is as it was listed;
6. another list, ``commit_success.txt``, which Orbax too writes last in stores, and a last list. If a later writer has
   begun, that file goes again, unless that writer has changed it, to say that it gives up. If anything else has
   changed, all begins again at step 3;
7. what was replaced goes, and the marker.

An overwrite of the same tree changes nothing but the index, times and checksums, and the folder stays complete: the
commit file is replaced in step 4, and the index, which is written first, switches to the new arrays. The checksums of
the old one go before that, and the new ones come when all else is there.

A folder is removed by a marker, which ends the saves of others, then its commit file goes, then the rest, markers last.
An object and a folder may share a name for a moment: the folder counts once it has a commit file.
"""

from __future__ import annotations

import logging
import posixpath
import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.errors import CleanupError, ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.numbered_names import ARRAYS_POSTFIX
from flax_ckpt_compat._core.object_store.client import ABSENT, EXPIRES_AFTER, Client, ConflictError
from flax_ckpt_compat._core.object_store.clouds import AzClient, GsClient, S3Client
from flax_ckpt_compat._core.object_store.hub_and_epath import EpathClient, HubClient, path_of
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, MANIFEST, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Location, Stat, split_url
from flax_ckpt_compat._core.thread_pools import in_parallel

_log = logging.getLogger("flax_ckpt_compat")
_AT_ONCE = 16
_ROUNDS, _PAUSE = 8, 0.5  # of a writer to which others give way, and seconds between them
_COMMITTED = "All objects of this checkpoint were written before this one.\n{}\n"
# Names that no other save uses.
_DATA_FILE = rf"(?:.*/)?{layout.DATA_DIRECTORY}/{layout.DATA_FILE_PATTERN}"
_OF_ONE_SAVE = re.compile(rf"{_DATA_FILE}|{re.escape(layout.PROCESS_PREFIX)}[^/]*\..*", re.DOTALL)
_warned: set[str] = set()  # folders of checkpoints of which `harmless` has warned
Files = Mapping[str, Stat]

CLIENTS: dict[str, Client] = {"s3": S3Client(), "gs": GsClient(), "az": AzClient(), "hf": HubClient()}


def client_for(url: str) -> Client:
    """Return the client of a URL's scheme."""
    if (scheme := split_url(url)[0]) not in CLIENTS:
        try:
            path_of(f"{scheme}://x")
        except (KeyError, NotImplementedError) as error:
            known = "s3://, gs://, az:// and hf:// URLs, those of path classes registered with epath, and local paths"
            message = f"{url}: the scheme {scheme + '://'!r} is unknown; {known} can be used"
            raise StorageError(message, path=url) from error
        CLIENTS[scheme] = EpathClient()
    return CLIENTS[scheme]


def is_unfinished(names: Collection[str]) -> bool:
    """Return whether a folder with these names has a marker of ours and no commit file."""
    return COMMIT_FILE not in names and any(map(is_upload_marker, names))


def last_marker(names: Iterable[str]) -> str:
    """Return the marker of the save that began last; "" without one."""
    return max(filter(is_upload_marker, names), key=lambda name: (time_of(name), name), default="")


def time_of(marker: str) -> int:
    """Return the number by which markers are ordered, the seconds at which a save began; 0 without a marker."""
    return int(marker.split(".")[1]) if marker else 0


def may_be_written(names: Iterable[str]) -> bool:
    """Return whether the save that began last in a folder may still run; after a day its writer counts as dead."""
    return time.time() - time_of(last_marker(names)) <= EXPIRES_AFTER


def new_marker(number: int) -> str:
    """Return the name of a marker of its own."""
    return f"{layout.BEGUN}.{number}.{uuid.uuid4().hex}"


def version_at(url: str, *, new: bool) -> str:
    """Return the version of the object of a name; with ``new``, raise ConcurrentWriteError if it is a checkpoint."""
    found = client_for(url).find(url) or Stat(0, ABSENT)
    if new and found.size:  # an empty one is none
        raise lost(url)
    return found.version


def publish_object(staged: str, url: str, *, new: bool, meter: Meter = OFF) -> None:
    """Upload a msgpack file, and remove a folder of its name; with ``new``, nothing is replaced.

    Raise ConcurrentWriteError if another process writes, or has just written, the same checkpoint."""
    client, version = client_for(url), version_at(url, new=True) if new else None
    # What is committed beside the object after this list is newer: it counts, and stays.
    hidden = client.list(url) if client.shares_names and not new else {}
    try:
        version = client.put(url, Path(staged), version, meter)
    except ConflictError as error:
        raise lost(url) from error
    if new:
        hidden = client.list(url)
    # Until its commit file is gone, the folder counts.
    gone = None if new and COMMIT_FILE in hidden else uncommit(url, hidden)
    if new and gone is None:
        client.delete(url, version)
        raise lost(url)
    if gone:
        with after_commit(url):
            delete(url, gone, versions_of(gone))


def remove(url: str) -> None:
    """Remove a checkpoint, the object first: it must not reappear when the folder that replaced it is gone."""
    client = client_for(url)
    client.delete(url)
    if gone := uncommit(url, client.list(url)):
        delete(url, gone, versions_of(gone))


def uncommit(url: str, found: Files) -> Files | None:
    """Mark a folder, and delete its commit file; return what has to go, or None if it was committed meanwhile."""
    if not found:
        return found
    client, commit_file, last = client_for(url), f"{url}/{COMMIT_FILE}", last_marker(found)
    # What is being saved there ends. What began after the folder was listed, and so is not removed, need not end.
    marker = new_marker(time_of(last) + 1 if last else int(time.time()))
    version = client.put(f"{url}/{marker}", b"")
    is_ours = COMMIT_FILE in found and client.delete(commit_file, found[COMMIT_FILE].version)
    there = {} if is_ours else client.list(url)  # without a commit file, an answer was lost, and it is gone
    if COMMIT_FILE in there and (_confirm_commit(url, there, marker) or client.find(commit_file) is not None):
        client.delete(f"{url}/{marker}")
        return None
    return {name: stat for name, stat in found.items() if name != COMMIT_FILE} | {marker: Stat(0, version)}


def _confirm_commit(url: str, there: Files, marker: str) -> bool:
    """Confirm a folder's commit for a writer whose marker has come meanwhile; return whether this one can give up.

    The commit file changes, so that its writer withdraws it no more, unless a third one may be replacing files."""
    client, commit_file, version = client_for(url), f"{url}/{COMMIT_FILE}", there[COMMIT_FILE].version
    with suppress(ConflictError, FileNotFoundError):
        text, other = client.read(commit_file, version=version), last_marker(there.keys() - {marker}).encode()
        if other and other in text:
            client.put(commit_file, text + b"\n", version)
        return not other or other in text  # without another one, its writer has ended
    return False


def delete(url: str, names: Collection[str], versions: Mapping[str, str] = {}) -> None:
    """Delete files of a folder, the markers last; of those with a version, that one alone."""
    client = client_for(url)
    for is_last in (False, True):
        group = [name for name in names if is_upload_marker(name) == is_last]
        in_parallel(lambda name: client.delete(f"{url}/{name}", versions.get(name)), group, _AT_ONCE)


def remove_arrays_beside(url: str) -> None:
    """Remove the GDA folder of a replaced msgpack checkpoint, unless a save by several processes writes to it."""
    folder = url + ARRAYS_POSTFIX
    with after_commit(url):
        there = client_for(url).list(folder)
        if (arrays := arrays_among(there)) and not may_be_written(there):
            marks = [name for name in there if is_upload_marker(name) or name == COMMIT_FILE]
            delete(folder, arrays + marks, versions_of(there))


def arrays_among(keys: Collection[str]) -> list[str]:
    """Return the keys that are parts of zarr arrays."""
    is_part = re.compile(rf"{re.escape(layout.ZARR2_METADATA)}|{layout.ZARR2_CHUNK.pattern}").fullmatch
    folders = {folder for folder, name in map(posixpath.split, keys) if name == layout.ZARR2_METADATA}
    return [key for key in keys if posixpath.dirname(key) in folders and is_part(posixpath.basename(key))]


# What dead writers left.


def leftovers(url: str, files: Files) -> dict[str, Files]:
    """Return the folders among the files of one in which only dead writers write → the files of each that go."""
    folders, found = dict[str, dict[str, Stat]](), dict[str, Files]()
    for key, stat in files.items():
        name, _, rest = key.partition("/")
        folders.setdefault(name, {})[rest] = stat
    for name, there in folders.items():
        main = name.removesuffix(ARRAYS_POSTFIX)
        # Only the msgpack file knows which arrays beside it are in use; the rest is removed with it.
        if last_marker(there) and not may_be_written(there) and (main == name or main not in folders):
            there.pop("", None)  # an object of that name
            found[name] = there if main != name or is_unfinished(there) else _beside_a_commit(f"{url}/{name}", there)
    return found


def _beside_a_commit(url: str, there: Files) -> Files:
    """Return the markers of a complete folder, and what their saves wrote, unless it is in use."""
    client, found = client_for(url), dict[str, Stat]()
    with suppress(FileNotFoundError, StorageError):  # what another removes meanwhile, or nobody may read, stays
        committed = client.read(f"{url}/{COMMIT_FILE}")
        for marker in filter(is_upload_marker, there):
            own, tag = set(client.read(f"{url}/{marker}").decode("utf-8", "replace").split("\n")), tag_of(marker)
            if tag.encode() not in committed:
                found |= {key: there[key] for key in there if tag_of(key) == tag or (key in own and not is_fixed(key))}
            found[marker] = there[marker]
    return found


def tag_of(key: str) -> str:
    """Return the number of the save that alone has a marker, or files in a folder, of this name."""
    return key.partition("/")[0].rpartition(".")[2]


@contextmanager
def harmless(url: str, what: str) -> Iterator[None]:
    """Log that objects which do no harm could not be removed: as a warning once for a folder of checkpoints."""
    try:
        yield
    except StorageError as error:
        level = logging.INFO if (folder := posixpath.dirname(url)) in _warned else logging.WARNING
        _warned.add(folder)
        _log.log(level, "Cannot remove %s at %s, which does no harm: %s. The next are logged as info", what, url, error)


@contextmanager
def after_commit(url: str) -> Iterator[None]:
    """Convert StorageErrors within the context to CleanupErrors, which say that the checkpoint was saved."""
    try:
        yield
    except StorageError as error:
        message = f"{url} was saved, but what it replaced could not be removed: {error}"
        raise CleanupError(f"{message}. The next save of this step removes it", path=url) from error


def is_fixed(name: str) -> bool:
    """Return whether other saves have a file of this name."""
    return not is_upload_marker(name) and _OF_ONE_SAVE.fullmatch(name) is None


def versions_of(found: Files) -> dict[str, str]:
    """Return the versions of the files that other saves have, too."""
    return {name: stat.version for name, stat in found.items() if is_fixed(name)}


def lost(url: str) -> ConcurrentWriteError:
    """Return the error of a save that another writer of the same checkpoint has overtaken."""
    message = f"{url}: another process writes, wrote or removes this checkpoint at the same time, so this one was not"
    remedy = "save each step from one place only, or pass overwrite=True to replace what is there"
    return ConcurrentWriteError(f"{message} saved; {remedy}", path=url)


# Saves of folders.


class Upload:
    """A save of a folder, in one of its processes: of a checkpoint, or of the arrays beside a msgpack file."""

    def __init__(self, url: str, folder: str = "", marker: str = ""):
        """Take the name of the marker if process 0 has begun the save."""
        self.url, self.folder, self.marker, self.client = url, folder or url, marker, client_for(url)
        self._expected: dict[str, str] = {}  # name of a file that other saves have, too → version that is there
        self._has_begun = False  # such files may be there, or those of another save are gone

    def begin(self, *, new: bool = False, data: Collection[str] | None = None) -> None:
        """Write the marker, with the names of the data of a single process; with ``new``, only where no checkpoint is.

        Several processes, whose data get names of their own, save to stores with conditional writes alone."""
        if data is None and not self.client.shares_names:
            why = "several processes cannot save one checkpoint to this store, which has no conditional writes"
            raise StorageError(f"{self.url}: {why}; save to a shared disk, s3:// or gs://; copy that", path=self.url)
        found = self.client.list(self.folder)
        is_there, needs_it = COMMIT_FILE in found, self.client.needs_commit_file
        is_copy = bool(found) and not (is_there or needs_it or is_unfinished(found))  # of a local checkpoint
        if new and (is_there or is_copy):
            raise lost(self.url)
        if is_copy and not self.folder.endswith(ARRAYS_POSTFIX):  # it would be unfinished beside a marker
            with suppress(ConflictError):
                self._put_commit_file(ABSENT)
        if not self.client.shares_names:
            self.client.delete(self.folder)
        self.marker = new_marker(max(int(time.time()), time_of(last_marker(found)) + 1))
        self.write(self.marker, "\n".join(data or ()).encode())

    def _put_commit_file(self, version: str) -> None:
        text = _COMMITTED.format(self.marker or uuid.uuid4().hex)
        self._expected[COMMIT_FILE] = self.client.put(f"{self.folder}/{COMMIT_FILE}", text.encode(), version)

    # What each of several processes does.

    @property
    def tag(self) -> str:
        """Return the suffix of the names of directories that no other save uses."""
        return f".{tag_of(self.marker)}"

    def written(self) -> list[str]:
        """List what the processes have written so far, relative to the folder."""
        own = tag_of(self.marker)
        return [key for key in self.client.list(self.folder) if tag_of(key) == own and key != self.marker]

    def write(self, name: str, data: bytes) -> None:
        """Write one file below the folder."""
        self.client.put(f"{self.folder}/{name}", data)

    def send(self, directory: str, names: Collection[str], meter: Meter = OFF) -> None:
        """Upload local files under the same names."""
        put, folder = self.client.put, self.folder
        in_parallel(lambda name: put(f"{folder}/{name}", Path(directory, name), meter=meter), names, _AT_ONCE)

    def check_active(self) -> None:
        """Raise ConcurrentWriteError, after removing what was sent too late, if process 0 has aborted the save."""
        if self.client.find(f"{self.folder}/{self.marker}") is None:
            self.abort()
            message = f"{self.url}: process 0 has aborted this save, or another one replaced it, so nothing was saved"
            raise ConcurrentWriteError(message, path=self.url)

    def _delete_marker(self) -> None:
        """Delete the marker, if that is permitted: without it the save is as complete as with it."""
        with harmless(self.url, "what told how far a save was"):
            self.client.delete(f"{self.folder}/{self.marker}")

    def abort(self) -> None:
        """Remove what a save that has not been published has written; ignore refusals."""
        with suppress(StorageError):
            delete(self.folder, [*self.written(), self.marker])
            delete(self.folder, self.written())  # of a process that found the marker just before

    # The commit.

    def publish(self, staged: str, *, new: bool = False, meter: Meter = OFF) -> None:
        """Commit a local file or directory, with what all processes have written; see `Location.publish`."""
        if self.folder != self.url:
            self._publish_file(staged, new)
            return
        uploaded = self.written() if self.marker else []
        names = [name for name in Location(staged).files_below() if name not in {COMMIT_FILE, *uploaded}]
        data = [name for name in names if not is_fixed(name)]
        parts, fixed = [*data, *uploaded], sorted(filter(is_fixed, names))
        if not self.marker:
            self.begin(new=new, data=data)
        try:
            # Looked for once the marker is there: one of two new saves sees the other.
            version = version_at(self.url, new=new)
            self.send(staged, data, meter)
            there = self._commit(staged, fixed, parts, new, meter)
        except BaseException:
            begun, self.marker = self.marker, new_marker(time_of(self.marker) - 1)
            with suppress(StorageError):  # of another name, which removers have not listed; the first may be gone
                self.write(self.marker, "\n".join(data).encode())
            if not self._has_begun:  # else others may count on what is there
                with suppress(StorageError):
                    delete(self.folder, [*parts, begun, self.marker])
            raise
        with after_commit(self.url):
            if version:
                self.client.delete(self.url, version)
            ours = {*names, *uploaded, COMMIT_FILE, self.marker}
            delete(self.url, [name for name in there if name not in ours], versions_of(there))
        self._delete_marker()
        if not new:
            remove_arrays_beside(self.url)

    def _commit(self, staged: str, fixed: list[str], parts: list[str], new: bool, meter: Meter) -> Files:
        """Replace the files that other saves have, too, and commit them with the parts; return all that is there."""
        for _ in range(_ROUNDS):
            there = self._look(parts)
            # What is committed once this save has begun to replace files is mixed with it.
            if not (new and COMMIT_FILE in there) or self._has_begun:
                with suppress(ConflictError):  # others change them meanwhile
                    return self._replace(there, staged, fixed, parts, meter)
            elif _confirm_commit(self.url, there, self.marker):
                break
            time.sleep(_PAUSE)
        raise lost(self.url)

    def _replace(self, there: Files, staged: str, fixed: list[str], parts: list[str], meter: Meter) -> Files:
        self._expected = versions_of(there)

        def put(name: str) -> None:
            path, version = Path(staged, name), self._expected.get(name, ABSENT)
            self._expected[name] = self.client.put(f"{self.url}/{name}", path, version, meter)

        indexes = [name for name in fixed if posixpath.basename(name) == MANIFEST]
        sums = [name for name in fixed if name == layout.CHECKSUMS]
        rest = [name for name in fixed if name not in (*indexes, *sums)]
        has_same_names = len(indexes) == 1 and self._expected.keys() == {*fixed, COMMIT_FILE}
        switches = has_same_names and self._is_same_tree(staged, {*rest} - {layout.STEP_METADATA})
        self._has_begun = True
        if switches:  # other writers find another commit file, and so no more what they listed
            self._put_commit_file(self._expected[COMMIT_FILE])
        gone = layout.CHECKSUMS if switches else COMMIT_FILE
        if gone in self._expected and not self.client.delete(f"{self.url}/{gone}", self._expected.pop(gone)):
            raise ConflictError(self.url)
        # The first file decides who writes. Beside its sums, a file of other bytes would count as damaged.
        for group in [indexes, rest, sums] if switches else [rest[:1], [*rest[1:], *sums], indexes]:
            in_parallel(put, group, _AT_ONCE)
        if not switches:
            there = self._check(parts)
            self._put_commit_file(ABSENT)
        try:
            return self._check(parts)
        except (ConflictError, ConcurrentWriteError):  # another writer has begun to replace files just before
            version = self._expected[COMMIT_FILE]
            if self.client.delete(f"{self.url}/{COMMIT_FILE}", version):
                raise
            left = self.client.list(self.url)
            is_same = versions_of(left) | {COMMIT_FILE: version} == self._expected and set(parts) <= left.keys()
            if COMMIT_FILE not in left or not is_same:  # else see `_confirm_commit`
                raise
        return there

    def _look(self, parts: Collection[str] = ()) -> Files:
        """List the folder; raise ConcurrentWriteError if a later writer has begun, or removed parts of this save."""
        there = self.client.list(self.folder)
        if last_marker(there) != self.marker or not set(parts) <= there.keys():
            raise lost(self.url)
        return there

    def _check(self, parts: Collection[str]) -> Files:
        """List the folder; raise ConflictError if another writer has changed what this one expects."""
        there = self._look(parts)
        if versions_of(there) != self._expected:
            raise ConflictError(self.url)
        return there

    def _is_same_tree(self, staged: str, names: Collection[str]) -> bool:
        """Return whether nothing but blanks tells files from the old ones; indexes, checksums and times do always."""
        with suppress(FileNotFoundError):  # another writer removes them
            old = in_parallel(lambda name: (name, self.client.read(f"{self.url}/{name}").rstrip()), names, _AT_ONCE)
            return dict(old) == {name: Path(staged, name).read_bytes().rstrip() for name in names}
        return False

    def _publish_file(self, staged: str, new: bool) -> None:
        """Commit the msgpack file that refers to the arrays in the folder."""
        try:
            there = self._look()
            publish_object(staged, self.url, new=new)
        except ConcurrentWriteError:
            self.abort()
            raise
        old = [key for key in there if tag_of(key) != tag_of(self.marker)]
        with after_commit(self.url):
            delete(self.folder, [*arrays_among(old), *filter(is_upload_marker, old)])
        self._delete_marker()
