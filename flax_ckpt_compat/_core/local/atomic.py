"""Publish and remove checkpoints on a local file system atomically; only this package renames or deletes.

Nothing appears under a checkpoint's name before it is complete and synced. Replacing is one exchange of names, or two
renames where the file system has none. Nothing is deleted under a checkpoint's name: it is renamed, the names are
synced, and then its contents go. So no crash and no power loss leaves a part of one.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from flax_ckpt_compat._core.errors import StorageError, translated
from flax_ckpt_compat._core.local import gda_folder, presence, temporaries
from flax_ckpt_compat._core.local.syncing import TAKEN, delete_tree, exchange, rename_new, sync_directory
from flax_ckpt_compat._core.local.temporaries import GONE, parse, release, temporary_path, writer_of

_LOCK_SECONDS, _SWAP_SECONDS, _POLL_SECONDS = 5.0, 1.0, 0.005
_log = logging.getLogger("flax_ckpt_compat")


def publish(temporary: str, final: str, *, new: bool = False) -> None:
    """Rename a finished temporary and its arrays to a path, atomically replacing what is there, and sync the names.

    With ``new`` nothing but an empty file or directory is replaced."""
    with translated(final):
        replaced = None
        with gda_folder.moved(temporary, final):
            if not new or is_empty(final):
                replaced = _replace(temporary, final)
            elif not rename_new(temporary, final):
                message = f"{final}: another process has saved a checkpoint of this name meanwhile, so this one was"
                raise StorageError(f"{message} not saved; pass overwrite=True", path=final, errno=errno.EEXIST)
        release(temporary)
        if replaced is not None:
            _remove_leftover(replaced, is_ours=True)  # its writer may still have it locked


def _replace(temporary: str, final: str) -> str | None:
    """Rename and sync; return the path of the replaced checkpoint if it still exists."""
    replaced = None
    try:
        os.replace(temporary, final)
    except OSError as error:
        # os.replace refuses non-empty directories, and files for directories.
        if error.errno not in TAKEN:
            raise
        replaced = temporary if exchange(temporary, final) else _replace_in_two_steps(temporary, final)
    sync_directory(os.path.dirname(final))
    return replaced


def _replace_in_two_steps(temporary: str, final: str) -> str:
    """Replace with two renames; return the path of the old one. After a crash, `restore_set_aside` puts it back."""
    aside = temporary_path(final, "old")
    try:
        with suppress(FileNotFoundError):  # another process evicted it
            os.rename(final, aside)
        os.rename(temporary, final)
    except BaseException:  # Ctrl-C may come after either of them
        with suppress(OSError):  # the next look-up puts it back, or the next save removes it, if this cannot
            rename_new(aside, final)
        raise
    return aside


def is_empty(path: str) -> bool:
    """Return whether a local path is an empty directory or file; False for links."""
    mode = presence.mode(path, follow=False)
    try:
        return not os.listdir(path) if stat.S_ISDIR(mode) else stat.S_ISREG(mode) and not os.path.getsize(path)
    except GONE:  # another writer removed or replaced it
        return False


@contextmanager
def locked(directory: str) -> Iterator[None]:
    """Keep out other processes that do this, where the file system has locks; for a while, as one may be stopped."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        with temporaries.locked_if_free(os.path.realpath(directory)) as is_free:  # itself, not a link to it
            if is_free is not False or time.monotonic() > end:
                yield
                return
        time.sleep(_POLL_SECONDS)


def discard(directory: str, names: Iterable[str]) -> dict[str, StorageError]:
    """Delete these files and directories of a directory durably, with one sync; return name → failure.

    It is none if another process deletes one meanwhile. What fails after its rename goes with the next save."""
    failures, hidden = dict[str, StorageError](), dict[str, str | None]()
    for name in names:
        path = os.path.join(directory, name)
        try:
            with translated(path), suppress(*GONE):
                if presence.lexists(path):  # of arrays the name may be one that no file system takes
                    hidden[name] = _hide(path)
        except StorageError as error:
            failures[name] = error
    if hidden:  # until then the names may come back, so the contents have to stay
        with translated(directory):
            sync_directory(directory)
    for name, aside in hidden.items():
        try:
            if aside is not None:
                delete(aside)
        except StorageError as error:
            failures[name] = error
    return failures


