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
import posixpath
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

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
_ROUNDS, _PAUSE = 8, 0.5  # of a writer to which others give way, and seconds between them
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


def last_marker(names: Iterable[str]) -> str:
    """Return the marker of the save that began last; "" without one."""
    return max(filter(is_upload_marker, names), key=lambda name: (_time_of(name), name), default="")


def _time_of(marker: str) -> int:
    return int(marker.split(".")[1]) if marker else 0


def _new_marker(found: Iterable[str] = ()) -> str:
    """Return the name of a marker that comes after all others which were found."""
    began = max(int(time.time()), _time_of(last_marker(found)) + 1)
    return f"{layout.BEGUN}.{began}.{uuid.uuid4().hex}"


def _is_expired(marker: str) -> bool:
    """Return whether the writer of a marker counts as dead."""
    return time.time() - _time_of(marker) > EXPIRES_AFTER


def publish_object(staged: str, url: str, *, new: bool, meter: Meter = OFF) -> None:
    """Upload a msgpack file, and remove a folder of its name; with ``new``, nothing is replaced.

    Raise ConcurrentWriteError if another process writes, or has just written, the same checkpoint."""
    client = client_for(url)
    there = client.find(url) if new else None
    if there is not None and there.size:  # an empty object is no checkpoint
        raise lost(url)
    try:
        found = (ABSENT if there is None else there.version) if new else None
        version = client.put(url, Path(staged), found, meter)
    except ConflictError as error:
        raise lost(url) from error
    hidden = client.list(url)
    if new and COMMIT_FILE in hidden:
        client.delete(url, version)
        raise lost(url)
    if hidden and (markers := _uncommit(url, hidden)):  # until then the folder counts
        with after_commit(url):
            _delete_uncommitted(url, hidden, markers)
        # Its writer may have committed meanwhile, and removed this object as the one that it replaced.
        if client.find(url) is None:
            with suppress(ConflictError):
                client.put(url, Path(staged), ABSENT)


