"""Name temporaries, lock them while they are written, and tell whether their writer is alive.

A name holds the machine and its boot. Within one boot the lock decides, in all containers: the kernel releases it when
its holder dies. Another boot of the same machine has ended. The writer on another machine counts as dead after a day.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from flax_ckpt_compat._core.errors import StorageError, translated
from flax_ckpt_compat._core.numbered_names import ARRAYS_POSTFIX
from flax_ckpt_compat._core.orbax_layout import TEMPORARY

GONE = (FileNotFoundError, NotADirectoryError)
_STAGED = ".staged"
# Machine, boot and a random number; of release candidates machine, process, its start and a count.
_TAG = r"(?P<machine>[0-9a-f]{12})-(?:(?P<boot>[0-9a-f]{12})-[0-9a-f]{12}|\d+-\d+-\d+)"
# Real Flax skips names that end in ``_gda``, real Orbax those that contain its suffix, globs of users those that begin
# with a dot. The role ``put`` is of release candidates.
_TEMPORARY = re.compile(
    rf"\.(?P<name>.+)\.(?P<tag>{_TAG})(?P<role>new|old|put)"
    rf"(?:{re.escape(TEMPORARY)}|{re.escape(_STAGED)})"
    rf"(?:{re.escape(TEMPORARY)}(?:-\d+)?|{re.escape(ARRAYS_POSTFIX)})*",  # Orbax 0.10.3 adds a time to its own
    re.DOTALL,
)
_GENERATION = re.compile(rf"\.{_TAG}")
_STALE_SECONDS = 24 * 3600.0
_MAX_NAME = 255  # bytes of a file's name
_held: dict[str, int] = {}  # temporary → descriptor that holds its lock, until `release`


def temporary_path(path: str, role: str = "new") -> str:
    """Return a path beside ``path``, unique to this writer, for `create_file` or `create_directory`, which lock it."""
    directory, name = os.path.split(path)
    tail = f".{_machine()}-{_boot()}-{os.urandom(6).hex()}{role}{TEMPORARY}{ARRAYS_POSTFIX}"
    encoded, room = os.fsencode(name), _MAX_NAME - len(tail) - len(ARRAYS_POSTFIX) - 1
    if len(encoded) > room:
        if role == "old":  # putting it back needs its whole name
            raise StorageError(f"{path}: the name is too long to be set aside", path=path, errno=errno.ENAMETOOLONG)
        name = encoded[:room].decode("utf-8", "ignore")
    return os.path.join(directory, f".{name}{tail}")


def staging_path(path: str) -> str:
    """Return a `temporary_path` for writers that refuse names with Orbax's temporary suffix."""
    return temporary_path(path).replace(TEMPORARY + ARRAYS_POSTFIX, _STAGED + ARRAYS_POSTFIX)


def own_folder() -> str:
    """Return this user's folder for what is sent to stores."""
    import tempfile  # which commands that only look do without

    folder = os.path.join(tempfile.gettempdir(), f"flax_ckpt_compat-{os.getuid()}")
    with translated(folder):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.path.islink(folder) or os.stat(folder).st_uid != os.getuid():
            raise StorageError(f"{folder} is not this user's own folder; remove it, or set TMPDIR", path=folder)
    return folder


@functools.cache
def _machine() -> str:
    import hashlib  # which loads OpenSSL, and commands that only look need no name

    parts = [platform.node()]
    with suppress(OSError), open("/etc/machine-id") as file:
        parts.append(file.read().strip())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@functools.cache
def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip().replace("-", "")[:12]
    except OSError:  # without Linux, the locks of one machine tell
        return _machine()


def parse(name: str) -> re.Match[str] | None:
    """Match a name made by `temporary_path`, in any process (groups: name, tag, machine, boot, role)."""
    return _TEMPORARY.fullmatch(name) if name.startswith(".") else None  # most of thousands of names are steps


def destination(temporary: str) -> str | None:
    """Return the final path of a temporary; None if its name was shortened."""
    directory, basename = os.path.split(temporary)
    match = parse(basename)
    # A shortened name lacks at least one character and has no room for another, of up to four bytes.
    if match is None or len(os.fsencode(basename)) > _MAX_NAME - len(ARRAYS_POSTFIX) - 4:
        return None
    return os.path.join(directory, match["name"])


