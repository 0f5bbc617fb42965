"""Publish and remove checkpoints in stores, which have no rename.

A msgpack checkpoint is one object, which appears whole or not at all. A folder is written in this order:

1. a marker ``_begun…``, which is also the claim of its writer: of several the highest counts, all others give up;
2. data, under names that no other save uses, beside what is there;
3. a list, which tells whether another writer has begun or ended meanwhile;
4. the commit file of what is replaced goes. From here on the folder has a marker and no commit file: it is unfinished;
5. all other files, each on the condition that it is as it was found, the index of the arrays last;
6. another list, and ``commit_success.txt``, which Orbax too writes last in stores;
7. what was replaced goes, and the marker.

An overwrite of the same tree changes nothing but the index, times and checksums. There the folder stays complete: in
step 4 the commit file is replaced, then the old checksums go, and the index switches from the old arrays to the new.

Removal deletes the commit file first, too. An object and a folder may share a name for a moment: the folder counts once
it has a commit file.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.errors import CleanupError, ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.local.presence import files_below
from flax_ckpt_compat._core.object_store.az import AzClient
from flax_ckpt_compat._core.object_store.client import ABSENT, Client, split
from flax_ckpt_compat._core.object_store.gs import GsClient
from flax_ckpt_compat._core.object_store.remote_storage import is_unfinished
from flax_ckpt_compat._core.object_store.request_errors import ConflictError
from flax_ckpt_compat._core.object_store.s3 import S3Client
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, MANIFEST, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.storage import Stat
from flax_ckpt_compat._core.thread_pools import in_parallel

_log = logging.getLogger("flax_ckpt_compat")
EXPIRES_AFTER = 24 * 3600  # s; then a writer without a commit counts as dead
AT_ONCE = 16
_MARKER = re.compile(rf"{layout.BEGUN}\.(\d+)\.([0-9a-f]{{32}})")
# Names that no other save uses.
_OF_ONE_SAVE = re.compile(
    rf"(?:.*/)?{layout.DATA_DIRECTORY}/{layout.DATA_FILE_PATTERN}|{re.escape(layout.PROCESS_PREFIX)}[^/]*\..*",
    re.DOTALL,
)
_COMMITTED = "All objects of this checkpoint were written before this one.\n{}\n"
Files = Mapping[str, Stat]


CLIENTS: dict[str, Client] = {"s3": S3Client(), "gs": GsClient(), "az": AzClient()}


def client_for(url: str) -> Client:
    """Return the client of a URL's scheme."""
    return CLIENTS[split(url)[0]]


def is_complete(names: Collection[str], client: Client) -> bool:
    """Return whether a folder with these names counts as a checkpoint."""
    if COMMIT_FILE in names:
        return True
    # Copies of local checkpoints have no commit file.
    return bool(names) and not client.needs_commit_file and not is_unfinished(names)


def order_of(marker: str) -> tuple[int, str]:
    """Return the sort key of a marker; other names come first."""
    match = _MARKER.fullmatch(marker)
    return (int(match[1]), match[2]) if match else (0, "")


def is_expired(marker: str) -> bool:
    """Return whether the writer of a marker counts as dead."""
    return time.time() - order_of(marker)[0] > EXPIRES_AFTER


def tag_of(marker: str) -> str:
    """Return the suffix of names that belong to the marker's save only."""
    return "." + marker.rpartition(".")[2]


def publish(staged: str, url: str, *, new: bool = False, meter: Meter = OFF) -> None:
    """Upload a local checkpoint, and replace what has its name; with ``new``, nothing is replaced.

    Raise ConcurrentWriteError if another process writes, or has just written, the same checkpoint."""
    if presence.isdir(staged):
        FolderSave(url).publish(staged, new=new, meter=meter)
    else:
        publish_object(staged, url, new=new, meter=meter)
    if not new:
        with after_commit(url):
            remove_arrays_beside(url)


