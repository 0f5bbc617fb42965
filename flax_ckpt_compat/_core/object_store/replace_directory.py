"""Replace a committed directory in a store; at each moment the old or the new one is complete.

See `flax_ckpt_compat._core.object_store.visible_objects` for the layout, and
`flax_ckpt_compat._core.object_store.writer_markers` for other writers.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

from flax_ckpt_compat._core.errors import ConcurrentWriteError
from flax_ckpt_compat._core.object_store import client, uploads, visible_objects
from flax_ckpt_compat._core.object_store.visible_objects import is_shared
from flax_ckpt_compat._core.object_store.writer_markers import WriteLease, after_commit
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, NEXT_DATA_LIST
from flax_ckpt_compat._core.thread_pools import at_once

_ROUNDS = 5


def shared_versions(lease: WriteLease, names: Iterable[str]) -> dict[str, bytes]:
    """Return the version of each object with a shared name when the lease began.

    Uploads replace these versions only, so even a late request never replaces what a newer writer wrote.
    """
    shared = set(filter(is_shared, names))
    found = dict.fromkeys(shared, client.NO_OBJECT)
    return found | uploads.versions(lease.url, lease.initial & shared)


def replace(lease: WriteLease, staged: str, names: Collection[str], uploaded: Collection[str]) -> None:
    """Replace the existing checkpoint; if the lease is lost or the store refuses, the old one is unchanged.

    The new files are ``names`` in the local folder ``staged``, and objects that are ``uploaded`` already."""
    next_folder = visible_objects.next_name(lease.marker)
    data = [name for name in names if not is_shared(name)]
    shared = [name for name in names if is_shared(name)]
    try:
        data_list = f"{lease.url}/{next_folder}/{NEXT_DATA_LIST}"
        versions, _ = at_once(
            lambda: shared_versions(lease, shared), lambda: client.write(data_list, "\n".join(data).encode())
        )
        at_once(
            lambda: uploads.upload(staged, lease.url, data, {}, lease.meter),
            lambda: uploads.upload(staged, f"{lease.url}/{next_folder}", shared, {}),
        )
        if not {*data, *uploaded, *(f"{next_folder}/{name}" for name in shared)} <= lease.list_others():
            lease.abort()  # another writer has removed some as leftovers
        client.write(f"{lease.url}/{next_folder}/{COMMIT_FILE}", lease.commit_content())
        commit_file = f"{lease.url}/{COMMIT_FILE}"
        before, committed = at_once(lease.list_others, lambda: client.version(commit_file))
    except ConcurrentWriteError:
        _undo(lease, next_folder, shared, data)
        raise
    # This commits the new checkpoint. S3's delete has no condition, but there the new one is complete without it.
    if COMMIT_FILE in before and not client.delete_version(commit_file, committed):
        before = set()  # `_finish` looks again for what it removes
    _finish(lease, staged, shared, versions, {*data, *uploaded}, next_folder, before - {COMMIT_FILE})


def _undo(lease: WriteLease, next_folder: str, shared: Iterable[str], data: Iterable[str]) -> None:
    client.delete(f"{lease.url}/{next_folder}/{COMMIT_FILE}")
    client.delete_all(f"{lease.url}/{next_folder}/{name}" for name in [*shared, NEXT_DATA_LIST])
    client.delete_all(f"{lease.url}/{name}" for name in data)


def _finish(
    lease: WriteLease,
    staged: str,
    shared: Collection[str],
    versions: dict[str, bytes],
    kept: Collection[str],
    next_folder: str,
    replaced: Collection[str] = (),
) -> None:
    """Upload the new checkpoint's files to their final names, and remove all else: what is ``replaced`` at once."""
    ours = [f"{next_folder}/{name}" for name in [*shared, NEXT_DATA_LIST]]
    commit_file = f"{next_folder}/{COMMIT_FILE}"
    with after_commit(lease.url):
        needed = {*kept, *ours, commit_file}
        upload_all(lease, staged, shared, versions, needed, set(replaced).difference(needed, shared))
        lease.commit([*shared, *kept], [commit_file, *ours])


def upload_all(
    lease: WriteLease,
    staged: str,
    names: Collection[str],
    versions: dict[str, bytes],
    kept: Collection[str],
    extra: Collection[str] = (),
) -> None:
    """Upload files, and remove others, ``extra`` first, until the folder has just these and ``kept``.

    It repeats that because late requests of aborted writers may still take effect; ``versions`` is updated."""
    pending = list(names)
    for _ in range(_ROUNDS):
        conflicts, _ = at_once(
            functools.partial(uploads.upload, staged, lease.url, pending, versions, lease.meter),
            functools.partial(lease.remove, extra),
        )
        versions |= uploads.versions(lease.url, conflicts)
        there = lease.list_others().difference(kept)
        missing = [name for name in names if name not in there]
        versions |= dict.fromkeys(filter(is_shared, missing), client.NO_OBJECT)
        pending, extra = [*conflicts, *set(missing).difference(conflicts)], there.difference(names)
        if not pending and not extra:
            return
    lease.abort()


def resume(url: str, staged: str) -> None:
    """Resume a replacement whose writer died after the new checkpoint was complete, through a local directory."""
    lease = WriteLease(url)
    next_folder = visible_objects.current_folder(lease.initial)
    if next_folder is None:
        lease.release()
        return
    lease.adopted.append(next_folder)
    shared = [name[len(next_folder) + 1 :] for name in lease.initial if name.startswith(f"{next_folder}/")]
    shared = [name for name in shared if name not in (COMMIT_FILE, NEXT_DATA_LIST)]
    of_processes = [name for name in lease.initial if visible_objects.is_of_save(name, next_folder)]
    kept = {*data_names(url, next_folder), *of_processes} & lease.initial
    versions = shared_versions(lease, shared)
    uploads.download(f"{url}/{next_folder}", staged, shared)
    _finish(lease, staged, shared, versions, kept, next_folder)


def data_names(url: str, next_folder: str) -> list[str]:
    """Return the names of the data objects of the save that writes below ``next_folder``."""
    try:
        return client.read(f"{url}/{next_folder}/{NEXT_DATA_LIST}").decode().split("\n")
    except FileNotFoundError:  # its writer finished meanwhile
        return []
