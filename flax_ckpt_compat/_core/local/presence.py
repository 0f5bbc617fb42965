"""Look up local paths; raise StorageError if stat fails for any reason but absence, where `os.path` returns False.

A path that is wrongly reported as absent would be replaced, removed as a leftover, or left out of a save.
"""

from __future__ import annotations

import errno
import os
import stat

from flax_ckpt_compat._core.storage_errors import storage_error

# Nothing is there, or the file system does not accept the name. ESTALE is not among them: Linux looks a stale name up
# again, so that what is stale then is the mount, or the directory that the name is in.
CANNOT_BE_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}


def mode(path: str, *, follow: bool = True) -> int:
    """Return the mode of what is there, 0 if nothing is; of the link itself unless links are followed."""
    try:
        return (os.stat if follow else os.lstat)(path).st_mode
    except ValueError:  # a NUL in the path
        return 0
    except OSError as error:
        if error.errno not in CANNOT_BE_THERE:
            raise storage_error(path, error, "found") from error
        return 0


def isdir(path: str) -> bool:
    """Return whether a path is, or leads to, a directory."""
    return stat.S_ISDIR(mode(path))


def isfile(path: str) -> bool:
    """Return whether a path is, or leads to, a regular file."""
    return stat.S_ISREG(mode(path))


def exists(path: str) -> bool:
    """Return whether something is there, with links followed."""
    return mode(path) != 0


def lexists(path: str) -> bool:
    """Return whether something is there, be it a link that leads nowhere."""
    return mode(path, follow=False) != 0


def islink(path: str) -> bool:
    """Return whether a path is a link."""
    return stat.S_ISLNK(mode(path, follow=False))


def dangling_link(path: str) -> str | None:
    """Return where a local link leads if nothing is there, with a remedy; None for all else."""
    if not islink(path) or exists(path):
        return None
    return f"{path} is a link to {os.readlink(path)}, which does not exist: mount or make that, or remove the link"


def files_below(directory: str) -> list[str]:
    """Return the paths of all files below a local directory, relative to it."""
    return [
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, files in os.walk(directory)
        for name in files
    ]
