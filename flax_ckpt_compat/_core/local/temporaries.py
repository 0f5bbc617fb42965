"""Name temporaries after their writer, and tell whether that writer is alive.

Within one pid namespace of one boot, its process tells. Elsewhere a lock on what it writes does, if the name says that
there is one, and locks reach from there to here. Else time tells.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import platform
import re
import time
import weakref
from contextlib import suppress
from typing import Literal

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import writer_locks
from flax_ckpt_compat._core.orbax_layout import TEMPORARY
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX

GONE = (FileNotFoundError, NotADirectoryError)
# Errors of a path that certainly does not exist; ESTALE: on NFS, another machine removed it.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ESTALE})
# Errors of a rename onto a file, onto a non-empty directory, and of a file onto a directory or the reverse.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})
_STAGED = ".staged"
_TAG = r"(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d+)-(?P<count>\d+)"
# Real Flax skips names that end in ``_gda``, real Orbax those that contain its suffix; the leading dot keeps
# them out of users' own ``checkpoint_*`` globs. machine-pid-start tell whether the writer is still alive; a zero before
# the count says that it locks what it writes.
_TEMPORARY = re.compile(
    rf"\.(?P<name>.+)\.(?P<tag>{_TAG})(?P<role>new|old|put)"
    rf"(?:{re.escape(TEMPORARY)}|{re.escape(_STAGED)})"
    rf"(?:{re.escape(TEMPORARY)}(?:-\d+)?|{re.escape(ARRAYS_POSTFIX)})*",  # Orbax 0.10.3 adds a time to its own
    re.DOTALL,
)
_GENERATION = re.compile(rf"\.{_TAG}")
# Seconds without a change after which another machine's writer counts as dead. One that sets a checkpoint aside needs
# milliseconds, so what it has replaced goes sooner.
_LONG = 24 * 3600.0
_STALE_AFTER = {"new": _LONG, "put": _LONG, "old": 3600.0}
# The server of a network file system gives up the locks of a client that it does not hear of for a while.
_LOCK_LOST_SECONDS = 600.0
_MAX_NAME = 255  # bytes of a file's name; encrypted file systems allow fewer
_counter = itertools.count()
_log = logging.getLogger("flax_ckpt_compat")
# Tags of failed saves of this process. The next save removes what is left of them, because it could not be removed
# or a late process of the same job wrote it again.
_abandoned: set[str] = set()
_uses: dict[str, weakref.ref[Use]] = {}  # tag of a temporary → what is alive while this process uses it


class Use:
    """A use of a temporary by this process: once nothing holds it, the temporary is abandoned.

    Ctrl-C may come at any place, also where a save that it interrupted is cleaned up."""

    def __init__(self, temporary: str):
        match = parse(os.path.basename(temporary))
        if match is not None:
            _uses[match["tag"]] = weakref.ref(self)


def temporary_path(path: str, role: str = "new", *, locked: bool = False) -> str:
    """Return a path beside ``path``, unique to this writer, with a name that `parse` recognizes.

    ``locked``: the caller creates it by `create_file` or `create_directory`."""
    directory, name = os.path.split(path)
    count = f"{'0' if locked and writer_locks.work_in(directory or os.curdir) else ''}{next(_counter)}"
    tag = f".{machine()}-{os.getpid()}-{start_time(os.getpid())}-{count}{role}"
    tail = tag + TEMPORARY + ARRAYS_POSTFIX
    encoded, room = os.fsencode(name), _longest_name(directory) - len(tail) - 1
    if len(encoded) > room and role == "old":  # putting it back needs its whole name
        raise StorageError(f"{path}: the name is too long to be set aside", path=path, errno=errno.ENAMETOOLONG)
    room -= len(ARRAYS_POSTFIX) if role == "new" else 0  # of the folder of arrays
    shown = name if len(encoded) <= room else encoded[:room].decode("utf-8", "ignore")
    return os.path.join(directory, f".{shown}{tail}")


def _longest_name(directory: str) -> int:
    """Return how many bytes a name in a directory may have."""
    try:
        return min(_MAX_NAME, os.pathconf(directory or os.curdir, "PC_NAME_MAX"))
    except (OSError, ValueError):  # ValueError: the system has no such limit
        return _MAX_NAME


def is_taken(error: OSError) -> bool:
    """Return whether a rename to a path failed because of what is there."""
    return error.errno in _TAKEN


def staging_path(path: str) -> str:
    """Return a `temporary_path` for writers that refuse names with Orbax's temporary suffix."""
    return temporary_path(path).replace(TEMPORARY + ARRAYS_POSTFIX, _STAGED + ARRAYS_POSTFIX)


def parse(name: str) -> re.Match[str] | None:
    """Match a temporary's name (groups ``name``, ``tag``, ``machine``, ``pid``, ``start``, ``role``)."""
    return _TEMPORARY.fullmatch(name) if name.startswith(".") else None  # most of thousands of names are steps


def is_temporary(name: str) -> bool:
    """Return whether a name was made by `temporary_path`, in any process."""
    return parse(name) is not None


def destination(temporary: str) -> str | None:
    """Return the final path of a temporary; None if its name was shortened."""
    directory, basename = os.path.split(temporary)
    match = parse(basename)
    # A shortened name lacks at least one character and has no room for another, of up to four bytes.
    if match is None or len(os.fsencode(basename)) > _longest_name(directory) - len(ARRAYS_POSTFIX) - 4:
        return None
    return os.path.join(directory, match["name"])