class FolderSave:
    """One writer of a folder, from its marker to the commit; several processes may write its data.

    Attributes:
        has_begun: files that others may write, too, may be there, or files of another save are gone.
    """

    def __init__(self, url: str, marker: str = ""):
        """Take a folder, and the marker of a save by several processes that has begun already."""
        self.url, self.client, self.marker, self._is_shared = url, client_for(url), marker, bool(marker)
        self._expected: dict[str, str] = {}  # name of a file that others may write, too → version that is there
        self.has_begun = False

    def begin(self, *, new: bool = False, data: Collection[str] = ()) -> None:
        """Write the marker, with the names of the data; with ``new``, only where no checkpoint is."""
        found = self.client.list(self.url)
        is_there, needs_it = COMMIT_FILE in found, self.client.needs_commit_file
        is_copy = bool(found) and not (is_there or needs_it or is_unfinished(found))  # of a local checkpoint
        if new and (is_there or is_copy):
            raise lost(self.url)
        if is_copy and not self.url.endswith(ARRAYS_POSTFIX):  # it would be unfinished beside a marker
            with suppress(ConflictError):
                self._put_commit_file(ABSENT)
            found = self.client.list(self.url)
        self._expected = _fixed(found)
        if not self.marker:
            if not self.client.shares_names:
                self.client.delete(self.url)
            self.marker = _new_marker(found)
            self._put_marker(data)

    def _put_marker(self, data: Collection[str]) -> None:
        self.client.put(f"{self.url}/{self.marker}", "\n".join(data).encode())

    def _put_commit_file(self, version: str) -> None:
        text = _COMMITTED.format(self.marker or uuid.uuid4().hex)
        self._expected[COMMIT_FILE] = self.client.put(f"{self.url}/{COMMIT_FILE}", text.encode(), version)

    def publish(self, staged: str, *, new: bool = False, uploaded: Collection[str] = (), meter: Meter = OFF) -> None:
        """Upload a local directory, beside what was ``uploaded`` already, and commit all of it."""
        names = [name for name in presence.files_below(staged) if name not in {COMMIT_FILE, *uploaded}]
        data = [name for name in names if not is_fixed(name)]
        replaced = self.client.find(self.url)
        self.begin(new=new, data=data)

        def put(name: str) -> None:
            version = None if name in data else self._expected.get(name, ABSENT)
            version = self.client.put(f"{self.url}/{name}", Path(staged, name), version, meter)
            if name not in data:
                self._expected[name] = version

        try:
            in_parallel(put, data, AT_ONCE)
            for left in reversed(range(_ROUNDS)):
                try:
                    there = self._replace(staged, sorted(set(names).difference(data)), [*data, *uploaded], put)
                    break
                except (ConflictError, ConcurrentWriteError):
                    if not left:
                        raise
                    self._look_again()
        except BaseException as error:
            with suppress(StorageError):
                if self.has_begun:  # others may count on what is there; so it names itself unfinished
                    self._put_marker(data)
                else:
                    in_parallel(lambda name: self.client.delete(f"{self.url}/{name}"), [*data, self.marker], AT_ONCE)
            if isinstance(error, (ConflictError, ConcurrentWriteError)):
                raise lost(self.url) from error
            raise
        with after_commit(self.url):
            if replaced is not None:
                self.client.delete(self.url, replaced.version)
            ours = {*names, *uploaded, COMMIT_FILE, self.marker}
            _delete(self.url, {name: stat for name, stat in there.items() if name not in ours})
        with harmless(self.url, "the marker of a save that is complete"):
            self.client.delete(f"{self.url}/{self.marker}")

    def _replace(self, staged: str, fixed: list[str], data: Collection[str], put: Callable[[str], None]) -> Files:
        """Replace the files that other saves have, too, and commit them with the data; return all that is there."""
        self._check()
        indexes = [name for name in fixed if posixpath.basename(name) == MANIFEST]
        rest = [name for name in fixed if name not in indexes]
        switches = not self._is_shared and len(indexes) == 1 and self._is_same_tree(staged, rest, indexes)
        self.has_begun = True
        if switches:  # other writers find another commit file, and so no more what they found
            self._put_commit_file(self._expected[COMMIT_FILE])
        gone = layout.CHECKSUMS if switches else COMMIT_FILE
        if gone in self._expected:
            if not self.client.delete(f"{self.url}/{gone}", self._expected[gone]):
                raise lost(self.url)
            del self._expected[gone]
        # The first file decides who writes.
        for group in [indexes, rest] if switches else [rest[:1], rest[1:], indexes]:
            in_parallel(put, group, AT_ONCE)
        there = self._check(data)
        if switches:
            return there
        self._put_commit_file(ABSENT)
        try:
            return self._check(data)
        except ConcurrentWriteError:  # another writer has begun to replace files just before
            self.client.delete(f"{self.url}/{COMMIT_FILE}", self._expected[COMMIT_FILE])
            raise

    def _check(self, needed: Collection[str] = ()) -> Files:
        """List the folder; raise ConcurrentWriteError if another writer has begun or ended since the beginning."""
        there = self.client.list(self.url)
        is_ours = last_marker(there) == self.marker and _fixed(there) == self._expected
        if not is_ours or not set(needed) <= there.keys():
            raise lost(self.url)
        return there

    def _look_again(self) -> None:
        """Expect what a writer with a lower marker has left when it gave way; raise if there is a higher one."""
        there = self.client.list(self.url)
        if last_marker(there) != self.marker:
            raise lost(self.url)
        time.sleep(_PAUSE)  # the next check tells whether it is at work still
        if COMMIT_FILE not in there and sum(map(is_upload_marker, there)) > 1:
            self._expected = _fixed(there)

    def _is_same_tree(self, staged: str, fixed: list[str], indexes: list[str]) -> bool:
        """Return whether nothing but indexes, checksums and times tell the new checkpoint from the old one."""
        if self._expected.keys() != {*fixed, *indexes, COMMIT_FILE}:
            return False

        def is_same(name: str) -> bool:
            with suppress(FileNotFoundError):
                old = self.client.read(f"{self.url}/{name}")
                return _meaning(name, Path(staged, name).read_bytes()) == _meaning(name, old)
            return False  # another writer removes it

        return all(in_parallel(is_same, [name for name in fixed if name != layout.CHECKSUMS], AT_ONCE))


