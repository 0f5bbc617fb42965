"""Temporaries, atomic publishing and removal on a local file system; the only place that renames or deletes.

Nothing appears under a checkpoint's name before it is complete and synced, and nothing that has a
checkpoint's name is ever half deleted: replacing is one atomic exchange, deleting starts with a rename.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flax_ckpt_compat._core import processes
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX, ORBAX_TEMPORARY

_log = logging.getLogger("flax_ckpt_compat")
_STAGED = ".staged"
# Real Flax skips names that end in ``_gda``, real Orbax those that contain its suffix; the leading dot keeps
# them out of users' own ``checkpoint_*`` globs. machine-pid-start tell whether the writer is still alive.
_TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d+)-(?P<count>\d+)(?P<role>new|old)"
    rf"(?:{re.escape(ORBAX_TEMPORARY)}|{re.escape(_STAGED)})(?:{re.escape(ORBAX_TEMPORARY)}|{re.escape(ARRAYS_POSTFIX)})*",
    re.DOTALL,
)
# Seconds without a change before another machine's writer counts as dead. A checkpoint that was set aside is
# missing from its place for as long, so it is put back sooner: a writer that still lives then fails, aloud.
_PATIENCE = {"new": 24 * 3600.0, "old": 3600.0}
_GONE = (FileNotFoundError, NotADirectoryError)
_MAX_NAME = 255
_counter = itertools.count()


def temporary_path(path: str, role: str = "new") -> str:
    """A path beside ``path`` for this writer alone; `reclaim` knows it by its name."""
    directory, name = os.path.split(path)
    tag = f".{processes.machine()}-{os.getpid()}-{processes.start_of(os.getpid())}-{next(_counter)}{role}"
    tail = tag + ORBAX_TEMPORARY + ARRAYS_POSTFIX
    encoded, room = os.fsencode(name), _MAX_NAME - len(tail) - 1
    if len(encoded) > room and role == "old":  # its whole name is needed to put it back
        raise StorageError(f"{path}: the name is too long to be set aside", path=path, errno=errno.ENAMETOOLONG)
    shown = name if len(encoded) <= room else encoded[:room].decode("utf-8", "ignore")
    return os.path.join(directory, f".{shown}{tail}")


def staging_path(path: str) -> str:
    """Like `temporary_path`, for writers that refuse Orbax's temporary suffix in the names they are given."""
    return temporary_path(path).replace(ORBAX_TEMPORARY + ARRAYS_POSTFIX, _STAGED + ARRAYS_POSTFIX)


def is_temporary(name: str) -> bool:
    """True for names made by `temporary_path`, in any process."""
    return _TEMPORARY.fullmatch(name) is not None


def reclaim(directory: str) -> list[str]:
    """Removes what dead writers left behind, after `recover`, and returns the names; a live writer's files stay."""
    removed = []
    with translated(directory):
        names = os.listdir(directory)
    recover(directory, names)
    for name in names:
        path = os.path.join(directory, name)
        match = _TEMPORARY.fullmatch(name)
        if match and os.path.lexists(path) and not _is_alive(match, path) and _remove_leftover(path):
            removed.append(name)
    return removed


def _remove_leftover(path: str) -> bool:
    """Removes it; False where it cannot be, which is no reason to refuse a save."""
    try:
        with suppress(*_GONE):  # other writers reclaim too
            _delete(path)
    except OSError as error:
        _log.warning("Cannot remove %s, which an interrupted save left behind: %s", path, error)
        return False
    return True


def recover(directory: str, names: Iterable[str]) -> list[str]:
    """Puts back checkpoints that a writer set aside and then died before it replaced them; returns their names."""
    recovered = []
    for name in names:
        match = _TEMPORARY.fullmatch(name)
        if not match or match["role"] != "old":
            continue
        path, original = os.path.join(directory, name), os.path.join(directory, match["name"])
        if not os.path.lexists(original) and os.path.lexists(path) and not _is_alive(match, path):
            with translated(path):
                if _rename_new(path, original):
                    recovered.append(match["name"])
    return recovered


def _rename_new(path: str, original: str) -> bool:
    """Renames without replacing anything; False where another process was faster."""
    try:
        if os.path.isdir(path) or os.path.islink(path):
            os.rename(path, original)  # onto a checkpoint, which is not empty, this fails
        else:
            os.link(path, original)
            os.unlink(path)
    except _GONE:
        return False
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        os.rename(path, original)  # a file system without hard links
    return True


def publish(temporary: str, final: str) -> None:
    """Gives the finished temporary its final name, atomically, replacing what has that name; synced to disk."""
    directory = os.path.dirname(final)
    with translated(final):
        try:
            os.replace(temporary, final)
        except OSError as error:
            # What the system does not replace in one step: directories that hold something, files by directories.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                raise
            replaced = temporary if _exchange(temporary, final) else _replace_in_two_steps(temporary, final)
            sync_directory(directory)
            if replaced is not None:
                _delete(replaced)
        sync_directory(directory)


def _replace_in_two_steps(temporary: str, final: str) -> str | None:
    """Replaces where the system cannot exchange names, and returns where the old one is; `recover` mends a crash."""
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


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Asks the kernel to begin writing a range of a file to disk, without waiting; only a hint, errors mean nothing."""
    function = _sync_file_range()
    if function is not None and length:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), 2)  # SYNC_FILE_RANGE_WRITE


@functools.cache
def _sync_file_range() -> Any:
    try:
        return ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable."""
    try:
        descriptor = os.open(path or ".", os.O_RDONLY)
    except PermissionError:  # one may write into a directory that one may not read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot sync directories
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


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


def _is_alive(match: re.Match[str], path: str) -> bool:
    if match["machine"] == processes.machine():
        return processes.start_of(int(match["pid"])) == int(match["start"])
    return time.time() - _last_change(path) < _PATIENCE[match["role"]]


def _last_change(path: str) -> float:
    """Newest change of anything in it, its own renaming included; 0.0 where it vanishes meanwhile."""
    newest = 0.0
    with suppress(*_GONE):
        newest = os.lstat(path).st_ctime
        for folder, _, files in os.walk(path):
            for entry in (folder, *(os.path.join(folder, file) for file in files)):
                newest = max(newest, os.lstat(entry).st_mtime)
    return newest


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
