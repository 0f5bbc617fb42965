"""Publish checkpoints in object stores, which have no rename.

A msgpack checkpoint is one object, which appears whole or not at all. A directory is uploaded in this order: a marker,
all files, ``commit_success.txt`` (which Orbax too writes last in stores); then the marker is removed. With a marker and
without the commit file it is incomplete. `removal` runs the other way round. An object and a folder may share a name
for a moment: the folder counts once it is committed.
"""

from __future__ import annotations

import os
import posixpath
import stat
import tempfile
from collections.abc import Collection, Iterable
from contextlib import nullcontext, suppress

from flax_ckpt_compat._core.errors import ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.listing import AfterCommit, Listing
from flax_ckpt_compat._core.local import atomic, presence
from flax_ckpt_compat._core.local.directories import files_below
from flax_ckpt_compat._core.object_store import client, replace_directory, uploads, visible_objects
from flax_ckpt_compat._core.object_store.writer_markers import WriteLease, after_commit, is_expired
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, ZARR2_CHUNK, ZARR2_METADATA, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.thread_pools import at_once


def is_unfinished(names: Iterable[str]) -> bool:
    """Return whether a folder with these names has a marker of ours and no commit file."""
    there = set(names)
    return COMMIT_FILE not in there and any(map(is_upload_marker, there))


def counts_as_folder(url: str, known: Listing | None = None) -> bool:
    """Return whether ``url`` is a folder, and not an object that an unfinished folder is about to replace."""
    inside = client.keys(url, known)
    if COMMIT_FILE in inside or not inside:
        return bool(inside)
    # Without a listing, only where a marker makes it likely: it is a request.
    return not (client.is_listed_object(url, known) or (is_unfinished(inside) and client.is_object(url, known)))


def counts_as_object(url: str, known: Listing | None = None) -> bool:
    """Return whether ``url`` is an object, and no folder that has replaced it."""
    return client.is_object(url, known) and not counts_as_folder(url, known)


def why_unfinished(url: str, names: Iterable[str]) -> str | None:
    """Return why a folder with these names is incomplete by the rules for stores, or None."""
    there = set(names)
    if is_unfinished(there):
        return f"{COMMIT_FILE} is missing: its upload never ended, or it is being removed"
    if client.scheme_of(url).needs_commit_file and COMMIT_FILE not in there:
        return (
            f"{COMMIT_FILE} is missing, which Orbax writes last in this store; if all of it was copied here, add an "
            "empty object of that name"
        )
    return None


def staging_path(url: str, *, locked: bool = False) -> str:
    """Return a local path for a checkpoint before its upload, and remove local files of dead writers."""
    folder = os.path.join(tempfile.gettempdir(), f"flax_ckpt_compat-{os.getuid()}")
    with translated(folder):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise StorageError(f"{folder} is not this user's own folder; remove it, or set TMPDIR", path=folder)
    atomic.remove_stale(folder)
    return atomic.temporary_path(os.path.join(folder, posixpath.basename(url)), locked=locked)


def publish(
    staged: str,
    url: str,
    *,
    new: bool = False,
    known: Listing | None = None,
    after: AfterCommit | None = None,
    meter: Meter = OFF,
) -> None:
    """Upload a local checkpoint, replace what has its name, and remove the local copy.

    With ``new`` no other checkpoint is replaced, by a conditional write if the store has these. ``known`` is a listing
    that was just made for a check. Raise ConcurrentWriteError if another process writes, or has just written, the same
    checkpoint."""
    if known is not None and not known.covers(posixpath.dirname(url)):
        known = None
    if presence.isdir(staged):
        lease, replaced, arrays = _begin_alone(url) if new else None, client.NO_OBJECT, list[str]()
        if lease is None:
            replaced, initial, arrays = _what_is_there(url, known, new=new)
            lease = WriteLease(url, replaces=not new, initial=initial)
        lease.after, lease.meter = after, meter
        publish_folder(staged, lease, replaced, new=new)
    else:
        arrays = publish_object(staged, url, new=new, known=known, after=after, meter=meter)
    if arrays:
        with after_commit(url):
            remove_arrays_beside(url)
    atomic.delete(staged)


def _begin_alone(url: str) -> WriteLease | None:
    """Begin to write where a list after the marker shows nothing else, nor an object; None if something is there."""
    lease: WriteLease
    replaced, lease = at_once(lambda: client.version(url), lambda: WriteLease(url, initial=()))
    lease.is_alone = replaced == client.NO_OBJECT and client.fresh_keys(url) == [lease.marker]
    if lease.is_alone:
        return lease
    lease.release()
    return None