def _hide(path: str) -> str | None:
    """Rename a directory, and return its new path; delete anything else."""
    if presence.islink(path) or not presence.isdir(path):
        os.unlink(path)
        return None
    # Another user's could be renamed and not emptied: it would take space under a hidden name.
    may_empty = os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
    if not may_empty and os.listdir(path):  # which raises if it is gone
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    aside = temporary_path(path)
    os.rename(path, aside)
    return aside


def delete(path: str) -> None:
    """Delete a file or directory whose name counts for nothing, once what has that name instead is on disk."""
    directory, name = os.path.split(path)
    doomed = path
    with translated(path), suppress(*GONE):
        for original in _set_aside([name]).values():  # first renamed, so that no half of it is put back
            doomed = temporary_path(os.path.join(directory, original))
            os.rename(path, doomed)
        (delete_tree if presence.isdir(doomed) and not presence.islink(doomed) else os.unlink)(doomed)


def remove_temporary(temporary: str) -> None:
    """Remove a temporary of this process, with its arrays; a later save removes what this cannot."""
    for path in (gda_folder.folder_of(temporary), temporary):
        release(path)
        _remove_leftover(path)


def remove_stale(directory: str, names: Collection[str] | None = None, *, force: bool = False) -> list[str]:
    """Remove the temporaries of dead writers, with ``force`` also those that only time protects; return their names."""
    if names is None:
        with translated(directory):
            names = os.listdir(directory)
    restore_set_aside(directory, names)
    certain, removed = ("dead", "perhaps") if force else ("dead",), list[str]()
    for name, match in [(name, match) for name in names if (match := parse(name))]:
        path = os.path.join(directory, name)
        if writer_of(match, path) in certain and _remove_leftover(path):
            removed.append(name)
    return removed


def _remove_leftover(path: str, *, is_ours: bool = False) -> bool:
    """Remove a temporary that nobody writes, under its lock unless ours; False on failure, which prevents no save."""
    try:
        with temporaries.locked_if_free(path) as is_free:
            if is_free is not False or is_ours:
                sync_directory(os.path.dirname(path))  # a rename may have replaced it that is not on disk
                with suppress(*GONE):  # other writers remove it too
                    gda_folder.settle(path)
                # Its folder goes first: without the file it would count as that of a published one.
                if not presence.isdir(folder := gda_folder.folder_of(path)) or _remove_leftover(folder):
                    delete(path)
                    return True
    except OSError as error:
        _log.warning("Cannot remove %s, which was replaced, or left by an interrupted save: %s", path, error)
    return False


def _set_aside(names: Iterable[str]) -> dict[str, str]:
    """Return which of these names are checkpoints that were set aside → the name that each had."""
    hidden = [name for name in names if name[:1] == "."]  # without a call for each of thousands of steps
    return {name: match["name"] for name in hidden if (match := parse(name)) and match["role"] == "old"}


def remove_set_aside(directory: str, names: Iterable[str], doomed: Collection[str]) -> None:
    """Remove set-aside versions of checkpoints that are removed next; otherwise they would be put back."""
    for name, original in _set_aside(names).items():
        if original in doomed:
            _remove_leftover(os.path.join(directory, name))


def restore_set_aside(directory: str, names: Collection[str]) -> list[str]:
    """Put back checkpoints that a writer set aside before it died; return their names, unless they are in ``names``.

    A writer that only takes its time, between two renames, finds the name taken, fails, and loses nothing."""
    restored = set()
    for name, original in _set_aside(names).items():
        path, final = os.path.join(directory, name), os.path.join(directory, original)
        end = time.monotonic() + _SWAP_SECONDS
        while presence.lexists(path) and not presence.lexists(final) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        with translated(final, "put back, after a save that set it aside ended"), suppress(*GONE):
            if presence.lexists(final) or rename_new(path, final):
                restored.add(original)
    return list(restored.difference(names))
