"""Publish and remove checkpoints in stores, which have no rename.

A msgpack checkpoint is one object, which appears whole or not at all. A folder is written in this order:

1. a marker ``_begun…`` with the names of the data. It is also the claim of its writer: of several the highest counts,
   all others give up;
2. data, under names that no other save uses, beside what is there;
3. a list, which tells whether another writer has begun or ended meanwhile;
4. the commit file of what is replaced goes. From here on the folder has a marker and no commit file: it is unfinished;
5. all other files, each on the condition that it is as it was found;
6. another list, and ``commit_success.txt``, which Orbax too writes last in stores;
7. what was replaced goes, and the marker.

An overwrite of the same tree changes nothing but the index, times and checksums. There the folder stays complete: in
step 4 the commit file is replaced, the old checksums go, and the index, which is written first, switches from the old
arrays to the new.

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
from flax_ckpt_compat._core.object_store.az import AzClient
from flax_ckpt_compat._core.object_store.client import ABSENT, EXPIRES_AFTER, Client, ConflictError, split
from flax_ckpt_compat._core.object_store.epath import EpathClient, is_known
from flax_ckpt_compat._core.object_store.gs import GsClient
from flax_ckpt_compat._core.object_store.hub import HubClient
from flax_ckpt_compat._core.object_store.s3 import S3Client
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, MANIFEST, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.storage import Stat
from flax_ckpt_compat._core.thread_pools import in_parallel

_log = logging.getLogger("flax_ckpt_compat")
AT_ONCE = 16
_LOOKS, _PAUSE = 3, 0.5  # of a writer to which others give way, and seconds after each
# Names that no other save uses.
_OF_ONE_SAVE = re.compile(
    rf"(?:.*/)?{layout.DATA_DIRECTORY}/{layout.DATA_FILE_PATTERN}|{re.escape(layout.PROCESS_PREFIX)}[^/]*\..*",
    re.DOTALL,
)
_COMMITTED = "All objects of this checkpoint were written before this one.\n{}\n"
Files = Mapping[str, Stat]


CLIENTS: dict[str, Client] = {"s3": S3Client(), "gs": GsClient(), "az": AzClient(), "hf": HubClient()}
_EPATH = EpathClient()


def client_for(url: str) -> Client:
    """Return the client of a URL's scheme."""
    scheme = split(url)[0]
    if scheme not in CLIENTS and not is_known(scheme):
        known = "s3://, gs://, az:// and hf:// URLs, those of path classes registered with epath, and local paths"
        raise StorageError(f"{url}: the scheme {scheme + '://'!r} is unknown; {known} can be used", path=url)
    return CLIENTS.get(scheme, _EPATH)


def is_unfinished(names: Iterable[str]) -> bool:
    """Return whether a folder with these names has a marker of ours and no commit file."""
    there = set(names)
    return COMMIT_FILE not in there and any(map(is_upload_marker, there))


def new_marker(found: Iterable[str] = ()) -> str:
    """Return the name of a marker that comes after all others which were found."""
    last = max((order_of(name)[0] for name in found), default=0)
    return f"{layout.BEGUN}.{max(int(time.time()), last + 1)}.{uuid.uuid4().hex}"


def order_of(marker: str) -> tuple[int, str]:
    """Return the sort key of a marker, of which the first part is its time; other names come first."""
    _, began, tag = marker.split(".") if is_upload_marker(marker) else ("", "0", "")
    return int(began), tag


def is_expired(marker: str) -> bool:
    """Return whether the writer of a marker counts as dead."""
    return time.time() - order_of(marker)[0] > EXPIRES_AFTER


def publish(staged: str, url: str, *, new: bool = False, meter: Meter = OFF) -> None:
    """Upload a local checkpoint, and replace what has its name; with ``new``, nothing is replaced.

    Raise ConcurrentWriteError if another process writes, or has just written, the same checkpoint."""
    if presence.isdir(staged):
        FolderSave(url).publish(staged, new=new, meter=meter)
    else:
        publish_object(staged, url, new=new, meter=meter)
    if not new:
        remove_arrays_beside(url)


def publish_object(staged: str, url: str, *, new: bool, meter: Meter = OFF) -> None:
    """Upload a msgpack file, and remove a folder of its name; see `publish`."""
    client = client_for(url)
    there = client.find(url) if new else None
    if there is not None and there.size:  # an empty object is no checkpoint
        raise _taken(url)
    try:
        version = client.put_file(url, staged, (ABSENT if there is None else there.version) if new else None, meter)
    except ConflictError as error:
        raise _taken(url) from error
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
                client.put_file(url, staged, ABSENT)


