"""Publish and remove checkpoints atomically on a local file system; only this package renames or deletes.

Nothing appears under a checkpoint's name before it is complete and synced, and nothing under that name is ever half
deleted: replacing is one atomic exchange, and what it replaced is deleted once that is synced.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

from flax_ckpt_compat._core.errors import StorageError, storage_error_of
from flax_ckpt_compat._core.local import gda_folder, presence
from flax_ckpt_compat._core.local.removal import delete as delete
from flax_ckpt_compat._core.local.removal import discard as discard
from flax_ckpt_compat._core.local.removal import remove_temporary as remove_temporary
from flax_ckpt_compat._core.local.syncing import start_writeback as start_writeback
from flax_ckpt_compat._core.local.syncing import sync_directory as sync_directory
from flax_ckpt_compat._core.local.temporaries import (
    ABSENT,
    GONE,
    Use,
    abandon,
    claimed_path,
    is_alive,
    is_taken,
    parse,
    release,
    remove_lock_file,
    writer_of,
)
from flax_ckpt_compat._core.local.temporaries import is_temporary as is_temporary
from flax_ckpt_compat._core.local.temporaries import staging_path as staging_path
from flax_ckpt_compat._core.local.temporaries import temporary_path as temporary_path
from flax_ckpt_compat._core.storage_errors import translated

_TRIES = 3
_SWAP_SECONDS, _SWAP_POLL_SECONDS = 10.0, 0.005
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_log = logging.getLogger("flax_ckpt_compat")


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
    """Remove a stale temporary; return False on failure, which must not prevent a save."""
    try:
        with suppress(*GONE):  # other writers remove it too
            if gda_folder.is_link_marker(os.path.basename(path)):
                gda_folder.recover(path)
            else:
                _delete_replaced(path)
    except OSError as error:
        _log.warning("Cannot remove %s, left by an interrupted save: %s", path, error)
        return False
    return True


def has_live_writer(path: str) -> bool:
    """Return whether a live writer may still publish a checkpoint at ``path``."""
    directory, wanted = os.path.split(path)
    with translated(directory):
        names = os.listdir(directory)
    for name in names:
        match = parse(name)
        # A temporary's name may hold a shortened form of a long name.
        if match and wanted.startswith(match["name"]) and is_alive(match, os.path.join(directory, name)):
            return True
    return False


def restore_set_aside(directory: str, names: Collection[str]) -> list[str]:
    """Put back checkpoints that a writer set aside before it died; return their names, unless they are in ``names``.

    Otherwise a restore would silently start from scratch. Waits for a writer that may be alive, and also returns names
    that appeared since. A writer that takes longer finds the name taken, fails, and loses nothing."""
    restored, hidden = [], [name for name in names if name.startswith(".")]  # few of thousands, and all that count here
    for name in hidden:
        match = parse(name)
        if not match or match["role"] != "old":
            continue
        path, original = os.path.join(directory, name), os.path.join(directory, match["name"])
        if not presence.lexists(original) and is_alive(match, path):
            _wait_for_writer(path, original)
        if presence.lexists(original):
            restored.append(match["name"])
        elif presence.lexists(path):
            try:
                if rename_new(path, original):
                    restored.append(match["name"])
            except GONE:  # another process was faster
                continue
            except OSError as error:
                what = f"{original} was set aside by a save that ended there, and cannot be put back: {error.strerror}"
                message = f"{what}; look again as somebody who may write to {directory}, or name another step"
                raise storage_error_of(message, path=original, errno=error.errno) from error
    return list(set(restored).difference(names))


def _wait_for_writer(aside: str, original: str) -> None:
    """Wait while a checkpoint is set aside and nothing has its name: for milliseconds, unless its writer hangs."""
    end = time.monotonic() + _SWAP_SECONDS
    while presence.lexists(aside) and not presence.lexists(original) and time.monotonic() < end:
        time.sleep(_SWAP_POLL_SECONDS)


def publish(temporary: str, final: str, *, new: bool = False) -> None:
    """Rename a finished temporary to its final path, atomically replacing what is there, and sync the names to disk.

    Folders of arrays beside the two are moved along; see `gda_folder`. With ``new`` nothing but an empty file or
    directory is replaced."""
    with translated(final):
        unlock_directory(temporary)
        move = gda_folder.place_arrays(temporary, final)
        try:
            replaced = _put_in_place(temporary, final, new)
        except BaseException:
            gda_folder.undo(move)
            raise
        if replaced is not None:
            _remove_replaced(replaced, final)
        gda_folder.remove_replaced(move)
        release(temporary)


def unlock_directory(temporary: str) -> None:
    """Remove what only temporaries have from a directory that was written: it is published, or compared, next."""
    if remove_lock_file(temporary):
        sync_directory(temporary)


def _remove_replaced(replaced: str, final: str) -> None:
    """Delete the replaced checkpoint; log a failure, as the new one is in place."""
    try:
        _delete_replaced(replaced)
        sync_directory(os.path.dirname(final))
    except BaseException as error:
        abandon(replaced)
        if not isinstance(error, OSError):  # Ctrl-C
            raise
        _log.warning("%s was saved, but what it replaced cannot be removed from %s: %s", final, replaced, error)


def remove_set_aside(directory: str, names: Iterable[str], doomed: Collection[str]) -> None:
    """Remove set-aside versions of checkpoints that are removed next; otherwise they would be put back."""
    for name in names:
        match = parse(name)
        if match and match["role"] == "old" and match["name"] in doomed:
            _remove_leftover(os.path.join(directory, name))


def _delete_replaced(path: str) -> None:
    """Delete a temporary, a replaced checkpoint by another name: `restore_set_aside` never puts back half of it."""
    match = parse(os.path.basename(path))
    if match is None or match["role"] != "old":
        return delete(path)
    doomed = claimed_path(os.path.join(os.path.dirname(path), match["name"]), now=path)
    use = Use(doomed)
    try:
        os.rename(path, doomed)
    except BaseException:
        release(doomed)
        raise
    release(path)
    delete(doomed)
    del use
    return None


def _put_in_place(temporary: str, final: str, new: bool) -> str | None:
    """Rename and sync; return the path of the replaced checkpoint if it still exists."""
    if new:
        publish_new(temporary, final)
        return None
    replaced = None
    try:
        os.replace(temporary, final)
    except OSError as error:
        # os.replace refuses non-empty directories, and files for directories.
        if not is_taken(error):
            raise
        replaced = temporary if _exchange(temporary, final) else _replace_in_two_steps(temporary, final)
    try:
        sync_directory(os.path.dirname(final))
    except BaseException:
        abandon(replaced or "")  # what was set aside must not be put back once the new one is evicted
        raise
    return replaced


def _replace_in_two_steps(temporary: str, final: str) -> str | None:
    """Replace with two renames; return the path of the old one. After a crash, `restore_set_aside` puts it back."""
    aside = claimed_path(final, "old")
    try:
        try:
            os.rename(final, aside)
        except FileNotFoundError:  # another process evicted it
            release(aside)
            os.rename(temporary, final)
            return None
        os.rename(temporary, final)
    except BaseException:  # Ctrl-C may come after either of them
        abandon(aside)  # the next look-up puts it back, or the next save removes it, if this cannot
        with suppress(OSError):
            rename_new(aside, final)
        raise
    return aside


def rename_new(path: str, final: str) -> bool:
    """Rename and sync without replacing anything but an empty directory; return False if the name is taken."""
    linked = not presence.isdir(path) and not presence.islink(path)
    try:
        # A rename fails if a checkpoint, which is never empty, has the name.
        (os.link if linked else os.rename)(path, final)
    except OSError as error:
        if is_taken(error):
            return False
        if error.errno not in _NO_LINKS:
            raise
        if presence.lexists(final):
            return False
        os.rename(path, final)  # a file system without hard links
        linked = False
    sync_directory(os.path.dirname(final))
    if linked:  # only now: a power loss must not take both names
        os.unlink(path)
    return True


def publish_new(temporary: str, final: str) -> None:
    """Rename a finished temporary to its final name, replacing only an empty file or directory."""
    for _ in range(_TRIES):
        if rename_new(temporary, final):
            return
        _clear(final)
    raise _taken(final)


def _clear(final: str) -> None:
    """Remove an empty file or directory; rename it first, because another process may publish under the name."""
    if not is_empty(final):
        raise _taken(final)
    aside = temporary_path(final)
    try:
        os.rename(final, aside)
    except GONE:
        return
    if not is_empty(aside):
        rename_new(aside, final)
        raise _taken(final)
    if presence.isdir(aside):
        os.rmdir(aside)
    else:
        os.unlink(aside)


def is_empty(path: str) -> bool:
    """Return whether a local path is an empty directory or file; False for links."""
    if presence.islink(path):
        return False
    try:
        if presence.isdir(path):
            return not os.listdir(path)
        return presence.isfile(path) and os.path.getsize(path) == 0
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        return False


def _taken(final: str) -> StorageError:
    message = f"{final}: another process has saved a checkpoint of this name meanwhile, so this one was not saved"
    return StorageError(f"{message}; pass overwrite=True to replace it", path=final, errno=errno.EEXIST)


def _exchange(first: str, second: str) -> bool:
    """Swap two names atomically; return False if the system cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            result = libc.renamex_np(os.fsencode(first), os.fsencode(second), 2)  # RENAME_SWAP
        else:
            at_cwd, rename_exchange = -100, 2
            result = libc.renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), rename_exchange)
    except (AttributeError, OSError):
        return False
    return bool(result == 0)
