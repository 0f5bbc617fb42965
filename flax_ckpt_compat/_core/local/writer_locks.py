"""Tell live writers from dead ones by locks on temporaries, which the kernel releases when their holder dies.

Names of hosts and numbers of processes tell nothing across containers; a lock holds in all containers of one kernel.
It is taken before the first byte is written, so that only an empty temporary may be one whose lock is yet to come.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import stat
import time
from contextlib import suppress

# Types of file systems that no other machine changes; ``fuseblk`` is for disks, such as those of Windows.
_OF_THIS_MACHINE = frozenset([
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "vfat", "exfat", "ntfs3",
    "fuseblk", "tmpfs", "ramfs", "devtmpfs", "rootfs", "overlay", "squashfs", "erofs", "iso9660",
])  # fmt: skip
# Their servers keep the locks of files, unless mounted otherwise; those of directories stay in one machine.
_NFS, _SERVER_LOCKS = frozenset(["nfs", "nfs4"]), "local_lock=none"
_WAIT_SECONDS, _POLL_SECONDS = 5.0, 0.002
_held: dict[str, list[int]] = {}  # tag of a temporary → descriptors


def is_of_this_machine(directory: str) -> bool:
    """Return whether only this machine can change a directory; False if its file system is unknown."""
    mounts = _mounts_of(os.stat(directory).st_dev)
    return bool(mounts) and all(kind in _OF_THIS_MACHINE for kind, _ in mounts)


def work_in(directory: str) -> bool:
    """Return whether a lock on a file of a directory keeps out all who may write there."""
    try:
        return is_of_this_machine(directory) or _has_server_locks(os.stat(directory).st_dev)
    except OSError:
        return False


def _has_server_locks(device: int) -> bool:
    mounts = _mounts_of(device)
    return bool(mounts) and all(kind in _NFS and _SERVER_LOCKS in options for kind, options in mounts)


@functools.lru_cache(maxsize=64)
def _mounts_of(device: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return type and options of the mounts of a device."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        rows = [row.split() for row in table]
    found, number = [], f"{os.major(device)}:{os.minor(device)}"
    for row in rows:
        if row[2] == number:
            at = row.index("-")
            found.append((row[at + 1], tuple(row[-1].split(","))))
    return tuple(found)


def hold(tag: str, path: str) -> bool:
    """Lock what is at a path until `release` of this tag, or the end of this process; return whether it is locked."""
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if work_in(path if stat.S_ISDIR(os.fstat(descriptor).st_mode) else os.path.dirname(path) or os.curdir):
            # Others may lock it only to look whether it is; shared, because NFS takes exclusive ones for writing only.
            lock_in_time(descriptor, fcntl.LOCK_SH, _WAIT_SECONDS)
            _held.setdefault(tag, []).append(descriptor)
            descriptor = None
            return True
    except OSError:  # no locks, or none is left, or it may not be read
        pass
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return False


def lock_in_time(descriptor: int, operation: int, seconds: float) -> None:
    """Lock a descriptor by an ``flock`` operation; raise BlockingIOError if others hold it for so many seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(_POLL_SECONDS)


def release(tag: str) -> None:
    """Unlock what `hold` locked under a tag."""
    for descriptor in _held.pop(tag, ()):
        with suppress(OSError):  # a fork of this process may have the descriptor, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(descriptor)


def is_held(path: str) -> bool | None:
    """Return whether a writer that locks what it writes is alive; None if that cannot be told."""
    try:
        status = os.lstat(path)
        is_directory = stat.S_ISDIR(status.st_mode)
        directory = os.path.dirname(path) or os.curdir
        if is_directory and not is_of_this_machine(directory):
            return None
        if not (is_directory or stat.S_ISREG(status.st_mode)) or not work_in(directory):
            return None
        is_empty = not os.listdir(path) if is_directory else not status.st_size
        access = os.O_RDONLY if is_of_this_machine(directory) else os.O_RDWR  # which NFS takes an exclusive lock for
        descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
    finally:
        with suppress(OSError):
            os.close(descriptor)
    return None if is_empty else False


def _forget_all() -> None:
    # The child of a fork would keep the locks of a parent that dies; unlocking here would unlock them there, too.
    for descriptors in _held.values():
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)