class FolderSave:
    """One writer of a folder, from its marker to the commit; several processes may write its data.

    Attributes:
        has_begun: files that others may write, too, may be there, or files of another save are gone.
    """

    def __init__(self, url: str, marker: str = ""):
        """Take a folder, and the marker of a save that has begun already."""
        self.url, self.client, self.marker = url, client_for(url), marker
        self._found: dict[str, Stat] = {}  # what was there at the beginning, but for what this writer has deleted
        self._written: dict[str, str] = {}  # name of a file that others may write, too → version of ours
        self.has_begun = False

    def begin(self, *, new: bool = False, data: Collection[str] = ()) -> None:
        """Write the marker, with the names of the data; with ``new``, only where no checkpoint is."""
        found = self.client.list(self.url)
        is_there, needs_it = COMMIT_FILE in found, self.client.needs_commit_file
        is_copy = bool(found) and not (is_there or needs_it or is_unfinished(found))  # of a local checkpoint
        if new and (is_there or is_copy):
            raise _taken(self.url)
        if is_copy and not self.url.endswith(ARRAYS_POSTFIX):  # it would be unfinished beside a marker
            with suppress(ConflictError):
                self._put_text(COMMIT_FILE, self.marker, ABSENT)
            found = self.client.list(self.url)
        self._found = found
        if not self.marker:
            if not self.client.shares_names:
                self.client.delete(self.url)
            self.marker = new_marker(found)
            self._put_text(self.marker, "\n".join(data))

    def _put_text(self, name: str, text: str = "", version: str | None = None) -> str:
        data = _COMMITTED.format(text or uuid.uuid4().hex) if name == COMMIT_FILE else text
        return self.client.put(f"{self.url}/{name}", data.encode(), version)

    def publish(self, staged: str, *, new: bool = False, uploaded: Collection[str] = (), meter: Meter = OFF) -> None:
        """Upload a local directory, beside what was ``uploaded`` already, and commit all of it."""
        names = [name for name in presence.files_below(staged) if name not in {COMMIT_FILE, *uploaded}]
        data = [name for name in names if not is_fixed(name)]
        indexes = [name for name in names if _is_index(name) and name not in data]
        fixed = sorted(set(names).difference(data, indexes))
        is_object = self.client.find(self.url)
        self.begin(new=new, data=data)

        def put(name: str) -> None:
            found = self._found.get(name)
            version = None if name in data else ABSENT if found is None else found.version
            version = self.client.put_file(f"{self.url}/{name}", os.path.join(staged, name), version, meter)
            if name not in data:
                self._written[name] = version

        def replace() -> Files:
            switches = not uploaded and len(indexes) == 1 and self._is_same_tree(staged, fixed, indexes)
            self.has_begun = True
            if switches:  # other writers find another commit file, and so no more what they found
                before = self._found[COMMIT_FILE].version
                self._written[COMMIT_FILE] = self._put_text(COMMIT_FILE, self.marker, before)
            self._uncommit(layout.CHECKSUMS if switches else COMMIT_FILE)
            # The first file decides who writes.
            groups = [indexes, fixed] if switches else [fixed[:1], fixed[1:], indexes]
            for group in filter(None, groups):
                in_parallel(put, group, AT_ONCE)
            there = self._check([*data, *uploaded])
            return there if COMMIT_FILE in there else self._commit([*data, *uploaded])

        try:
            in_parallel(put, data, AT_ONCE)
            try:
                self._check()
                there = replace()
            except (ConflictError, ConcurrentWriteError):
                self._wait_for_others()
                there = replace()
        except BaseException as error:
            with suppress(StorageError):
                self._give_up(data)
            if isinstance(error, (ConflictError, ConcurrentWriteError)):
                raise _lost(self.url) from error
            raise
        self._end(is_object, {name: there[name] for name in there.keys() - {*names, *uploaded, COMMIT_FILE}})

    def _wait_for_others(self) -> None:
        """Wait until writers with lower markers have given up, and take what they left as found; else raise."""
        for _ in range(_LOOKS):
            there = self.client.list(self.url)
            markers = list(filter(is_upload_marker, there))
            if self.marker not in markers or max(markers, key=order_of) != self.marker:
                break
            time.sleep(_PAUSE)
            if COMMIT_FILE not in there and len(markers) > 1:
                self._found, self._written = dict(there), {}
                with suppress(ConcurrentWriteError):
                    self._check()
                    return
        raise _lost(self.url)

    def _check(self, needed: Collection[str] = ()) -> Files:
        """List the folder; raise ConcurrentWriteError if another writer has begun or ended since the beginning."""
        there = self.client.list(self.url)
        expected = {name: stat.version for name, stat in self._found.items() if is_fixed(name)} | self._written
        found = {name: stat.version for name, stat in there.items() if is_fixed(name)}
        is_latest = self.marker in there and max(map(order_of, there)) == order_of(self.marker)
        if not is_latest or found != expected or not set(needed) <= there.keys():
            raise _lost(self.url)
        return there

    def _uncommit(self, name: str) -> None:
        """Delete a file that was found, the commit file or the checksums, if it is there."""
        stat = self._found.pop(name, None)
        if stat is not None and not self.client.delete(f"{self.url}/{name}", stat.version):
            raise _lost(self.url)

    def _commit(self, needed: Collection[str]) -> Files:
        """Write the commit file; withdraw it if another writer has begun to replace files just before."""
        version = self._written[COMMIT_FILE] = self._put_text(COMMIT_FILE, self.marker, ABSENT)
        try:
            return self._check(needed)
        except ConcurrentWriteError:
            self.client.delete(f"{self.url}/{COMMIT_FILE}", version)
            raise

    def _is_same_tree(self, staged: str, fixed: list[str], indexes: list[str]) -> bool:
        """Return whether nothing but indexes, checksums and times tell the new checkpoint from the old one."""
        if {name for name in self._found if is_fixed(name)} != {*fixed, *indexes, COMMIT_FILE}:
            return False

        def is_same(name: str) -> bool:
            with open(os.path.join(staged, name), "rb") as file, suppress(FileNotFoundError):
                return _meaning(name, file.read()) == _meaning(name, self.client.read(f"{self.url}/{name}"))
            return False  # another writer removes it

        return all(in_parallel(is_same, [name for name in fixed if name != layout.CHECKSUMS], AT_ONCE))

    def _give_up(self, data: Collection[str]) -> None:
        """Remove what this writer has written; once others may count on it, leave it, which names itself unfinished."""
        if self.has_begun:
            self._put_text(self.marker, "\n".join(data))
        else:
            in_parallel(lambda name: self.client.delete(f"{self.url}/{name}"), [*data, self.marker], AT_ONCE)

    def _end(self, replaced: Stat | None, old: Files) -> None:
        """Remove what a commit has replaced, and the marker."""
        with after_commit(self.url):
            if replaced is not None:
                self.client.delete(self.url, replaced.version)
            _delete(self.url, {name: stat for name, stat in old.items() if name != self.marker})
        try:
            self.client.delete(f"{self.url}/{self.marker}")
        except StorageError as error:
            warn_of_leftovers(self.url, "the marker of a save that is complete", error)