def publish_object(staged: str, url: str, *, new: bool, meter: Meter = OFF) -> None:
    """Upload a msgpack file, and remove a folder of its name; see `publish`."""
    client = client_for(url)
    try:
        version = client.put_file(url, staged, ABSENT if new else None, meter)
    except ConflictError as error:
        there = client.find(url)
        if there is None or there.size:
            raise _taken(url) from error
        version = client.put_file(url, staged, there.version, meter)  # an empty object is no checkpoint
    hidden = client.list(url)
    if new and COMMIT_FILE in hidden:
        client.delete(url, version)
        raise _taken(url)
    if hidden and (markers := _uncommit(url, hidden)):  # until then the folder counts
        with after_commit(url):
            _delete_uncommitted(url, hidden, markers)
        # Its writer may have removed this object as the one that it replaced.
        if client.find(url) is None:
            with suppress(ConflictError):
                client.put_file(url, staged, ABSENT, meter)


class FolderSave:
    """One writer of a folder, from its marker to the commit; several processes may write its data."""

    def __init__(self, url: str, marker: str = ""):
        """Take a folder, and the marker of a save that has begun already."""
        self.url, self.client, self.marker = url, client_for(url), marker
        self.found: Files = {}  # what was there at the beginning
        self._written: dict[str, str] = {}  # name of a file that others may write, too → version of ours
        self._has_begun = False  # whether files that others may write, too, may be there
        self._replaces = False  # whether files of another save are replaced, or its commit file is gone

    def begin(self, data: Iterable[str] = (), *, new: bool = False) -> None:
        """Write the marker, which lists the data that is to come; with ``new``, only where no checkpoint is."""
        self.found = self.client.list(self.url)
        is_there = is_complete(self.found, self.client) and not self.url.endswith(ARRAYS_POSTFIX)
        if new and is_there:
            raise _taken(self.url)
        if is_there and COMMIT_FILE not in self.found:
            # It is a copy of a local checkpoint, which would be unfinished beside a marker.
            with suppress(ConflictError):
                self.client.put(f"{self.url}/{COMMIT_FILE}", self._content(), ABSENT)
            self.found = self.client.list(self.url)
        if not self.marker:
            last = max((order_of(name)[0] for name in self.found), default=0)
            self.marker = f"{layout.BEGUN}.{max(int(time.time()), last + 1)}.{uuid.uuid4().hex}"
            self._mark(data)

    def _mark(self, data: Iterable[str]) -> None:
        self.client.put(f"{self.url}/{self.marker}", "\n".join(data).encode())

    def publish(self, staged: str, *, new: bool = False, uploaded: Collection[str] = (), meter: Meter = OFF) -> None:
        """Upload a local directory, beside what was ``uploaded`` already, and commit all of it."""
        names = [name for name in files_below(staged) if name not in {COMMIT_FILE, *uploaded}]
        data = [name for name in names if _OF_ONE_SAVE.fullmatch(name)]
        fixed = sorted(set(names).difference(data), key=_is_index)
        is_object = self.client.find(self.url)
        self.begin(data, new=new)

        def put(name: str) -> None:
            path, url = os.path.join(staged, name), f"{self.url}/{name}"
            version = self.client.put_file(url, path, None if name in data else self._version(name), meter)
            if name not in data:
                self._written[name] = version

        try:
            in_parallel(put, data, AT_ONCE)
            if not uploaded and self._is_same_tree(staged, fixed):
                groups = self._begin_switch(self._check(), fixed)
            else:
                groups = self._uncommit(self._check(), fixed)
            for group in groups:
                self._replaces |= not self.found.keys().isdisjoint(group)
                self._has_begun = True
                in_parallel(put, group, AT_ONCE)
            there = self._check([*data, *uploaded])
            if COMMIT_FILE not in self._written:
                there = self._commit([*data, *uploaded])
        except (ConflictError, ConcurrentWriteError) as error:
            self._give_up(data)
            raise _lost(self.url) from error
        except BaseException:
            with suppress(StorageError):
                if self._has_begun:  # what may be there must name itself unfinished
                    self._mark(data)
                else:
                    self._give_up(data)
            raise
        self._end(is_object, set(there).difference(names, uploaded, [COMMIT_FILE]))

    def _version(self, name: str) -> str:
        return self.found[name].version if name in self.found else ABSENT

    def _content(self) -> bytes:
        return _COMMITTED.format(self.marker or uuid.uuid4().hex).encode()

    def _check(self, needed: Collection[str] = ()) -> Files:
        """List the folder; raise ConcurrentWriteError if another writer has begun or ended since the beginning."""
        there = self.client.list(self.url)
        expected = {name: stat.version for name, stat in self.found.items() if _is_fixed(name)} | self._written
        if self._replaces and COMMIT_FILE not in self._written:
            expected.pop(COMMIT_FILE, None)
        found = {name: stat.version for name, stat in there.items() if _is_fixed(name)}
        is_latest = self.marker in there and max(map(order_of, there)) == order_of(self.marker)
        if not is_latest or found != expected or not set(needed) <= there.keys():
            raise _lost(self.url)
        return there

    def _uncommit(self, there: Files, fixed: list[str]) -> list[list[str]]:
        """Delete the commit file; return all files that others may write, in the order in which to write them."""
        if COMMIT_FILE in there:
            self._replaces = True
            if not self.client.delete(f"{self.url}/{COMMIT_FILE}", there[COMMIT_FILE].version):
                raise _lost(self.url)
        # The first file decides who writes; those of each group are written at once.
        first, rest = fixed[:1], fixed[1:]
        groups = [first, [name for name in rest if not _is_index(name)], [name for name in rest if _is_index(name)]]
        return list(filter(None, groups))

    def _commit(self, needed: Collection[str]) -> Files:
        """Write the commit file; withdraw it if another writer has begun to replace files just before."""
        url, content = f"{self.url}/{COMMIT_FILE}", self._content()
        try:
            version = self.client.put(url, content, ABSENT)
        except ConflictError:
            raise
        except StorageError:  # whose answer may have been lost
            found = self.client.find(url)
            if found is None or self.client.read(url) != content:
                raise
            version = found.version
        self._written[COMMIT_FILE] = version
        try:
            return self._check(needed)
        except ConcurrentWriteError:
            self.client.delete(url, version)
            raise

    def _is_same_tree(self, staged: str, fixed: list[str]) -> bool:
        """Return whether nothing but one index, with checksums and times, tells the new checkpoint from the old one."""
        there = {name for name in self.found if _is_fixed(name)} - {COMMIT_FILE}
        compared = [name for name in there if not _is_index(name) and name != layout.CHECKSUMS]
        n_indexes = len([name for name in there if _is_index(name)])
        if COMMIT_FILE not in self.found or there != set(fixed) or n_indexes != 1:
            return False

        def is_same(name: str) -> bool:
            with open(os.path.join(staged, name), "rb") as file:
                new = file.read()
            try:
                old = self.client.read(f"{self.url}/{name}")
            except FileNotFoundError:  # another writer removes it
                return False
            # Blanks at the end tell saves apart.
            is_same = old.rstrip() == new.rstrip()
            return is_same or (name == layout.STEP_METADATA and _without_times(old) == _without_times(new))

        return all(in_parallel(is_same, compared, AT_ONCE))

    def _begin_switch(self, there: Files, fixed: list[str]) -> list[list[str]]:
        """Replace the commit file, which decides who writes; return the files to write, in their order."""
        self._replaces = True
        version = self.client.put(f"{self.url}/{COMMIT_FILE}", self._content(), there[COMMIT_FILE].version)
        self._written[COMMIT_FILE] = version
        if layout.CHECKSUMS in there:  # of the old arrays and index
            if not self.client.delete(f"{self.url}/{layout.CHECKSUMS}", there[layout.CHECKSUMS].version):
                raise _lost(self.url)
            self.found = {name: stat for name, stat in self.found.items() if name != layout.CHECKSUMS}
        index = [name for name in fixed if _is_index(name)]
        rest = [name for name in fixed if name != layout.CHECKSUMS and name not in index]
        return [index, rest, *([name] for name in fixed if name == layout.CHECKSUMS)]

    def _give_up(self, data: Iterable[str]) -> None:
        """Remove what this writer has written; what may be in use stays, and the marker where files were replaced."""
        if any(map(_is_index, self._written)):
            self._mark(data)
            return
        in_parallel(lambda name: self.client.delete(f"{self.url}/{name}"), list(data), AT_ONCE)
        if not self._replaces:
            for name, version in self._written.items():
                self.client.delete(f"{self.url}/{name}", version)
            self.client.delete(f"{self.url}/{self.marker}")

    def _end(self, replaced: Stat | None, old: Collection[str]) -> None:
        """Remove what a commit has replaced, and the marker."""
        with after_commit(self.url):
            if replaced is not None:
                self.client.delete(self.url, replaced.version)
            _delete(self.url, {name: self.found.get(name) for name in old if name != self.marker})
        try:
            self.client.delete(f"{self.url}/{self.marker}")
        except StorageError as error:
            warn_of_leftovers(self.url, "the marker of a save that is complete", error)


