"""Look up local paths, and open only regular files; raise StorageError if stat fails for any reason but absence.

`os.path` returns False then: a path that is wrongly reported as absent would be replaced, removed as a leftover, or
left out of a save. A pipe would block its reader for ever, and a link may lead to any file of the user.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress

from flax_ckpt_compat._core.errors import CorruptCheckpointError, StorageError, translated

# Nothing is there, or the file system does not accept the name. ESTALE is not among them: Linux looks a stale name up
# again, so that what is stale then is the mount, or the directory that the name is in.
CANNOT_BE_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}
# In the cache of Hugging Face's hub, each file of a download is a link to ``blobs`` beside ``snapshots``.
_SNAPSHOT = re.compile(r"(.*/(?:models|datasets|spaces)--[^/]*)/snapshots/[^/]+(?:/.*)?", re.DOTALL)
_LAST_STANDARD = 2  # stderr
# Returns whether the user trusts links out of a checkpoint; `flax_ckpt_compat.config` puts its setting here.
follows_links: Callable[[], bool] = bool  # which is False


def mode(path: str, *, follow: bool = True) -> int:
    """Return the mode of what is there, 0 if nothing is; of the link itself unless links are followed."""
    with translated(path, "found"):
        try:
            return (os.stat if follow else os.lstat)(path).st_mode
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            if getattr(error, "errno", errno.ENOENT) not in CANNOT_BE_THERE:
                raise
            return 0


def isdir(path: str) -> bool:
    """Return whether a path is, or leads to, a directory."""
    return stat.S_ISDIR(mode(path))


def isfile(path: str) -> bool:
    """Return whether a path is, or leads to, a regular file."""
    return stat.S_ISREG(mode(path))


def lexists(path: str) -> bool:
    """Return whether something is there, be it a link that leads nowhere."""
    return mode(path, follow=False) != 0


def islink(path: str) -> bool:
    """Return whether a path is a link."""
    return stat.S_ISLNK(mode(path, follow=False))


def dangling_link(path: str) -> str | None:
    """Return where a local link leads if nothing is there, with a remedy; None for all else."""
    if not islink(path) or mode(path):
        return None
    return f"{path} is a link to {os.readlink(path)}, which does not exist: mount or make that, or remove the link"


def open_regular(path: str) -> int:
    """Open a regular file for reading and return its descriptor; raise OSError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise StorageError(f"{path} is a pipe, a socket or a device, no regular file", path=path, errno=errno.EINVAL)


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
        self._folders = {""}
        self._follows_links = follows_links()

    def check(self, relative: str) -> int | None:
        """Return the size of a regular file; None for a directory and if nothing is there; raise for anything else.

        A link out of the checkpoint's directory is followed only with the setting ``links="follow"``."""
        path, folder = f"{self._path}/{relative}", relative.rpartition("/")[0]
        wrong = f"{self._path}: its file {relative!r:.300}"
        try:
            if folder not in self._folders:
                self._check_target(folder)
                self._folders.add(folder)
            kind = os.lstat(path)
            if stat.S_ISLNK(kind.st_mode):
                self._check_target(relative)
                kind = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno not in CANNOT_BE_THERE:
                with translated(path, "read"):
                    raise
            message = f"{wrong} cannot be a file's path ({error.strerror})"
            raise CorruptCheckpointError(message, path=self._path) from error
        if not stat.S_ISREG(kind.st_mode) and not stat.S_ISDIR(kind.st_mode):
            raise CorruptCheckpointError(f"{wrong} is a pipe, a socket or a device", path=self._path)
        return kind.st_size if stat.S_ISREG(kind.st_mode) else None

    def check_folder(self, folder: str) -> dict[str, int]:
        """Check all files directly in a directory, and return their sizes by name."""
        names = os.listdir(os.path.join(self._path, folder))
        sizes = {name: self.check(f"{folder}/{name}" if folder else name) for name in names}
        return {name: size for name, size in sizes.items() if size is not None}

    def _check_target(self, relative: str) -> None:
        real = os.path.realpath(f"{self._path}/{relative}")
        is_inside = any(real == root or real.startswith(root.rstrip("/") + "/") for root in self._roots)
        if not is_inside and not self._follows_links:
            raise StorageError(
                f"{self._path}: its file {relative!r:.300} is a link to {real}, outside its directory, and is not "
                "followed. If you trust it, copy it with the files that its links lead to (cp -rL) and restore that, "
                "or follow the links: flax_ckpt_compat.config.update(links='follow')",
                path=self._path,
            )


def occupy_standard_streams() -> None:
    """Open the null device for closed standard streams: native libraries would log into the file that gets one."""
    with suppress(OSError):  # there may be no null device, as in a changed root
        while (opened := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
            pass
        os.close(opened)