def remove(url: str, found: Files | None = None) -> None:
    """Remove a checkpoint, the object first: it must not reappear when the folder that replaced it is gone.

    ``found`` is a new list of the folder."""
    client = client_for(url)
    client.delete(url)
    inside = client.list(url) if found is None else found
    if inside and (markers := _uncommit(url, inside)):
        _delete_uncommitted(url, inside, markers)


def _uncommit(url: str, found: Files) -> list[str]:
    """Delete the commit file of a folder; return its markers, or none if another writer has replaced it meanwhile."""
    client, markers = client_for(url), list(filter(is_upload_marker, found))
    if not markers:
        markers = [new_marker()]
        client.put(f"{url}/{markers[0]}", b"")
    is_ours = COMMIT_FILE not in found or client.delete(f"{url}/{COMMIT_FILE}", found[COMMIT_FILE].version)
    return markers if is_ours else []


def _delete_uncommitted(url: str, found: Files, markers: Collection[str]) -> None:
    _delete(url, {name: stat for name, stat in found.items() if name not in {COMMIT_FILE, *markers}})
    for marker in markers:
        client_for(url).delete(f"{url}/{marker}")


def _delete(url: str, found: Files) -> None:
    """Delete files, of names that other saves use the versions that were found."""
    client = client_for(url)
    in_parallel(
        lambda name: client.delete(f"{url}/{name}", found[name].version if is_fixed(name) else None),
        list(found),
        AT_ONCE,
    )


