"""Names of what a writer has begun, which tell whose they are; and whether that writer still lives."""

from __future__ import annotations

import errno
import itertools
import os
import re
import time
from contextlib import suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import processes
from flax_ckpt_compat._core.orbax_layout import TEMPORARY
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX

GONE = (FileNotFoundError, NotADirectoryError)
_STAGED = ".staged"
_TAG = r"(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d+)-(?P<count>\d+)"
# Real Flax skips names that end in ``_gda``, real Orbax those that contain its suffix; the leading dot keeps
# them out of users' own ``checkpoint_*`` globs. machine-pid-start tell whether the writer is still alive.
_TEMPORARY = re.compile(
    rf"\.(?P<name>.+)\.(?P<tag>{_TAG})(?P<role>new|old|put)"
    rf"(?:{re.escape(TEMPORARY)}|{re.escape(_STAGED)})(?:{re.escape(TEMPORARY)}|{re.escape(ARRAYS_POSTFIX)})*",
    re.DOTALL,
)
_NEST = re.compile(rf"\.{_TAG}")
# Seconds without a change before another machine's writer counts as dead. A checkpoint that was set aside is
# missing from its place for as long, so it is put back sooner: a writer that still lives then fails, aloud.
_PATIENCE = {"new": 24 * 3600.0, "put": 24 * 3600.0, "old": 3600.0}
_MAX_NAME = 255
_counter = itertools.count()
# Tags of temporaries of this process that nothing will be made of any more. What is still there of them, because it
# could not be removed or a late process of the same job wrote it again, is removed by the next save.
_abandoned: set[str] = set()


def temporary_path(path: str, role: str = "new") -> str:
    """A path beside ``path`` for this writer alone; `parse` knows it by its name."""
    directory, name = os.path.split(path)
    tag = f".{processes.machine()}-{os.getpid()}-{processes.start_time(os.getpid())}-{next(_counter)}{role}"
    tail = tag + TEMPORARY + ARRAYS_POSTFIX
    encoded, room = os.fsencode(name), _MAX_NAME - len(tail) - 1
    if len(encoded) > room and role == "old":  # its whole name is needed to put it back
        raise StorageError(f"{path}: the name is too long to be set aside", path=path, errno=errno.ENAMETOOLONG)
    room -= len(ARRAYS_POSTFIX) if role == "new" else 0  # for the folder of its arrays
    shown = name if len(encoded) <= room else encoded[:room].decode("utf-8", "ignore")
    return os.path.join(directory, f".{shown}{tail}")


def staging_path(path: str) -> str:
    """Like `temporary_path`, for writers that refuse Orbax's temporary suffix in the names they are given."""
    return temporary_path(path).replace(TEMPORARY + ARRAYS_POSTFIX, _STAGED + ARRAYS_POSTFIX)


def parse(name: str) -> re.Match[str] | None:
    """Whose it is (groups ``name``, ``tag``, ``machine``, ``pid``, ``start``, ``role``); None for other names."""
    return _TEMPORARY.fullmatch(name)


def is_temporary(name: str) -> bool:
    """True for names made by `temporary_path`, in any process."""
    return parse(name) is not None


def destination(temporary: str) -> str | None:
    """The path that a temporary was made for; None where its name was too long to tell."""
    directory, basename = os.path.split(temporary)
    match = parse(basename)
    # Cutting a name short took away one character at least, and left no room for one more.
    if match is None or len(os.fsencode(basename)) > _MAX_NAME - len(ARRAYS_POSTFIX) - 4:
        return None
    return os.path.join(directory, match["name"])


def nest_of(temporary: str) -> str | None:
    """A name that is this writer's and this temporary's alone, for a folder; `is_nest` knows it."""
    match = parse(os.path.basename(temporary))
    return None if match is None else "." + match["tag"]


def is_nest(name: str) -> bool:
    """True for names made by `nest_of`, in any process."""
    return _NEST.fullmatch(name) is not None


def witness_of(temporary: str) -> str | None:
    """The name for a second link to a temporary, which outlives its renaming; None where `destination` is."""
    if destination(temporary) is None:
        return None
    directory, basename = os.path.split(temporary)
    match = parse(basename)
    assert match is not None
    end = match.end("role")
    return os.path.join(directory, basename[: match.start("role")] + "put" + basename[end:])


def abandon(temporary: str) -> None:
    """Note that a save of this process has failed, so that its temporary no longer counts as a live writer's."""
    match = parse(os.path.basename(temporary))
    if match is not None:
        _abandoned.add(match["tag"])


def is_alive(match: re.Match[str], path: str) -> bool:
    """Whether the writer of this temporary, whose name matched, may still be at work."""
    if match["tag"] in _abandoned:
        return False
    if match["machine"] == processes.machine():
        return processes.start_time(int(match["pid"])) == int(match["start"])
    return time.time() - _last_change(path) < _PATIENCE[match["role"]]


def _last_change(path: str) -> float:
    """Newest change of anything in it, its own renaming included; 0.0 where it vanishes meanwhile."""
    newest = 0.0
    with suppress(*GONE):
        newest = os.lstat(path).st_ctime
        for folder, _, files in os.walk(path):
            for entry in (folder, *(os.path.join(folder, file) for file in files)):
                newest = max(newest, os.lstat(entry).st_mtime)
    return newest