def _what_is_there(url: str, known: Listing | None, *, new: bool) -> tuple[bytes, list[str], list[str]]:
    """Return the version of an object, the names in the folder, and the names of the arrays that are replaced."""
    # Of another folder the commit is decided by the list, which must not be older than need be.
    inside = [] if known is None else client.known_keys(url, known) or []
    if COMMIT_FILE in inside and not client.is_listed_object(url, known):
        return client.NO_OBJECT, inside, _arrays_beside(url, known)
    version, inside, arrays = at_once(
        lambda: client.version(url), lambda: client.fresh_keys(url), lambda: [] if new else _arrays_beside(url, known)
    )
    return version, inside, arrays


def publish_object(
    staged: str,
    url: str,
    *,
    new: bool,
    known: Listing | None = None,
    after: AfterCommit | None = None,
    meter: Meter = OFF,
) -> list[str]:
    """Upload a msgpack file, and remove a folder of its name; see `publish`. Return the names of its old arrays."""
    # A committed folder of that name takes precedence.
    hidden, arrays = list[str](), list[str]()
    if known is not None:
        hidden, arrays = client.known_keys(url, known) or [], _arrays_beside(url, known)
    elif not new:
        hidden, arrays = at_once(lambda: client.fresh_keys(url), lambda: _arrays_beside(url))
    if not uploads.publish_file(staged, url, meter, new=new):
        raise ConcurrentWriteError(
            f"{url}: another process wrote this checkpoint at the same time, and it stays; pass overwrite=True to "
            "replace it",
            path=url,
        )
    with nullcontext() if hidden else after_commit(url):
        there = client.keys_after_commit(url, after)
    if there:
        with suppress(ConcurrentWriteError):  # the other writer removes or rewrites it
            lease = WriteLease(url)
            lease.uncommit()
            with after_commit(url):
                lease.clear()
                lease.release()
        # A concurrent writer of the folder may have removed our object as the one that it replaced.
        if not client.is_object(url):
            uploads.publish_file(staged, url, meter, new=new)
    return arrays


def publish_folder(
    staged: str, lease: WriteLease, replaced: bytes, *, new: bool, uploaded: Collection[str] = ()
) -> None:
    """Upload a directory, and remove an object of its name; see `publish`.

    ``replaced`` is the object's version before the lease began; ``uploaded`` names objects that are there already."""
    names = [name for name in files_below(staged) if name not in {COMMIT_FILE, *uploaded}]
    try:
        if not new and visible_objects.commit_files(lease.initial):
            replace_directory.replace(lease, staged, names, uploaded)
        else:
            versions = replace_directory.shared_versions(lease, names)
            _write_new(lease, staged, names, versions, uploaded, keep_committed=new)
    except ConcurrentWriteError:
        lease.remove_abandoned(names)
        raise
    # The writer of a newer object sees our marker, and removes the folder.
    with after_commit(lease.url):
        if replaced != client.NO_OBJECT and client.version(lease.url) == replaced:
            client.delete_version(lease.url, replaced)


def _write_new(
    lease: WriteLease,
    staged: str,
    names: list[str],
    versions: dict[str, bytes],
    uploaded: Collection[str],
    *,
    keep_committed: bool,
) -> None:
    """Upload a directory where no checkpoint is committed, or where none may be replaced."""
    if not lease.is_alone:
        lease.clear(keep_committed=keep_committed, keep=[*uploaded, *versions])
    try:
        replace_directory.upload_all(lease, staged, names, versions, uploaded)
        lease.commit([*names, *uploaded])
    except ConcurrentWriteError:
        client.delete_all(f"{lease.url}/{name}" for name in names if name not in versions)
        raise


def _arrays_beside(url: str, known: Listing | None = None) -> list[str]:
    return arrays_among(client.known_or_fresh_keys(url + ARRAYS_POSTFIX, known))


def remove_arrays_beside(url: str) -> None:
    """Remove the GDA folder of a replaced msgpack checkpoint, unless a multi-process save writes to it."""
    folder = url + ARRAYS_POSTFIX
    committed = f"{folder}/{COMMIT_FILE}"
    there = client.fresh_keys(folder)
    arrays = arrays_among(there)
    if arrays and not any(is_upload_marker(name) and not is_expired(name) for name in there):
        version = client.version(committed) if COMMIT_FILE in there else client.NO_OBJECT
        client.delete_all(f"{folder}/{name}" for name in arrays)
        client.delete_all(f"{folder}/{name}" for name in there if is_upload_marker(name))
        if version != client.NO_OBJECT:
            client.delete_version(committed, version)


def arrays_among(keys: Collection[str]) -> list[str]:
    """Return the keys that are parts of zarr arrays."""
    folders = {posixpath.dirname(key) for key in keys if posixpath.basename(key) == ZARR2_METADATA}
    parts = ((key, *posixpath.split(key)) for key in keys)
    return [
        key
        for key, folder, name in parts
        if folder in folders and (name == ZARR2_METADATA or ZARR2_CHUNK.fullmatch(name))
    ]
