"""Publish checkpoints atomically on a local file system; only this package renames or deletes.

Nothing appears under a checkpoint's name before it is complete and synced, and nothing under that name is ever half
deleted: replacing is one atomic exchange, and what it replaced is deleted once that is synced.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import gda_folder, presence
from flax_ckpt_compat._core.local.removal import delete_replaced
from flax_ckpt_compat._core.local.syncing import exchange, rename_new, sync_directory
from flax_ckpt_compat._core.local.temporaries import ABSENT, GONE, hold, is_taken, release, temporary_path
from flax_ckpt_compat._core.storage_errors import translated

_TRIES = 3
_log = logging.getLogger("flax_ckpt_compat")


def publish(temporary: str, final: str, *, new: bool = False) -> None:
    """Rename a finished temporary to its final path, atomically replacing what is there, and sync the names to disk.

    Folders of arrays beside the two are moved along; see `gda_folder`. With ``new`` nothing but an empty file or
    directory is replaced."""
    with translated(final):
        arrays = gda_folder.Move(temporary, final)
        try:
            arrays.place()
            replaced = _put_in_place(temporary, final, new)
        except BaseException:
            arrays.undo()
            raise
        release(temporary)
        if replaced is not None:
            _remove_replaced(replaced, final)
        arrays.remove_replaced()


def _remove_replaced(replaced: str, final: str) -> None:
    """Delete the replaced checkpoint; log a failure, as the new one is in place."""
    try:
        with suppress(*GONE):  # a save that began since takes it for a leftover
            delete_replaced(replaced)
        sync_directory(os.path.dirname(final))
    except OSError as error:
        _log.warning("%s was saved, but what it replaced cannot be removed from %s: %s", final, replaced, error)
    finally:
        release(replaced)


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
        replaced = temporary if exchange(temporary, final) else _replace_in_two_steps(temporary, final)
    try:
        sync_directory(os.path.dirname(final))
    except BaseException:
        release(replaced or "")  # what was set aside must not be put back once the new one is evicted
        raise
    return replaced


def _replace_in_two_steps(temporary: str, final: str) -> str | None:
    """Replace with two renames; return the path of the old one. After a crash, `restore_set_aside` puts it back."""
    aside = temporary_path(final, "old")
    try:
        while not hold(final, aside):
            if not presence.lexists(final):  # another process evicted it
                os.rename(temporary, final)
                return None
        os.rename(final, aside)
        os.rename(temporary, final)
    except BaseException:  # Ctrl-C may come after either of them
        with suppress(OSError):
            rename_new(aside, final)
        release(aside)  # the next look-up puts it back, or the next save removes it, if this cannot
        raise
    return aside


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
    with suppress(*GONE):
        (os.rmdir if presence.isdir(aside) else os.unlink)(aside)


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
