"""Create directories of checkpoints durably, and list what is below them."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.local.syncing import sync_directory
from flax_ckpt_compat._core.storage_errors import translated


def make_directory(path: str) -> None:
    """Create a directory and its parents, and sync the new names."""
    with translated(path):
        missing = []
        head = path
        while head and not presence.isdir(head):
            if (dangling := dangling_link(head)) is not None:
                raise StorageError(dangling, path=head, errno=errno.ENOENT)
            if presence.isfile(head):
                message = f"{head} is a file; a directory was expected"
                raise StorageError(message, path=head, errno=errno.ENOTDIR)
            missing.append(head)
            head = os.path.dirname(head)
        for new in reversed(missing):  # os.makedirs calls itself for each
            with suppress(FileExistsError):
                os.mkdir(new)
        os.makedirs(path, exist_ok=True)
        for new in missing:
            sync_directory(os.path.dirname(new))


def dangling_link(path: str) -> str | None:
    """Return where a local link leads if nothing is there, with a remedy; None for all else."""
    if not presence.islink(path) or presence.exists(path):
        return None
    return f"{path} is a link to {os.readlink(path)}, which does not exist: mount or make that, or remove the link"


def files_below(directory: str) -> list[str]:
    """Return the paths of all files below a local directory, relative to it."""
    return [
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, files in os.walk(directory)
        for name in files
    ]
