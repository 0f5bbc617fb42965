"""Atomic publishing and removal on a local file system; this and `arrays` are the only places that rename or delete.

Nothing appears under a checkpoint's name before it is complete and synced, and nothing that has a
checkpoint's name is ever half deleted: replacing is one atomic exchange, deleting starts with a rename.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import gda_folder
from flax_ckpt_compat._core.local.no_replace import put_new, rename_new
from flax_ckpt_compat._core.local.syncing import start_writeback as start_writeback
from flax_ckpt_compat._core.local.syncing import sync_directory as sync_directory
from flax_ckpt_compat._core.local.temporaries import GONE, abandon, is_alive, parse
from flax_ckpt_compat._core.local.temporaries import is_temporary as is_temporary
from flax_ckpt_compat._core.local.temporaries import staging_path as staging_path
from flax_ckpt_compat._core.local.temporaries import temporary_path as temporary_path

_TRIES = 3
_log = logging.getLogger("flax_ckpt_compat")


def remove_stale(directory: str) -> list[str]:
    """Remove what dead writers left, after `restore_set_aside`, and return the names; a live writer's files stay."""
    removed = []
    with translated(directory):
        names = os.listdir(directory)
    restore_set_aside(directory, names)
    for name in names:
        path = os.path.join(directory, name)
        match = parse(name)
        if match and os.path.lexists(path) and not is_alive(match, path) and _remove_leftover(path):
            removed.append(name)
    return removed


def _remove_leftover(path: str) -> bool:
    """Removes it; False where it cannot be, which is no reason to refuse a save."""
    try:
        with suppress(*GONE):  # other writers reclaim too
            if gda_folder.is_witness(os.path.basename(path)):
                gda_folder.finish(path)
            else:
                _delete(path)
    except OSError as error:
        _log.warning("Cannot remove %s, which an interrupted save left behind: %s", path, error)
        return False
    return True


def has_live_writer(path: str) -> bool:
    """True while a live writer may be about to publish a checkpoint at ``path``."""
    directory, wanted = os.path.split(path)
    with translated(directory):
        names = os.listdir(directory)
    for name in names:
        match = parse(name)
        # Names that are too long are cut short in those of temporaries.
        if match and wanted.startswith(match["name"]) and is_alive(match, os.path.join(directory, name)):
            return True
    return False


def restore_set_aside(directory: str, names: Iterable[str]) -> list[str]:
    """Puts back checkpoints that a writer set aside and then died before it replaced them; returns their names."""
    recovered = []
    for name in names:
        match = parse(name)
        if not match or match["role"] != "old":
            continue
        path, original = os.path.join(directory, name), os.path.join(directory, match["name"])
        if not os.path.lexists(original) and os.path.lexists(path) and not is_alive(match, path):
            with translated(path), suppress(*GONE):  # another process was faster
                if rename_new(path, original):
                    recovered.append(match["name"])
    return recovered


def publish(temporary: str, final: str, *, new: bool = False) -> None:
    """Give the finished temporary its final name, atomically, replacing what has that name; synced to disk.

    A folder of arrays beside either of them is seen to as well; see `arrays`.

    Args:
        temporary: of `temporary_path`.
        final: the name.
        new: replace nothing but what is void.

    Raises:
        StorageError: the file system refused, or with ``new`` another checkpoint has the name.
    """
    with translated(final):
        move = gda_folder.move_in(temporary, final)
        try:
            replaced = _put_in_place(temporary, final, new)
        except BaseException:
            gda_folder.undo(move)
            raise
        sync_directory(os.path.dirname(final))
        if replaced is not None:
            _remove_replaced(replaced, final)
        gda_folder.remove_replaced(move)


def _remove_replaced(replaced: str, final: str) -> None:
    """Delete what had the name before; a failure is only logged, because the new checkpoint is in its place."""
    try:
        _delete(replaced)
        sync_directory(os.path.dirname(final))
    except OSError as error:
        _log.warning("%s was saved, but what it replaced cannot be removed from %s: %s", final, replaced, error)


def _put_in_place(temporary: str, final: str, new: bool) -> str | None:
    """Rename, and return where that which had the name is now, if anything is left of it."""
    if new:
        put_new(temporary, final)
        return None
    try:
        os.replace(temporary, final)
    except OSError as error:
        # What the system does not replace in one step: directories that hold something, files by directories.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise
        return temporary if _exchange(temporary, final) else _replace_in_two_steps(temporary, final)
    return None


def _replace_in_two_steps(temporary: str, final: str) -> str | None:
    """Replace without an exchange of names; return the path of the old one. `restore_set_aside` mends a crash."""
    aside = temporary_path(final, "old")
    try:
        os.rename(final, aside)
    except FileNotFoundError:  # another process has just evicted it
        os.rename(temporary, final)
        return None
    try:
        os.rename(temporary, final)
    except BaseException:
        os.rename(aside, final)
        raise
    return aside


def discard(path: str) -> None:
    """Deletes a file or directory so that a crash in the middle leaves no half checkpoint under its name."""
    with translated(path):
        if os.path.isdir(path) and not os.path.islink(path) and not is_temporary(os.path.basename(path)):
            doomed = temporary_path(path)
            os.rename(path, doomed)
            path = doomed
        _delete(path)


def remove_temporary(temporary: str) -> None:
    """Removes what a failed save wrote, its arrays too; what cannot be removed now is reclaimed later."""
    abandon(temporary)
    for path in (temporary, gda_folder.folder_of(temporary)):
        for _ in range(_TRIES):  # late processes of the same save may remove it at the same time
            with suppress(StorageError, OSError):
                if os.path.lexists(path):
                    discard(path)


def make_directory(path: str) -> None:
    """Creates a directory and its parents, and syncs the names of those that are new.

    Raises:
        StorageError: it, or one of its parents, is a file; or the file system refused.
    """
    with translated(path):
        missing = []
        head = path
        while head and not os.path.isdir(head):
            if os.path.isfile(head):
                message = f"{head} is a file; a directory was expected"
                raise StorageError(message, path=head, errno=errno.ENOTDIR)
            missing.append(head)
            head = os.path.dirname(head)
        os.makedirs(path, exist_ok=True)
        for new in missing:
            sync_directory(os.path.dirname(new))


@contextmanager
def translated(path: str) -> Iterator[None]:
    """The one seam at which OSError turns into StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{path}: {reason}", path=path, errno=error.errno) from error


def _delete(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _exchange(first: str, second: str) -> bool:
    """Swaps two names in one atomic step; False where the system cannot (then the caller renames twice)."""
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