def remove(url: str) -> None:
    """Remove a checkpoint, the object first: it must not reappear when the folder that replaced it is gone."""
    client_for(url).delete(url)
    remove_folder(url, client_for(url).list(url))


def remove_folder(url: str, found: Files) -> None:
    """Remove files of a folder, if there are any, the commit file first and the markers last."""
    if found and (markers := _uncommit(url, found)):
        _delete_uncommitted(url, found, markers)


def _uncommit(url: str, found: Files) -> list[str]:
    """Delete the commit file of a folder; return its markers, or none if another writer has replaced it meanwhile."""
    client, markers = client_for(url), list(filter(is_upload_marker, found))
    if not markers:
        markers = [_new_marker()]
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
        if (arrays := arrays_among(there)) and _is_expired(last_marker(there)):
            gone = [*arrays, *filter(is_upload_marker, there), COMMIT_FILE]
            _delete(folder, {name: there[name] for name in gone if name in there})


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
        last, main = last_marker(there), name.removesuffix(ARRAYS_POSTFIX)
        # Only the msgpack file knows which arrays beside it are in use; the rest is removed with it.
        if last and _is_expired(last) and (main == name or main not in folders):
            is_whole = main != name or is_unfinished(there)
            there.pop("", None)  # an object of that name
            found[name] = there if is_whole else _beside_a_commit(f"{url}/{name}", there)
    return found


def _beside_a_commit(url: str, there: Files) -> dict[str, Stat]:
    """Return the markers of a complete folder, and what their saves wrote, unless it is in use."""
    client, found = client_for(url), dict[str, Stat]()
    with suppress(FileNotFoundError, StorageError):  # what another removes meanwhile, or nobody may read, stays
        text = client.read(f"{url}/{COMMIT_FILE}").decode("utf-8", "replace")
        for marker in filter(is_upload_marker, there):
            tag = tag_of(marker)
            if tag not in text:
                own = set(client.read(f"{url}/{marker}").decode("utf-8", "replace").split("\n"))
                mine = [key for key in there if tag_of(key) == tag or (key in own and not is_fixed(key))]
                found |= {key: there[key] for key in mine}
            found[marker] = there[marker]
    return found


def tag_of(key: str) -> str:
    """Return the number of the save that alone has a marker, or files in a folder, of this name."""
    return key.partition("/")[0].rpartition(".")[2]


_warned: set[str] = set()  # folders of checkpoints of which `harmless` has warned


@contextmanager
def harmless(url: str, what: str) -> Iterator[None]:
    """Log that objects which do no harm could not be removed: as a warning once for a folder of checkpoints."""
    try:
        yield
    except StorageError as error:
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


def _fixed(found: Files) -> dict[str, str]:
    return {name: stat.version for name, stat in found.items() if is_fixed(name)}


def _meaning(name: str, text: bytes) -> object:
    """Return a small file without the blanks at its end, which tell saves apart, and metadata without their times."""
    if name == layout.STEP_METADATA:
        with suppress(ValueError, AttributeError):
            return {key: value for key, value in json.loads(text).items() if not key.endswith("timestamp_nsecs")}
    return text.rstrip()


def lost(url: str) -> ConcurrentWriteError:
    """Return the error of a save that another writer of the same checkpoint has overtaken."""
    message = f"{url}: another process writes, wrote or removes this checkpoint at the same time, so this one was not"
    remedy = "save each step from one place only, or pass overwrite=True to replace what is there"
    return ConcurrentWriteError(f"{message} saved; {remedy}", path=url)
