"""Bypass the client-side cache of network file systems, which shows others' changes up to a minute late."""

from __future__ import annotations

import os

from flax_ckpt_compat._core.local import writer_locks
from flax_ckpt_compat._core.local.temporaries import storage_time


def is_shared(directory: str) -> bool:
    """Return whether other machines may change a directory; also if the type of its file system is unknown."""
    try:
        return not writer_locks.is_of_this_machine(directory)
    except OSError:
        return True


def refresh(directory: str) -> bool:
    """Refresh the listing of a shared directory; return False if it is not shared or not writable.

    Clients of NFS and SFTP drop their cache of a directory when they change it themselves (sshfs: measured)."""
    if not is_shared(directory) or not os.access(directory, os.W_OK):
        return False
    storage_time(directory)
    return True
