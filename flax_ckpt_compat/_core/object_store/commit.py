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
from contextlib import nullcontext, suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import client, swaps, uploads, views
from flax_ckpt_compat._core.object_store.lease import (
    ConcurrentWriteError,
    WriteLease,
    after_commit,
    is_old,
    tag_of,
)
from flax_ckpt_compat._core.object_store.lease import is_mark as is_mark
from flax_ckpt_compat._core.object_store.views import LIST_FILE
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_CHUNK_PATTERN, ZARR2_METADATA
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX

_CHUNK = re.compile(ZARR2_CHUNK_PATTERN)
_log = logging.getLogger("flax_ckpt_compat")


def is_unfinished(names: Iterable[str]) -> bool:
    """Whether a folder with these names in it was begun by us, and not committed or no longer so."""
    there = set(names)
    return COMMIT_FILE not in there and any(map(is_mark, there))


def counts_as_folder(url: str) -> bool:
    """Whether ``url`` is a folder, and no object that a folder of the same name is about to replace."""
    inside = client.keys(url)
    return bool(inside) and not (is_unfinished(inside) and client.is_object(url))


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
    with atomic.translated(folder):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise StorageError(f"{folder} is not this user's own folder; remove it, or set TMPDIR", path=folder)
    atomic.remove_stale(folder)
    return atomic.temporary_path(os.path.join(folder, posixpath.basename(url)))


def publish(staged: str, url: str, *, new: bool = False) -> None:
    """Uploads what was written locally, replaces what has that name, and removes the local copy.

    Args:
        staged: local path.
        url: of the checkpoint.
        new: replace no other checkpoint; looked at by the store itself as it writes, where it can do that.

    Raises:
        ConcurrentWriteError: another process writes, or has just written, the same checkpoint.
        StorageError: the store refused.
    """
    if os.path.isdir(staged):
        replaced = client.version(url)
        publish_folder(staged, WriteLease(url, replaces=not new), replaced, new=new)
    else:
        publish_object(staged, url, new=new)
    if not new:
        with after_commit(url):
            remove_arrays_beside(url)
    atomic.discard(staged)


def publish_object(staged: str, url: str, *, new: bool) -> None:
    """Uploads a msgpack file, and removes a folder of its name; see `publish`."""
    hidden = not new and bool(client.fresh_keys(url))  # by a committed folder, for as long as it is that
    if not uploads.upload_file(staged, url, new=new):
        message = f"{url}: another process wrote this checkpoint at the same time, and it stays; pass overwrite=True"
        raise ConcurrentWriteError(f"{message} to replace it", path=url)
    with nullcontext() if hidden else after_commit(url):
        there = client.fresh_keys(url)
    if there:
        with suppress(ConcurrentWriteError):  # whoever comes after removes it too, or writes it anew
            turn = WriteLease(url)
            turn.uncommit()
            with after_commit(url):
                turn.clear()
                turn.end()
        # Whoever wrote the folder at the same time may have taken our object for the one that it replaced.
        if not client.is_object(url):
            uploads.upload_file(staged, url, new=new)


def publish_folder(staged: str, turn: WriteLease, replaced: bytes, *, new: bool, there: Collection[str] = ()) -> None:
    """Uploads a directory, and removes an object of its name; see `publish`.

    Args:
        staged: local path.
        turn: of its folder.
        replaced: version of the object before the turn began.
        new: as for `publish`.
        there: names of objects that are part of the checkpoint and in their place.
    """
    names = [name for name in uploads.names_in(staged) if name not in {COMMIT_FILE, *there}]
    versions = swaps.seen_versions(turn, names)
    if not new and views.commit_files(turn.seen):
        swaps.replace(turn, staged, names, versions, there)
    else:
        _write_anew(turn, staged, names, versions, there, spare=new)
    # The writer of an object that has come since then sees our mark, and removes the folder.
    with after_commit(turn.url):
        if replaced != client.NO_OBJECT and client.version(turn.url) == replaced:
            client.delete(turn.url)


def _write_anew(
    turn: WriteLease, staged: str, names: list[str], versions: dict[str, bytes], there: Collection[str], *, spare: bool
) -> None:
    """Upload a directory to where no checkpoint is complete, or where none is to be replaced."""
    turn.clear(spare=spare, but=[*there, *versions])
    try:
        swaps.fill(turn, staged, names, versions, there)
        turn.commit([*names, *there])
    except ConcurrentWriteError:
        client.delete_all(f"{turn.url}/{name}" for name in names if name not in versions)
        raise


def remove_arrays_beside(url: str) -> None:
    """Removes the folder of arrays of the msgpack checkpoint that was replaced, unless several processes fill it."""
    folder = url + ARRAYS_POSTFIX
    there = client.fresh_keys(folder)
    doomed = arrays_among(there)
    if doomed and not any(is_mark(name) and not is_old(name) for name in there):
        client.delete_all(f"{folder}/{name}" for name in doomed)
        client.delete_all(f"{folder}/{name}" for name in there if name == COMMIT_FILE or is_mark(name))


def arrays_among(keys: Collection[str]) -> list[str]:
    """Those objects that are parts of zarr arrays."""
    folders = {posixpath.dirname(key) for key in keys if posixpath.basename(key) == ZARR2_METADATA}
    parts = ((key, *posixpath.split(key)) for key in keys)
    return [
        key for key, folder, name in parts if folder in folders and (name == ZARR2_METADATA or _CHUNK.fullmatch(name))
    ]


def discard(url: str) -> None:
    """Removes a checkpoint so that one half removed never counts."""
    # The object first: it must not come to light again when the folder that replaced it is gone.
    if client.is_object(url):
        client.delete(url)
    if client.fresh_keys(url):
        _remove_folder(url)


def _remove_folder(url: str) -> None:
    turn = WriteLease(url)
    with suppress(ConcurrentWriteError):  # whoever comes after removes it too, or writes it anew
        turn.clear()
        turn.end()


def remove_stale(directory: str) -> list[str]:
    """Removes what dead writers left below a folder of checkpoints, and returns the names."""
    removed = []
    with client.listing_cache(directory):
        there = {name: client.keys(f"{directory}/{name}") for name in client.names(directory)}
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
            _remove_strays(f"{directory}/{name}", marks)
    return removed


def _remove_strays(url: str, marks: Collection[str]) -> None:
    """Frees a committed checkpoint from what was to replace it and never did, or from the mark of its own writer."""
    inside = client.fresh_keys(url)
    if views.current(inside) is not None:
        staged = staging_path(url)
        try:
            swaps.complete(url, staged)
        except ConcurrentWriteError:
            pass
        finally:
            atomic.remove_temporary(staged)
        return
    try:
        committed = client.read(f"{url}/{COMMIT_FILE}")
    except FileNotFoundError:  # another process has just begun to remove it
        return
    for mark in marks:
        tag, following = tag_of(mark), views.next_name(mark)
        strays = {key for key in inside if key.startswith(f"{following}/")}
        if tag.encode() not in committed:
            strays.update(key for key in inside if tag + "/" in key[: key.find("/") + 1])
            strays.update(swaps.data_of(url, following) if f"{following}/{LIST_FILE}" in inside else ())
        client.delete_all(f"{url}/{key}" for key in strays.intersection(inside))
    client.delete_all(f"{url}/{mark}" for mark in marks)
