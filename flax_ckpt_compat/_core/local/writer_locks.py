"""Tell live writers from dead ones by locks on temporaries, which the kernel releases when their holder dies.

Names of hosts and numbers of processes tell nothing across containers; a lock holds in all containers of one kernel.
It is taken before the first byte is written, so that only an empty temporary may be one whose lock is yet to come.
Directories of NFS, whose locks stay in one machine, and those of file systems that lock files only hold a lock file.
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
# In a temporary directory that cannot be locked itself. Whatever reads the checkpoint never sees it.
LOCK_FILE = ".writer-lock"
_lock_files: dict[str, str] = {}  # tag of a temporary → path of the lock file in it


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


def hold(tag: str, path: str, *, lock_file: bool = False) -> bool:
    """Lock what is at a path until `release` of this tag, or the end of this process; return whether it is locked.

    With ``lock_file``, create a file in a directory that cannot be locked itself, and lock that;
    `remove_lock_file` removes it before the directory is published."""
    try:
        if _lock(tag, path, os.O_RDONLY):
            return True
    except OSError:  # no locks, or none is left, or it may not be read
        pass
    try:
        within = os.path.join(path, LOCK_FILE)
        return lock_file and work_in(path) and _lock(tag, within, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError:
        with suppress(OSError):  # without its lock it would say that this process is dead
            remove_lock_file(tag)
        return False


def _lock(tag: str, path: str, access: int) -> bool:
    """Lock a file or directory that is there, or is created; return False if its locks stay in this machine."""
    descriptor: int | None = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    assert descriptor is not None
    try:
        if access & os.O_CREAT:
            _lock_files[tag] = path
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        reaches = is_of_this_machine(path) if is_directory else work_in(os.path.dirname(path) or os.curdir)
        if reaches:
            # Others may lock it only to look whether it is; shared, because NFS takes exclusive ones for writing only.
            lock_in_time(descriptor, fcntl.LOCK_SH, _WAIT_SECONDS)
            _held.setdefault(tag, []).append(descriptor)
            descriptor = None
        return reaches
    finally:
        if descriptor is not None:
            os.close(descriptor)


def remove_lock_file(tag: str) -> bool:
    """Remove the lock file of a tag; return whether there was one. From then on, only time protects the directory."""
    path = _lock_files.pop(tag, None)
    if path is not None:
        release(tag)  # first, as NFS renames a file that is open instead
        with suppress(FileNotFoundError):
            os.unlink(path)
    return path is not None


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
    _lock_files.pop(tag, None)
    for descriptor in _held.pop(tag, ()):
        with suppress(OSError):  # a fork of this process may have the descriptor, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(descriptor)


def is_held(path: str) -> bool | None:
    """Return whether a writer that locks what it writes is alive; None if that cannot be told."""
    try:
        directory = os.path.dirname(path) or os.curdir
        is_local, status = is_of_this_machine(directory), os.lstat(path)
        if not work_in(directory) or not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            return None
        if stat.S_ISDIR(status.st_mode):
            names, within = os.listdir(path), os.path.join(path, LOCK_FILE)
            is_empty, has_file = not set(names) - {LOCK_FILE}, LOCK_FILE in names
            if not (has_file or is_local):
                return None
            path = within if has_file else path
        else:
            is_empty = not status.st_size
    except OSError:
        return None
    # NFS takes an exclusive lock for writing only, and elsewhere one may look who may not write.
    found = _is_taken(path, os.O_RDONLY) if is_local else None
    found = _is_taken(path, os.O_RDWR) if found is None else found
    return None if is_empty and not found else found


def _is_taken(path: str, access: int) -> bool | None:
    """Return whether others hold a lock on what is at a path; None if that cannot be told with this access."""
    try:
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
    return False


def _forget_all() -> None:
    # The child of a fork would keep the locks of a parent that dies; unlocking here would unlock them there, too.
    for descriptors in _held.values():
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
    _held.clear()
    _lock_files.clear()


os.register_at_fork(after_in_child=_forget_all)
