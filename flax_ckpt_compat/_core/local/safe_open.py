"""Open only regular files, and only those of the checkpoint; never as a standard stream of the program.

A pipe would block the reader for ever, also inside TensorStore, and a link may lead to any file of the user. Where a
program runs with a closed stderr (``2>&-``, some daemons), the next file that is opened gets the descriptor 2, and what
native libraries log is written into it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress

from flax_ckpt_compat._core.errors import CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.storage_errors import storage_error

# In the cache of Hugging Face's hub, each file of a download is a link to ``blobs`` beside ``snapshots``.
_SNAPSHOT = re.compile(r"(.*/(?:models|datasets|spaces)--[^/]*)/snapshots/[^/]+(?:/.*)?", re.DOTALL)
_STANDARD = (0, 1, 2)
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
# Returns whether the user trusts links out of a checkpoint; `flax_ckpt_compat.config` puts its setting here.
follows_links: Callable[[], bool] = bool  # which is False


def open_regular(path: str) -> int:
    """Open a regular file for reading and return its descriptor; raise OSError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise StorageError(f"{path}: expected a regular file, found {_kind(mode)}", path=path, errno=errno.EINVAL)


def stays_inside(relative: str) -> bool:
    """Return whether a relative path stays below its directory, as far as names tell."""
    return not (relative.startswith("/") or "\0" in relative or ".." in relative.split("/"))


class ContainedFiles:
    """The files of one local checkpoint's directory, which may itself be a link; caches what was checked."""

    def __init__(self, path: str):
        self._path = path
        root = os.path.realpath(path)
        snapshot = _SNAPSHOT.fullmatch(root)
        self._roots = [root, *([os.path.realpath(f"{snapshot[1]}/blobs")] if snapshot else [])]
        self._folders: set[str] = set()
        self._follows_links = follows_links()

    def check(self, relative: str) -> int | None:
        """Return the size of a regular file, with links followed; None for a directory and if nothing is there.

        Raise CorruptCheckpointError if it is something else, and StorageError for a link that leads out of the
        checkpoint's directory, unless the setting ``links`` is "follow"."""
        file = f"{self._path}/{relative}"
        try:
            self._check_folders(relative)
            status = os.lstat(file)
            if stat.S_ISLNK(status.st_mode):
                self._check_target(relative, file)
                status = os.stat(file)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                raise self._tampered(relative, f"cannot be a file's path ({error.strerror})") from error
            raise storage_error(file, error, "read") from error
        if stat.S_ISREG(status.st_mode):
            return status.st_size
        if not stat.S_ISDIR(status.st_mode):
            raise self._tampered(relative, f"is {_kind(status.st_mode)}, where a regular file was expected")
        return None

    def check_folder(self, folder: str) -> dict[str, int]:
        """Check all files directly in a directory, and return their sizes by name."""
        names = os.listdir(os.path.join(self._path, folder))
        sizes = {name: self.check(f"{folder}/{name}" if folder else name) for name in names}
        return {name: size for name, size in sizes.items() if size is not None}

    def _check_folders(self, relative: str) -> None:
        folder = relative.rpartition("/")[0]
        if folder and folder not in self._folders:
            self._check_folders(folder)
            full = f"{self._path}/{folder}"
            if stat.S_ISLNK(os.lstat(full).st_mode):
                self._check_target(folder, full)
            self._folders.add(folder)

    def _check_target(self, relative: str, path: str) -> None:
        real = os.path.realpath(path)
        is_inside = any(real == root or real.startswith(root.rstrip("/") + "/") for root in self._roots)
        if not is_inside and not self._follows_links:
            raise StorageError(
                f"{self._path}: its file {relative!r:.300} is a link to {real}, outside its directory, and is not "
                "followed. If you trust it, copy it with the files that its links lead to (cp -rL) and restore that, "
                "or follow the links: flax_ckpt_compat.config.update(links='follow')",
                path=self._path,
            )

    def _tampered(self, relative: str, what: str) -> CorruptCheckpointError:
        shown = relative if len(relative) <= 300 else f"{relative[:300]}…"
        return CorruptCheckpointError(f"{self._path}: its file {shown!r} {what}", path=self._path)


def _kind(mode: int) -> str:
    return {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}.get(stat.S_IFMT(mode), "a device")


def occupy_standard_streams() -> None:
    """Open the null device for the descriptors 0, 1 and 2 where they are closed."""
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):  # there may be no null device, as in a changed root
                opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
                if opened not in _STANDARD:  # another thread was faster
                    os.close(opened)