def remove(url: str, found: Files | None = None) -> None:
    """Remove a checkpoint, the object first: it must not reappear when the folder that replaced it is gone.

    ``found`` is a new list of the folder."""
    client = client_for(url)
    client.delete(url)
    if inside := client.list(url) if found is None else found:
        remove_folder(url, inside)


def remove_folder(url: str, found: Files) -> None:
    """Remove all files of a folder that were found there, the commit file first and the markers last."""
    if markers := _uncommit(url, found):
        _delete_uncommitted(url, found, markers)


def _uncommit(url: str, found: Files) -> list[str]:
    """Delete the commit file of a folder; return its markers, or none if another writer has replaced it meanwhile."""
    client, markers = client_for(url), list(filter(is_upload_marker, found))
    if not markers:
        markers = [f"{layout.BEGUN}.{int(time.time())}.{uuid.uuid4().hex}"]
        client.put(f"{url}/{markers[0]}", b"")
    is_ours = COMMIT_FILE not in found or client.delete(f"{url}/{COMMIT_FILE}", found[COMMIT_FILE].version)
    return markers if is_ours else []


def _delete_uncommitted(url: str, found: Files, markers: Collection[str]) -> None:
    _delete(url, {name: stat for name, stat in found.items() if name not in markers and name != COMMIT_FILE})
    for marker in markers:
        client_for(url).delete(f"{url}/{marker}")


