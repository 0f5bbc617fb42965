"""Remove checkpoints and temporaries, so that no crash and no power loss brings back a part of one.

Nothing is deleted under a checkpoint's name: a directory is renamed, the names are synced, and then its contents go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import gda_folder, presence
from flax_ckpt_compat._core.local.syncing import delete_tree, sync_directory, write_file
from flax_ckpt_compat._core.local.temporaries import GONE, Use, abandon, claimed_path, release
from flax_ckpt_compat._core.local.writer_locks import lock_in_time
from flax_ckpt_compat._core.orbax_layout import TEMPORARY
from flax_ckpt_compat._core.storage_errors import storage_error, translated

_TRIES = 3
_DOOMED = "removed" + TEMPORARY
_LOCK_SECONDS = 5.0


class _Call:
    """A call of `locked`: once nothing holds it, Ctrl-C has ended it, whatever it has still open."""


_calls: list[tuple[weakref.ref[_Call], list[int]]] = []  # with their descriptors


@contextmanager
def locked(directory: str) -> Iterator[None]:
    """Keep out other processes that do this, where the file system has locks; for a while, as one may be stopped."""
    for ended in [one for one in _calls if one[0]() is None]:
        _close(ended[1])
        with suppress(ValueError):  # another thread did
            _calls.remove(ended)
    call, descriptors = _Call(), list[int]()
    _calls.append((weakref.ref(call), descriptors))
    try:
        with suppress(OSError):
            # In one step, between whose halves no Ctrl-C comes.
            descriptors.extend(map(os.open, [directory], [os.O_RDONLY | os.O_CLOEXEC]))
            lock_in_time(descriptors[0], fcntl.LOCK_EX, _LOCK_SECONDS)
        yield
    finally:
        _close(descriptors)


def _close(descriptors: list[int]) -> None:
    """Unlock and close descriptors, each of which is in the list until it is closed."""
    for descriptor in descriptors:
        with suppress(OSError):  # a fork of this process may have the descriptor, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    while descriptors:
        with suppress(OSError):
            list(map(os.close, map(list.pop, [descriptors])))  # in one step


def discard(paths: Iterable[str]) -> dict[str, StorageError]:
    """Delete files and directories durably, with one sync of their directory; return path → failure.

    What another process deletes meanwhile is not a failure."""
    assert not isinstance(paths, str)  # its characters would be paths
    failures: dict[str, StorageError] = {}
    hidden: dict[str, str | None] = {}
    uses: list[Use] = []
    try:
        for path in paths:
            try:
                hidden[path] = _hide(path, uses)
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
                    abandon(hidden.pop(path) or "")
    except BaseException:
        for aside in hidden.values():
            abandon(aside or "")
        raise
    for path, aside in hidden.items():
        try:
            if aside == path:
                _delete_in_place(path)
            elif aside is not None:
                delete(aside)
        except StorageError as error:
            failures[path] = error
    return failures


def _hide(path: str, uses: list[Use]) -> str | None:
    """Rename a directory and return its new path, whose use is added to ``uses``; delete anything else.

    On overlayfs, directories of lower layers, such as those of a container's image, cannot be renamed: they get a mark
    that makes them incomplete for all readers of ours, and keep their path."""
    if presence.islink(path) or not presence.isdir(path):
        os.unlink(path)
        return None
    _refuse_if_contents_stay(path)
    aside = claimed_path(path)
    uses.append(Use(aside))
    try:
        os.rename(path, aside)
    except OSError as error:
        release(aside)
        if error.errno != errno.EXDEV:
            raise
        write_file(os.path.join(path, _DOOMED), b"", new=False)
        sync_directory(path)
        return path
    return aside


def _refuse_if_contents_stay(path: str) -> None:
    """Raise PermissionError if a folder in a directory is another user's and may not be emptied by this one.

    In a shared directory it could be renamed all the same, and would take space under a hidden name."""
    for folder, folders, files in os.walk(path):
        effective = os.access in os.supports_effective_ids
        if (folders or files) and not os.access(folder, os.W_OK | os.X_OK, effective_ids=effective):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)


def _delete_in_place(path: str) -> None:
    """Delete a directory that `_hide` marked: the mark goes last."""
    with translated(path), suppress(*GONE):
        for name in os.listdir(path):
            if name != _DOOMED:
                delete(os.path.join(path, name))
        sync_directory(path)
        delete(path)


def delete(path: str) -> None:
    """Delete a file or directory whose name counts for nothing, such as a temporary; or let the next save do it."""
    is_gone = False
    try:
        with translated(path), suppress(*GONE):
            if presence.isdir(path) and not presence.islink(path):
                delete_tree(path)
            else:
                os.unlink(path)
        is_gone = not presence.lexists(path)
    finally:
        (release if is_gone else abandon)(path)


def remove_temporary(temporary: str) -> None:
    """Remove what a failed save wrote, with its arrays; a later save removes what this cannot."""
    abandon(temporary)
    for path in (temporary, gda_folder.folder_of(temporary)):
        for _ in range(_TRIES):  # late processes of the same save may remove it at the same time
            with suppress(StorageError, OSError):
                if presence.lexists(path):
                    # If the save failed while it was published, this may be what it replaced.
                    sync_directory(os.path.dirname(path))
                    delete(path)
