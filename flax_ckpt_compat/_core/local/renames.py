"""Rename without replacing, and exchange two names."""

from __future__ import annotations

import errno
import os
import sys

from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.local.syncing import function_of_libc, sync_directory
from flax_ckpt_compat._core.local.temporaries import is_taken

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_AT_CWD, _EXCHANGE, _SWAP = -100, 2, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS


def rename_new(path: str, final: str) -> bool:
    """Rename and sync without replacing anything but an empty directory; return False if the name is taken."""
    linked = not presence.isdir(path) and not presence.islink(path)
    try:
        # A rename fails if a checkpoint, which is never empty, has the name.
        (os.link if linked else os.rename)(path, final)
    except OSError as error:
        if is_taken(error):
            return False
        if error.errno not in _NO_LINKS:
            raise
        if presence.lexists(final):
            return False
        os.rename(path, final)  # a file system without hard links
        linked = False
    sync_directory(os.path.dirname(final))
    if linked:  # only now: a power loss must not take both names
        os.unlink(path)
    return True


def exchange(first: str, second: str) -> bool:
    """Swap two names atomically; return False if the system cannot."""
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        renamex = function_of_libc("renamex_np")
        return renamex is not None and renamex(*names, _SWAP) == 0
    renameat = function_of_libc("renameat2")
    return renameat is not None and renameat(_AT_CWD, names[0], _AT_CWD, names[1], _EXCHANGE) == 0