def _delete(url: str, found: Mapping[str, Stat | None]) -> None:
    """Delete files, of names that other saves use the versions that were found."""
    client = client_for(url)

    def delete(name: str) -> None:
        stat = found[name]
        client.delete(f"{url}/{name}", stat.version if stat is not None and _is_fixed(name) else None)

    in_parallel(delete, list(found), AT_ONCE)


def remove_arrays_beside(url: str) -> None:
    """Remove the GDA folder of a replaced msgpack checkpoint, unless a save by several processes writes to it."""
    folder = url + ARRAYS_POSTFIX
    there = client_for(url).list(folder)
    arrays = arrays_among(there)
    if arrays and not any(is_upload_marker(name) and not is_expired(name) for name in there):
        rest = [name for name in there if is_upload_marker(name) or name == COMMIT_FILE]
        _delete(folder, {name: there[name] for name in [*arrays, *rest]})


def arrays_among(keys: Collection[str]) -> list[str]:
    """Return the keys that are parts of zarr arrays."""
    folders = {posixpath.dirname(key) for key in keys if posixpath.basename(key) == layout.ZARR2_METADATA}
    parts = ((key, *posixpath.split(key)) for key in keys)
    return [
        key
        for key, folder, name in parts
        if folder in folders and (name == layout.ZARR2_METADATA or layout.ZARR2_CHUNK.fullmatch(name))
    ]


# What dead writers left.