def remove_arrays_beside(url: str) -> None:
    """Remove the GDA folder of a replaced msgpack checkpoint, unless a save by several processes writes to it."""
    folder = url + ARRAYS_POSTFIX
    with after_commit(url):
        there = client_for(url).list(folder)
        arrays, markers = arrays_among(there), list(filter(is_upload_marker, there))
        if arrays and all(map(is_expired, markers)):
            _delete(folder, {name: there[name] for name in [*arrays, *markers, COMMIT_FILE] if name in there})


def arrays_among(keys: Collection[str]) -> list[str]:
    """Return the keys that are parts of zarr arrays."""
    folders = {posixpath.dirname(key) for key in keys if posixpath.basename(key) == layout.ZARR2_METADATA}
    is_part = re.compile(rf"{re.escape(layout.ZARR2_METADATA)}|{layout.ZARR2_CHUNK.pattern}").fullmatch
    return [key for key in keys if posixpath.dirname(key) in folders and is_part(posixpath.basename(key))]


# What dead writers left.


def leftovers(url: str, files: Files) -> dict[str, dict[str, Stat]]:
    """Return the folders among the files of one in which only dead writers write → the files of each that go."""
    folders: dict[str, dict[str, Stat]] = {}
    for key, stat in files.items():
        name, _, rest = key.partition("/")
        folders.setdefault(name, {})[rest] = stat
    found = {}
    for name, there in folders.items():
        markers, main = list(filter(is_upload_marker, there)), name.removesuffix(ARRAYS_POSTFIX)
        # Only the msgpack file knows which arrays beside it are in use; the rest is removed with it.
        if markers and all(map(is_expired, markers)) and (main == name or main not in folders):
            is_whole = main != name or is_unfinished(there)
            found[name] = there if is_whole else _without_commit(f"{url}/{name}", there, markers)
            there.pop("", None)  # an object of that name
    return found


def _without_commit(url: str, there: Files, markers: Collection[str]) -> dict[str, Stat]:
    """Return the markers of a complete folder, and what their saves wrote, unless it is in use."""
    client, found = client_for(url), dict[str, Stat]()
    with suppress(FileNotFoundError, StorageError):  # what another removes meanwhile, or nobody may read, stays
        text = client.read(f"{url}/{COMMIT_FILE}").decode("utf-8", "replace")
        for marker in markers:
            listed = client.read(f"{url}/{marker}").decode("utf-8", "replace").split("\n")
            is_in_use, own = tag_of(marker) in text, {key for key in listed if not is_fixed(key)}
            found[marker] = there[marker]
            found |= {
                key: stat
                for key, stat in there.items()
                if not is_in_use and (key in own or tag_of(key) == tag_of(marker))
            }
    return found


def tag_of(key: str) -> str:
    """Return the number of the save that alone has a marker, or files in a folder, of this name."""
    return key.partition("/")[0].rpartition(".")[2]


def remove_leftovers(url: str, found: Files) -> None:
    """Remove what dead writers left in a folder, the commit file of arrays first and the markers last."""
    if COMMIT_FILE in found:
        client_for(url).delete(f"{url}/{COMMIT_FILE}")
    _delete_uncommitted(url, found, list(filter(is_upload_marker, found)))


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


def is_fixed(name: str) -> bool:
    """Return whether other saves have a file of this name."""
    return not is_upload_marker(name) and _OF_ONE_SAVE.fullmatch(name) is None


def _is_index(name: str) -> bool:
    return posixpath.basename(name) == MANIFEST


def _meaning(name: str, text: bytes) -> object:
    """Return a small file without the blanks at its end, which tell saves apart, and metadata without their times."""
    if name == layout.STEP_METADATA:
        with suppress(ValueError, AttributeError):
            return {key: value for key, value in json.loads(text).items() if not key.endswith("timestamp_nsecs")}
    return text.rstrip()


def _taken(url: str) -> ConcurrentWriteError:
    message = f"{url}: another process wrote this checkpoint at the same time, and it stays"
    return ConcurrentWriteError(f"{message}; pass overwrite=True to replace it", path=url)


def _lost(url: str) -> ConcurrentWriteError:
    message = f"{url}: another process writes, wrote or removes this checkpoint at the same time, so this one was not"
    return ConcurrentWriteError(f"{message} committed; save each step from one place only", path=url)
