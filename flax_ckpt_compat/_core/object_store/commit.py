"""Publish and remove msgpack files of stores, which appear whole or not at all, and remove folders.

A folder is removed by a marker, which ends the saves of others, then its commit file goes, then the rest. Markers go
last: a folder with a marker and no commit file is unfinished. `folder_upload` saves folders.

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
from flax_ckpt_compat._core.object_store.client import ABSENT, EXPIRES_AFTER, Client, ConflictError, split
from flax_ckpt_compat._core.object_store.clouds import AzClient, GsClient, S3Client
from flax_ckpt_compat._core.object_store.epath import EpathClient, is_known
from flax_ckpt_compat._core.object_store.hub import HubClient
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.storage import Stat
from flax_ckpt_compat._core.thread_pools import in_parallel

_log = logging.getLogger("flax_ckpt_compat")
AT_ONCE = 16
# Names that no other save uses.
_OF_ONE_SAVE = re.compile(
    rf"(?:.*/)?{layout.DATA_DIRECTORY}/{layout.DATA_FILE_PATTERN}|{re.escape(layout.PROCESS_PREFIX)}[^/]*\..*",
    re.DOTALL,
)
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
    return max(filter(is_upload_marker, names), key=lambda name: (time_of(name), name), default="")


def time_of(marker: str) -> int:
    """Return the number by which markers are ordered, the seconds at which a save began; 0 without a marker."""
    return int(marker.split(".")[1]) if marker else 0


def new_marker(number: int) -> str:
    """Return the name of a marker of its own."""
    return f"{layout.BEGUN}.{number}.{uuid.uuid4().hex}"


def _is_expired(marker: str) -> bool:
    """Return whether the writer of a marker counts as dead."""
    return time.time() - time_of(marker) > EXPIRES_AFTER


def object_at(url: str, *, new: bool) -> Stat | None:
    """Return the object of a name, or None; with ``new``, raise ConcurrentWriteError if it is a checkpoint."""
    found = client_for(url).find(url)
    if new and found is not None and found.size:  # an empty one is none
        raise lost(url)
    return found


def publish_object(staged: str, url: str, *, new: bool, meter: Meter = OFF) -> None:
    """Upload a msgpack file, and remove a folder of its name; with ``new``, nothing is replaced.

    Raise ConcurrentWriteError if another process writes, or has just written, the same checkpoint."""
    client = client_for(url)
    there = object_at(url, new=True) if new else None
    # What is committed beside the object after this list is newer: it counts, and stays.
    hidden = client.list(url) if client.shares_names and not new else {}
    try:
        found = (ABSENT if there is None else there.version) if new else None
        version = client.put(url, Path(staged), found, meter)
    except ConflictError as error:
        raise lost(url) from error
    if new and COMMIT_FILE in (hidden := client.list(url)):
        client.delete(url, version)
        raise lost(url)
    if hidden and (gone := _uncommit(url, hidden)):  # until then the folder counts
        with after_commit(url):
            delete(url, gone)


def remove(url: str) -> None:
    """Remove a checkpoint, the object first: it must not reappear when the folder that replaced it is gone."""
    client_for(url).delete(url)
    remove_folder(url, client_for(url).list(url))


def remove_folder(url: str, found: Files) -> None:
    """Remove files that were found in a folder, if there are any and it was not committed since."""
    if found:
        delete(url, _uncommit(url, found))


def _uncommit(url: str, found: Files) -> Files:
    """Mark a folder, and delete its commit file; return what has to go, nothing if it was committed meanwhile."""
    client, commit_file, last = client_for(url), f"{url}/{COMMIT_FILE}", last_marker(found)
    # What is being saved there ends. What began after the folder was listed, and so is not removed, need not end.
    marker = new_marker(time_of(last) + 1 if last else int(time.time()))
    version = client.put(f"{url}/{marker}", b"")
    is_ours = COMMIT_FILE in found and client.delete(commit_file, found[COMMIT_FILE].version)
    if not is_ours and client.find(commit_file) is not None:  # else an answer was lost, and it is gone
        client.delete(f"{url}/{marker}")
        return {}
    return {name: stat for name, stat in found.items() if name != COMMIT_FILE} | {marker: Stat(0, version)}


def delete(url: str, found: Files) -> None:
    """Delete files, the markers last; of names that other saves use, the versions that were found."""
    client, markers = client_for(url), list(filter(is_upload_marker, found))
    for group in ([name for name in found if name not in markers], markers):
        in_parallel(
            lambda name: client.delete(f"{url}/{name}", found[name].version if is_fixed(name) else None), group, AT_ONCE
        )


def remove_arrays_beside(url: str) -> None:
    """Remove the GDA folder of a replaced msgpack checkpoint, unless a save by several processes writes to it."""
    folder = url + ARRAYS_POSTFIX
    with after_commit(url):
        there = client_for(url).list(folder)
        if (arrays := arrays_among(there)) and _is_expired(last_marker(there)):
            gone = [*arrays, *filter(is_upload_marker, there), COMMIT_FILE]
            delete(folder, {name: there[name] for name in gone if name in there})


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
        last, main = last_marker(there), name.removesuffix(ARRAYS_POSTFIX)
        # Only the msgpack file knows which arrays beside it are in use; the rest is removed with it.
        if last and _is_expired(last) and (main == name or main not in folders):
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


_warned: set[str] = set()  # folders of checkpoints of which `harmless` has warned


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


def fixed(found: Files) -> dict[str, str]:
    """Return the versions of the files that other saves have, too."""
    return {name: stat.version for name, stat in found.items() if is_fixed(name)}


def lost(url: str) -> ConcurrentWriteError:
    """Return the error of a save that another writer of the same checkpoint has overtaken."""
    message = f"{url}: another process writes, wrote or removes this checkpoint at the same time, so this one was not"
    remedy = "save each step from one place only, or pass overwrite=True to replace what is there"
    return ConcurrentWriteError(f"{message} saved; {remedy}", path=url)
