"""Delete directory trees, also when Ctrl-C comes in the middle.

`shutil.rmtree` of Python 3.11 and 3.12 closes a descriptor a second time if it is interrupted right after the first:
that raises an error in place of the interrupt, or closes what another thread has opened meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

STILL_OPEN = (".nfs", ".fuse_hidden")  # of NFS and of FUSE: sshfs, s3fs, ntfs-3g, …
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # a link in place of a folder is not followed
_IN_USE = (errno.EBUSY, errno.ENOTEMPTY)


def delete_tree(path: str) -> None:
    """Delete a directory and all that is in it; raise OSError at what cannot be deleted.

    What another process deletes meanwhile is no error. NFS and FUSE rename what is open to ``.nfs...`` and
    ``.fuse_hidden...`` until it is closed, so that its directory stays, which is none either.
    """
    in_use: list[OSError] = []
    _delete_folder(path, path, None, in_use)
    if in_use and not all(name.startswith(STILL_OPEN) for _, _, names in os.walk(path) for name in names):
        raise in_use[0]


def _delete_folder(name: str, path: str, parent: int | None, in_use: list[OSError]) -> None:
    with _named(path, in_use):
        folder = os.open(name, _FOLDER, dir_fd=parent)
        try:
            with os.scandir(folder) as found:
                entries = list(found)
            for entry in entries:
                inside = os.path.join(path, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    _delete_folder(entry.name, inside, folder, in_use)
                else:
                    with _named(inside, in_use):
                        os.unlink(entry.name, dir_fd=folder)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=parent)


@contextmanager
def _named(path: str, in_use: list[OSError]) -> Iterator[None]:
    """Give errors their path; collect those of what is in use, and drop those of what is gone."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        if not str(error.filename).startswith(path):  # as those of what is inside do
            error.filename = path
        if error.errno not in _IN_USE:
            raise
        in_use.append(error)