def generation_of(temporary: str) -> str | None:
    """Return a folder name unique to a temporary; `is_generation` recognizes it."""
    match = parse(os.path.basename(temporary))
    return None if match is None else "." + match["tag"]


def is_generation(name: str) -> bool:
    """Return whether a name was made by `generation_of`, in any process."""
    return _GENERATION.fullmatch(name) is not None


def link_marker_of(temporary: str) -> str | None:
    """Return the path for a second hard link to a temporary, which outlives its rename; None if `destination` is."""
    directory, basename = os.path.split(temporary)
    match = parse(basename)
    if match is None or destination(temporary) is None:
        return None
    return os.path.join(directory, basename[: match.start("role")] + "put" + basename[match.end("role") :])


def create_directory(path: str, *, lock_file: bool = True) -> None:
    """Create a directory; hold it if it is a temporary of this process, by a ``lock_file`` in it where it has to be."""
    os.mkdir(path)
    _hold_new(path, lock_file=lock_file)


def create_file(path: str) -> int:
    """Create a file that does not exist, and return a descriptor to write to; hold it if it is a temporary."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _hold_new(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_lock_file(temporary: str) -> bool:
    """Remove the lock file from a temporary directory that was written; return whether there was one."""
    match = parse(os.path.basename(temporary))
    return match is not None and writer_locks.remove_lock_file(match["tag"])


def _hold_new(path: str, *, lock_file: bool = False) -> None:
    match = parse(os.path.basename(path))
    if match is not None and _is_locked(match) and not writer_locks.hold(match["tag"], path, lock_file=lock_file):
        _log.warning("%s cannot be locked, so other saves may take it for what a dead process left", path)


def claimed_path(path: str, role: str = "new", *, now: str | None = None) -> str:
    """Return a `temporary_path` for what is at ``now``, by default at ``path``; locked until `release` if possible."""
    found = temporary_path(path, role, locked=True)
    match = parse(os.path.basename(found))
    if match is not None and _is_locked(match) and writer_locks.hold(match["tag"], now or path):
        return found
    return temporary_path(path, role)


def release(temporary: str) -> None:
    """Unlock a temporary that was published or removed."""
    match = parse(os.path.basename(temporary))
    if match is not None:
        writer_locks.release(match["tag"])


def abandon(temporary: str) -> None:
    """Record that a save of this process failed: its temporary no longer has a live writer."""
    match = parse(os.path.basename(temporary))
    if match is not None:
        _abandoned.add(match["tag"])
        writer_locks.release(match["tag"])


def _is_locked(match: re.Match[str]) -> bool:
    """Return whether the writer of a temporary locks it."""
    return len(match["count"]) > 1 and match["count"].startswith("0")


def writer_of(match: re.Match[str], path: str) -> Literal["alive", "perhaps", "dead"]:
    """Return the state of the writer of a temporary, given its parsed name; "perhaps": only time can tell."""
    use = _uses.get(match["tag"])
    if match["tag"] in _abandoned or (use is not None and use() is None):
        return "dead"
    if match["machine"] == machine():
        started, recorded = start_time(int(match["pid"])), int(match["start"])
        return "alive" if started >= 0 and (started == recorded or 0 in (started, recorded)) else "dead"
    is_held = writer_locks.is_held(path) if _is_locked(match) else None
    if is_held:
        return "alive"
    directory = os.path.dirname(path) or os.curdir
    seconds = _STALE_AFTER[match["role"]]
    if is_held is not None:
        seconds = 0.0 if writer_locks.is_of_this_machine(directory) else _LOCK_LOST_SECONDS
    return "perhaps" if seconds and storage_time(directory) - _last_change(path) < seconds else "dead"


def is_alive(match: re.Match[str], path: str) -> bool:
    """Return whether the writer of a temporary, given its parsed name, may still be running."""
    return writer_of(match, path) != "dead"


def storage_time(directory: str) -> float:
    """Return the time by the clock that dates the files of a directory: this machine's may be hours off, or jump."""
    probe = temporary_path(os.path.join(directory, "clock"))
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:  # one who may only read; a full disk
        return time.time()
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(probe)


def is_long_unchanged(path: str) -> bool:
    """Return whether nothing in a path has changed for a day, after which an unknown writer counts as dead."""
    return storage_time(os.path.dirname(path)) - _last_change(path) >= _LONG


def _last_change(path: str) -> float:
    """Return the newest change of anything in a path, including its own rename; 0.0 if it vanishes meanwhile."""
    newest = 0.0
    with suppress(*GONE):
        newest = os.lstat(path).st_ctime
        for folder, _, files in os.walk(path):
            for entry in (folder, *(os.path.join(folder, file) for file in files)):
                newest = max(newest, os.lstat(entry).st_mtime)
    return newest


@functools.cache
def machine() -> str:
    """Return an id of this boot and pid namespace, within which pids can be looked up.

    The name of the host counts only where these are unknown: containers may get another one with each start."""
    import hashlib  # which loads OpenSSL, and commands that only look need no id

    parts = []
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    if len(parts) < 2:
        parts.append(platform.node())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def start_time(pid: int) -> int:
    """Return the start time of a process in kernel ticks; 0 if it lives but that is unknown, -1 if it is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in parentheses may contain blanks, so split behind it.
            fields = file.read().rpartition(b")")[2].split()
        # A zombie never writes again, even if its parent never reaps it.
        return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        pass
    try:  # Linux too may hide the processes of others, and there may be no descriptor left
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except OSError:
        pass
    return 0
