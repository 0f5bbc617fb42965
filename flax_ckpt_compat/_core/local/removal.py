"""Remove checkpoints and temporaries, so that no crash and no power loss brings back a part of one.

Nothing is deleted under a checkpoint's name: a directory is renamed, the names are synced, and then its contents go.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from flax_ckpt_compat._core.errors import StorageError, storage_error_of
from flax_ckpt_compat._core.local import gda_folder, presence, temporaries
from flax_ckpt_compat._core.local.syncing import delete_tree, rename_new, sync_directory
from flax_ckpt_compat._core.local.temporaries import GONE, parse, release, temporary_path, writer_of
from flax_ckpt_compat._core.storage_errors import storage_error, translated

_TRIES = 3
_BY_EFFECTIVE_IDS = os.access in os.supports_effective_ids
_LOCK_SECONDS, _SWAP_SECONDS, _POLL_SECONDS = 5.0, 1.0, 0.005
_log = logging.getLogger("flax_ckpt_compat")


@contextmanager
def locked(directory: str) -> Iterator[None]:
    """Keep out other processes that do this, where the file system has locks; for a while, as one may be stopped."""
    with translated(directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    end = time.monotonic() + _LOCK_SECONDS
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
                continue
            except OSError:  # no locks here
                pass
            break
        yield
    finally:
        temporaries.unlock(descriptor)


def discard(paths: Iterable[str]) -> dict[str, StorageError]:
    """Delete files and directories durably, with one sync of their directory; return path → failure.

    What another process deletes meanwhile is not a failure. What fails after its rename goes with the next save."""
    failures: dict[str, StorageError] = {}
    hidden: dict[str, str | None] = {}
    for path in paths:
        try:
            hidden[path] = _hide(path)
        except GONE:
            continue
        except OSError as error:
            # Arrays of a checkpoint may have a name that leaves no room for their suffix.
            if error.errno != errno.ENAMETOOLONG:
                failures[path] = storage_error(path, error)
    for folder in {os.path.dirname(path) for path in hidden}:
        try:
            sync_directory(folder)
        except OSError as error:  # the names may come back, so the contents have to stay
            for path in [path for path in hidden if os.path.dirname(path) == folder]:
                failures[path] = storage_error(path, error, "removed")
                del hidden[path]
    for path, aside in hidden.items():
        try:
            if aside is not None:
                delete(aside)
        except StorageError as error:
            failures[path] = error
    return failures


def _hide(path: str) -> str | None:
    """Rename a directory, and return its new path; delete anything else."""
    if presence.islink(path) or not presence.isdir(path):
        os.unlink(path)
        return None
    for folder, folders, files in os.walk(path):
        # Another user's folder could be renamed and not emptied: it would take space under a hidden name.
        if (folders or files) and not os.access(folder, os.W_OK | os.X_OK, effective_ids=_BY_EFFECTIVE_IDS):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
    aside = temporary_path(path)
    os.rename(path, aside)
    return aside


def delete(path: str) -> None:
    """Delete a file or directory whose name counts for nothing, such as a temporary."""
    try:
        with translated(path), suppress(*GONE):
            if presence.isdir(path) and not presence.islink(path):
                delete_tree(path)
            else:
                os.unlink(path)
    finally:
        release(path)


def remove_temporary(temporary: str) -> None:
    """Remove what a failed save wrote, with its arrays; a later save removes what this cannot."""
    for path in (temporary, gda_folder.folder_of(temporary)):
        for _ in range(_TRIES):  # late processes of the same save may write into it at the same time
            with suppress(StorageError, OSError):
                if presence.lexists(path):
                    # If the save failed while it was published, this may be what it replaced.
                    sync_directory(os.path.dirname(path))
                    delete(path)
        release(path)


def stale_names(directory: str, names: Iterable[str], *, force: bool = False) -> list[str]:
    """Return the names of temporaries of dead writers; with ``force`` also of those that only time protects."""
    stale, certain = [], ("dead", "perhaps") if force else ("dead",)
    for name in names:
        if match := parse(name):
            path = os.path.join(directory, name)
            if presence.lexists(path) and writer_of(match, path) in certain:
                stale.append(name)
    return stale


def remove_stale(directory: str, names: Collection[str] | None = None, *, force: bool = False) -> list[str]:
    """Remove temporaries of dead writers, or those with these names, after `restore_set_aside`; return their names.

    ``force``: also those that only time protects."""
    if names is None:
        with translated(directory):
            names = os.listdir(directory)
    restore_set_aside(directory, names)
    stale = stale_names(directory, names, force=force)
    try:
        if stale:  # one may be what a rename replaced that its dead writer did not sync
            sync_directory(directory)
    except OSError as error:
        _log.warning("Cannot remove %s in %s, left by interrupted saves: %s", stale, directory, error)
        return []
    return [name for name in stale if _remove_leftover(os.path.join(directory, name))]


def _remove_leftover(path: str) -> bool:
    """Remove a stale temporary under its lock; return False on failure, which must not prevent a save."""
    descriptor = temporaries.try_lock(path)
    try:
        if descriptor is not None or not temporaries.is_locked(path):
            with suppress(*GONE):  # other writers remove it too
                gda_folder.settle(path)
                delete_replaced(path)
            return True
    except OSError as error:
        _log.warning("Cannot remove %s, left by an interrupted save: %s", path, error)
    finally:
        if descriptor is not None:
            temporaries.unlock(descriptor)
    return False


def delete_replaced(path: str) -> None:
    """Delete a temporary; what was set aside by another name, so that no half of it is put back."""
    match = parse(os.path.basename(path))
    if match is None or match["role"] != "old":
        return delete(path)
    doomed = temporary_path(os.path.join(os.path.dirname(path), match["name"]))
    os.rename(path, doomed)
    release(path)
    return delete(doomed)


def has_live_writer(path: str) -> bool:
    """Return whether a live writer may still publish a checkpoint at ``path``."""
    directory, wanted = os.path.split(path)
    with translated(directory):
        names = os.listdir(directory)
    for name in names:
        match = parse(name)
        # A temporary's name may hold a shortened form of a long name.
        if match and wanted.startswith(match["name"]) and temporaries.is_alive(match, os.path.join(directory, name)):
            return True
    return False


def remove_set_aside(directory: str, names: Iterable[str], doomed: Collection[str]) -> None:
    """Remove set-aside versions of checkpoints that are removed next; otherwise they would be put back."""
    for name in names:
        match = parse(name)
        if match and match["role"] == "old" and match["name"] in doomed:
            _remove_leftover(os.path.join(directory, name))


def restore_set_aside(directory: str, names: Collection[str]) -> list[str]:
    """Put back checkpoints that a writer set aside before it died; return their names, unless they are in ``names``.

    Otherwise a restore would silently start from scratch. A writer that only takes its time, between two renames, finds
    the name taken, fails, and loses nothing."""
    restored = []
    for name in names:
        match = parse(name)
        if not match or match["role"] != "old":
            continue
        path, original = os.path.join(directory, name), os.path.join(directory, match["name"])
        end = time.monotonic() + (_SWAP_SECONDS if temporaries.is_alive(match, path) else 0)
        while presence.lexists(path) and not presence.lexists(original) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if presence.lexists(original) or (presence.lexists(path) and _put_back(path, original)):
            restored.append(match["name"])
    return list(set(restored).difference(names))


def _put_back(path: str, original: str) -> bool:
    """Rename what was set aside; return False if another process was faster."""
    try:
        return rename_new(path, original)
    except GONE:
        return False
    except OSError as error:
        what = f"{original} was set aside by a save that ended there, and cannot be put back: {error.strerror}"
        message = f"{what}; look again as somebody who may write to {os.path.dirname(path)}, or name another step"
        raise storage_error_of(message, path=original, errno=error.errno) from error