def by_folder(files: Files) -> dict[str, dict[str, Stat]]:
    """Return the names in a folder → the files below each, relative to it; an object of the name is ""."""
    folders: dict[str, dict[str, Stat]] = {}
    for key, stat in files.items():
        name, _, rest = key.partition("/")
        folders.setdefault(name, {})[rest] = stat
    return folders


def leftovers(files: Files) -> dict[str, bool]:
    """Return the folders of these files in which only dead writers write → whether all of it goes."""
    found, names_in = {}, by_folder(files)
    for name, inside in names_in.items():
        markers = list(filter(is_upload_marker, inside))
        main = name.removesuffix(ARRAYS_POSTFIX)
        # Only the msgpack file knows which arrays beside it are in use; the rest is removed with it.
        if markers and all(map(is_expired, markers)) and (main == name or main not in names_in):
            found[name] = main != name or is_unfinished(inside)
    return found


def remove_leftovers(url: str, found: Files) -> None:
    """Remove what dead writers left in a folder with these files; a complete checkpoint stays."""
    if is_unfinished(found) or url.endswith(ARRAYS_POSTFIX):
        remove_folder(url, found)
        return
    client = client_for(url)
    committed = client.read(f"{url}/{COMMIT_FILE}")
    for marker in filter(is_upload_marker, found):
        data = set(client.read(f"{url}/{marker}").decode("utf-8", "replace").split("\n"))
        data |= {name for name in found if tag_of(marker) + "/" in name[: name.find("/") + 1]}
        if marker.encode() not in committed:
            _delete(url, {name: found[name] for name in data.intersection(found) if _OF_ONE_SAVE.fullmatch(name)})
        client.delete(f"{url}/{marker}")


def stale_uploads(url: str) -> list[str]:
    """Return the names in a folder to which dead writers sent parts that are no object yet."""
    began = client_for(url).unfinished(url)
    return [name for name, seconds in began.items() if time.time() - seconds > EXPIRES_AFTER]


_warned: set[str] = set()  # folders of checkpoints of which `warn_of_leftovers` has warned


def warn_of_leftovers(url: str, what: str, error: StorageError) -> None:
    """Log that objects which do no harm could not be removed: as a warning once for a folder of checkpoints."""
    folder = posixpath.dirname(url)
    level = logging.INFO if folder in _warned else logging.WARNING
    _warned.add(folder)
    message = "Cannot remove %s at %s: %s. It does no harm; what else cannot be removed in %s is logged as info"
    _log.log(level, message, what, url, error, folder)


@contextmanager
def after_commit(url: str) -> Iterator[None]:
    """Convert StorageErrors within the context to CleanupErrors, which say that the checkpoint was saved."""
    try:
        yield
    except (ConcurrentWriteError, CleanupError):
        raise
    except StorageError as error:
        message = f"{url} was saved, but what it replaced could not be removed: {error}"
        raise CleanupError(f"{message}. The next save of this step removes it", path=url) from error


def _is_fixed(name: str) -> bool:
    """Return whether other saves have a file of this name."""
    return not is_upload_marker(name) and _OF_ONE_SAVE.fullmatch(name) is None


def _is_index(name: str) -> bool:
    return posixpath.basename(name) == MANIFEST


def _taken(url: str) -> ConcurrentWriteError:
    message = f"{url}: another process wrote this checkpoint at the same time, and it stays"
    return ConcurrentWriteError(f"{message}; pass overwrite=True to replace it", path=url)


def _lost(url: str) -> ConcurrentWriteError:
    message = f"{url}: another process writes, wrote or removes this checkpoint at the same time, so this one was not"
    return ConcurrentWriteError(f"{message} committed; save each step from one place only", path=url)


def _without_times(text: bytes) -> object:
    """Return the JSON of a checkpoint's metadata without the times of its save; None if it does not decode."""
    with suppress(ValueError, AttributeError):
        return {key: value for key, value in json.loads(text).items() if not key.endswith("timestamp_nsecs")}
    return None
