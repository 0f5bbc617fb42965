"""Look past what this machine remembers of a network file system: it sees others' changes up to a minute late."""

from __future__ import annotations

import functools
import os

from flax_ckpt_compat._core.local.temporaries import storage_time

# Types of file systems that no other machine changes; ``fuseblk`` is for disks, such as those of Windows.
_OF_THIS_MACHINE = frozenset([
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "vfat", "exfat", "ntfs3",
    "fuseblk", "tmpfs", "ramfs", "devtmpfs", "rootfs", "overlay", "squashfs", "erofs", "iso9660",
])  # fmt: skip


def is_shared(directory: str) -> bool:
    """Return whether other machines may change a directory; also if the type of its file system is unknown."""
    try:
        return not _types_of(os.stat(directory).st_dev) <= _OF_THIS_MACHINE
    except OSError:
        return True


@functools.lru_cache(maxsize=64)
def _types_of(device: int) -> frozenset[str]:
    """Return the types of file system that are mounted from a device; an unknown one if there are none."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        rows = [row.split() for row in table]
    number = f"{os.major(device)}:{os.minor(device)}"
    return frozenset(row[row.index("-") + 1] for row in rows if row[2] == number) or frozenset([""])


def refresh(directory: str) -> bool:
    """Make this machine list a shared directory anew; return False if it is not shared, or may not be written to.

    Clients of NFS and SFTP forget what they remember of a directory that they change themselves (sshfs: measured)."""
    if not is_shared(directory) or not os.access(directory, os.W_OK):
        return False
    storage_time(directory)
    return True