def generation_of(temporary: str) -> str:
    """Return a folder name unique to a temporary, which `is_generation` recognizes; nothing for another path."""
    match = parse(os.path.basename(temporary))
    return "." + match["tag"] if match else ""


def is_generation(name: str) -> bool:
    """Return whether a name was made by `generation_of`, in any process."""
    return _GENERATION.fullmatch(name) is not None


def create_directory(path: str) -> None:
    """Create a directory; lock it until `release` if it is a temporary."""
    os.mkdir(path)
    while parse(os.path.basename(path)) and not hold(path):
        os.mkdir(path)  # another process took it for a leftover before it was locked


def create_file(path: str) -> int:
    """Create a file that does not exist, and return a descriptor to write to; lock a temporary until `release`."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if not parse(os.path.basename(path)) or hold(path):
            return descriptor
        os.close(descriptor)


def hold(path: str) -> bool:
    """Lock what is at a path until `release`, by a descriptor that forks close; return False if it is gone."""
    with suppress(*GONE):
        if (descriptor := _open(path)) is None:
            return True
        with suppress(OSError):  # a file system without locks: only time tells there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Only now: a thread that took it for a leftover releases its name, too.
        if _is_at(path, os.fstat(descriptor)):
            _held[path] = descriptor
            return True
        os.close(descriptor)
    return False


def release(temporary: str) -> None:
    """Unlock a temporary that was published or removed, or whose save failed."""
    if (descriptor := _held.pop(temporary, None)) is not None:
        with suppress(OSError):  # a network file system may fail at either
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork may have it, too, so closing does not suffice
            finally:
                os.close(descriptor)


@contextmanager
def locked_if_free(path: str) -> Iterator[bool | None]:
    """Lock what is at a path; yield whether it is there and nobody else has a lock, None if that cannot be told."""
    descriptor, is_free = None, None
    try:
        try:
            descriptor = _open(path)
            if descriptor is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = _is_at(path, os.fstat(descriptor))
        except OSError as error:
            is_free = False if isinstance(error, GONE) or error.errno in (errno.EAGAIN, errno.EACCES) else None
        yield is_free
    finally:  # without Python's functions: after Ctrl-C at the start of one, this process would keep the lock
        if descriptor is not None:
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                finally:
                    os.close(descriptor)
            except OSError:
                pass


def _open(path: str) -> int | None:
    """Open what is at a path to lock it; None if that is refused, an error if it is gone."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        return os.open(path, os.O_WRONLY | flags)  # as NFS demands; a directory opens for reading only
    try:
        return os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        if isinstance(error, GONE):
            raise
        return None


def _is_at(path: str, found: os.stat_result) -> bool:
    """Return whether a path still is what was found there."""
    with suppress(*GONE):
        return os.path.samestat(os.lstat(path), found)
    return False


def writer_of(match: re.Match[str], path: str) -> Literal["alive", "perhaps", "dead"]:
    """Return the state of the writer of a temporary, given its parsed name; "perhaps": only time can tell."""
    if match["boot"] == _boot():
        with locked_if_free(path) as is_free:
            if is_free is not None:
                return "dead" if is_free else "alive"
    elif match["boot"] and match["machine"] == _machine():
        return "dead"
    return "dead" if is_long_unchanged(path) else "perhaps"


def is_long_unchanged(path: str) -> bool:
    """Return whether nothing in a path has changed for a day, after which an unknown writer counts as dead."""
    newest = 0.0
    with suppress(*GONE):
        newest = os.lstat(path).st_ctime  # of its rename
        for folder, _, files in os.walk(path):
            for entry in (folder, *(os.path.join(folder, file) for file in files)):
                newest = max(newest, os.lstat(entry).st_mtime)
    return _clock(os.path.dirname(path)) - newest >= _STALE_SECONDS


def _clock(directory: str) -> float:
    """Return the time by the clock that dates the files of a directory: this machine's may be hours off, or jump."""
    probe = temporary_path(os.path.join(directory, "clock"))
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return os.stat(probe).st_mtime
    except OSError:  # one who may only read; a full disk
        return time.time()
    finally:
        with suppress(OSError):
            os.unlink(probe)


def _forget_all() -> None:
    # The child of a fork would keep the locks of a parent that dies; unlocking here would unlock them there, too.
    while _held:
        with suppress(OSError):
            os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_forget_all)
