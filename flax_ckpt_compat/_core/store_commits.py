"""Publishing and removing checkpoints in object stores, which have no rename: what `files` does on a local disk.

A msgpack checkpoint is one object, which appears whole or not at all. A directory is uploaded in this order: a mark
that its writing has begun, all its files, ``commit_success.txt`` (which is also what Orbax writes last in stores),
and then the mark is removed. With a mark and without the commit file it does not count. Removing goes the other way
round. An object and a folder may have one name for a moment: the folder counts once it is committed.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import stat
import tempfile
import time
import uuid
from collections.abc import Iterable

from flax_ckpt_compat._core import files, stores
from flax_ckpt_compat._core.errors import StorageError

COMMIT_FILE = "commit_success.txt"
_BEGUN = re.compile(r"_begun\.(\d+)\.[0-9a-f]{32}")
_COMMITTED = b"All objects of this checkpoint were written before this one.\n"
# Seconds after which a writer that has not committed counts as dead.
_PATIENCE = 24 * 3600
_log = logging.getLogger("flax_ckpt_compat")


def is_mark(name: str) -> bool:
    """True for the names of objects that tell of a save or a removal in progress."""
    return _BEGUN.fullmatch(name) is not None


def is_unfinished(names: Iterable[str]) -> bool:
    """Whether a folder with these names in it was begun by us, and not committed or no longer so."""
    there = set(names)
    return COMMIT_FILE not in there and any(map(is_mark, there))


def counts_as_folder(url: str) -> bool:
    """Whether ``url`` is a folder, and no object that a folder of the same name is about to replace."""
    inside = stores.keys(url)
    return bool(inside) and not (is_unfinished(inside) and stores.is_object(url))


def why_unfinished(url: str, names: Iterable[str]) -> str | None:
    """Why a folder with these names is no complete checkpoint, by the rules for stores; None where they allow it."""
    there = set(names)
    if is_unfinished(there):
        return f"{COMMIT_FILE} is missing: it was never wholly uploaded, or is being removed"
    if url.startswith("gs://") and COMMIT_FILE not in there:
        return (
            f"{COMMIT_FILE} is missing, which Orbax writes last in this store; if all of it was copied here, add an "
            "empty object of that name"
        )
    return None


def staging_path(url: str) -> str:
    """A local path to write a checkpoint to before it is uploaded; a later save removes what a dead writer left."""
    folder = os.path.join(tempfile.gettempdir(), f"flax_ckpt_compat-{os.getuid()}")
    with files.translated(folder):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise StorageError(f"{folder} is not this user's own folder; remove it, or set TMPDIR", path=folder)
    files.reclaim(folder)
    return files.temporary_path(os.path.join(folder, posixpath.basename(url)))


def publish(staged: str, url: str) -> None:
    """Uploads what was written locally, replaces what has that name, and removes the local copy.

    Raises:
        StorageError: the store refused, or another process writes the same checkpoint.
    """
    if os.path.isdir(staged):
        _publish_folder(staged, url)
    else:
        stores.upload_file(staged, url)
        if stores.fresh_keys(url):
            _remove_folder(url)
    files.discard(staged)


def _publish_folder(staged: str, url: str) -> None:
    mark = _begin(url)
    _clear(url, mark)
    uploaded = stores.upload(staged, url, but=COMMIT_FILE)
    if set(stores.fresh_keys(url)) != {mark, *uploaded}:
        stores.delete(f"{url}/{mark}")
        raise StorageError(
            f"{url}: another process writes or removes this checkpoint at the same time, so it was not committed; "
            "save each step from one place only",
            path=url,
        )
    stores.write(f"{url}/{COMMIT_FILE}", _COMMITTED)
    stores.delete(f"{url}/{mark}")
    if stores.is_object(url):
        stores.delete(url)


def discard(url: str) -> None:
    """Removes a checkpoint so that one half removed never counts."""
    # The object first: it must not come to light again when the folder that replaced it is gone.
    if stores.is_object(url):
        stores.delete(url)
    if stores.fresh_keys(url):
        _remove_folder(url)


def _remove_folder(url: str) -> None:
    mark = _begin(url)
    _clear(url, mark)
    stores.delete(f"{url}/{mark}")


def _begin(url: str) -> str:
    """Marks the folder as being written or removed, and returns the name of the mark."""
    mark = f"_begun.{int(time.time())}.{uuid.uuid4().hex}"
    stores.write(f"{url}/{mark}", b"")
    return mark


def _clear(url: str, mark: str) -> None:
    """Removes all but the mark, and the sign of completeness before all else."""
    inside = [key for key in stores.fresh_keys(url) if key != mark]
    if COMMIT_FILE in inside:
        stores.delete(f"{url}/{COMMIT_FILE}")
        inside.remove(COMMIT_FILE)
    stores.delete_all(f"{url}/{key}" for key in inside)


def reclaim(directory: str) -> list[str]:
    """Removes what dead writers left below a folder of checkpoints, and returns the names."""
    removed = []
    with stores.snapshot(directory):
        there = {name: stores.names(f"{directory}/{name}") for name in stores.names(directory)}
    for name, inside in there.items():
        if not any(is_mark(mark) and _is_old(mark) for mark in inside):
            continue
        _log.info("Removing what an interrupted save left at %s/%s", directory, name)
        if is_unfinished(inside):
            _remove_folder(f"{directory}/{name}")
            removed.append(name)
        else:
            stores.delete_all(f"{directory}/{name}/{mark}" for mark in inside if is_mark(mark))
    return removed


def _is_old(mark: str) -> bool:
    match = _BEGUN.fullmatch(mark)
    return match is not None and time.time() - int(match[1]) > _PATIENCE
