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
from collections.abc import Collection, Iterable
from contextlib import suppress

from flax_ckpt_compat._core import files, store_uploads, stores
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.store_turns import COMMIT_FILE, LostTurnError, Turn, is_old, tag_of
from flax_ckpt_compat._core.store_turns import is_mark as is_mark

_RANDOM = re.compile(r"(^|/)d/[0-9a-f]{32}$")
_ARRAY, _CHUNK = ".zarray", re.compile(r"\d+(\.\d+)*")
_ROUNDS = 5
_log = logging.getLogger("flax_ckpt_compat")


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


def publish(staged: str, url: str, *, new: bool = False) -> None:
    """Uploads what was written locally, replaces what has that name, and removes the local copy.

    Args:
        staged: local path.
        url: of the checkpoint.
        new: replace no other checkpoint; looked at by the store itself as it writes, where it can do that.

    Raises:
        LostTurnError: another process writes, or has just written, the same checkpoint.
        StorageError: the store refused.
    """
    if os.path.isdir(staged):
        replaced = stores.version(url)
        publish_folder(staged, Turn(url), replaced, new=new)
    else:
        publish_object(staged, url, new=new)
    if not new:
        remove_arrays_beside(url)
    files.discard(staged)


def publish_object(staged: str, url: str, *, new: bool) -> None:
    """Uploads a msgpack file, and removes a folder of its name; see `publish`."""
    if not store_uploads.upload_file(staged, url, new=new):
        message = f"{url}: another process wrote this checkpoint at the same time, and it stays; pass overwrite=True"
        raise LostTurnError(f"{message} to replace it", path=url)
    if stores.fresh_keys(url):
        _remove_folder(url)
        # Whoever wrote the folder at the same time may have taken our object for the one that it replaced.
        if not stores.is_object(url):
            store_uploads.upload_file(staged, url, new=new)


def publish_folder(staged: str, turn: Turn, replaced: bytes, *, new: bool, there: Collection[str] = ()) -> None:
    """Uploads a directory, and removes an object of its name; see `publish`.

    Args:
        staged: local path.
        turn: of its folder.
        replaced: version of the object before the turn began.
        new: as for `publish`.
        there: names of objects that are part of the checkpoint and in their place.
    """
    names = [name for name in store_uploads.names_in(staged) if name not in {COMMIT_FILE, *there}]
    shared = list(filter(_is_shared, names))
    # Known before it is sure that it is our turn: what a later writer puts there is never replaced, however late
    # a request of ours is carried out.
    versions = dict.fromkeys(shared, stores.NO_OBJECT)
    versions |= store_uploads.versions(turn.url, turn.seen.intersection(shared))
    turn.clear(spare=new, but=[*there, *shared])
    try:
        _fill(turn, staged, names, versions, there)
        turn.commit([*names, *there])
    except LostTurnError:
        stores.delete_all(f"{turn.url}/{name}" for name in names if not _is_shared(name))
        raise
    # The writer of an object that has come since then sees our mark, and removes the folder.
    if replaced != stores.NO_OBJECT and stores.version(turn.url) == replaced:
        stores.delete(turn.url)


def remove_arrays_beside(url: str) -> None:
    """Removes the folder of arrays of the msgpack checkpoint that was replaced, unless several processes fill it."""
    folder = url + ARRAYS_POSTFIX
    there = stores.fresh_keys(folder)
    doomed = arrays_among(there)
    if doomed and not any(is_mark(name) and not is_old(name) for name in there):
        stores.delete_all(f"{folder}/{name}" for name in doomed)
        stores.delete_all(f"{folder}/{name}" for name in there if name == COMMIT_FILE or is_mark(name))


def arrays_among(keys: Collection[str]) -> list[str]:
    """Those objects that are parts of zarr arrays."""
    folders = {posixpath.dirname(key) for key in keys if posixpath.basename(key) == _ARRAY}
    parts = ((key, *posixpath.split(key)) for key in keys)
    return [key for key, folder, name in parts if folder in folders and (name == _ARRAY or _CHUNK.fullmatch(name))]


def _is_shared(name: str) -> bool:
    """Whether another writer's checkpoint has a file of the same name; those with data have random ones."""
    return _RANDOM.search(name) is None


def _fill(turn: Turn, staged: str, names: list[str], versions: dict[str, bytes], kept: Collection[str]) -> None:
    """Uploads until just these files are there, whatever a writer who has lost its turn still does."""
    left = names
    for _ in range(_ROUNDS):
        taken = store_uploads.upload(staged, turn.url, left, versions)
        versions |= store_uploads.versions(turn.url, taken)
        there = turn.others().difference(kept)
        missing = [name for name in names if name not in there]
        versions |= dict.fromkeys(filter(_is_shared, missing), stores.NO_OBJECT)
        left, strangers = [*taken, *set(missing).difference(taken)], there.difference(names)
        if not left and not strangers:
            return
        turn.remove(strangers)
    turn.give_up()


def discard(url: str) -> None:
    """Removes a checkpoint so that one half removed never counts."""
    # The object first: it must not come to light again when the folder that replaced it is gone.
    if stores.is_object(url):
        stores.delete(url)
    if stores.fresh_keys(url):
        _remove_folder(url)


def _remove_folder(url: str) -> None:
    turn = Turn(url)
    with suppress(LostTurnError):  # whoever comes after removes it too, or writes it anew
        turn.clear()
        turn.end()


def reclaim(directory: str) -> list[str]:
    """Removes what dead writers left below a folder of checkpoints, and returns the names."""
    removed = []
    with stores.snapshot(directory):
        there = {name: stores.keys(f"{directory}/{name}") for name in stores.names(directory)}
    for name, inside in there.items():
        marks = [mark for mark in inside if is_mark(mark) and is_old(mark)]
        main = name.removesuffix(ARRAYS_POSTFIX)
        # Which of the arrays beside a file it refers to, only the file tells: the rest goes when it does.
        if not marks or (main != name and main in there):
            continue
        _log.info("Removing what an interrupted save left at %s/%s", directory, name)
        if main != name or is_unfinished(inside):
            _remove_folder(f"{directory}/{name}")
            removed.append(name)
        else:
            _remove_strays(f"{directory}/{name}", inside, marks)
    return removed


def _remove_strays(url: str, inside: Collection[str], marks: Collection[str]) -> None:
    """Frees a committed checkpoint from what was to replace it and never did, or from the mark of its own writer."""
    try:
        committed = stores.read(f"{url}/{COMMIT_FILE}")
    except FileNotFoundError:  # another process has just begun to remove it
        return
    for mark in marks:
        if mark.encode() not in committed:
            end = tag_of(mark) + "/"
            stores.delete_all(f"{url}/{key}" for key in inside if end in key[: key.find("/") + 1])
    stores.delete_all(f"{url}/{mark}" for mark in marks)
