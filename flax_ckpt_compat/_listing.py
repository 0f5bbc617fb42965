"""Which checkpoints a directory holds under a prefix, judged by cheap signs; decodes nothing."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Iterator

from flax_ckpt_compat import _detect, _looks
from flax_ckpt_compat._core import files, paths, steps, stores
from flax_ckpt_compat._core.errors import StorageError

_log = logging.getLogger("flax_ckpt_compat")
# Without a sign: the dash of ckpt-3 is part of its prefix for whoever chose it.
_NUMBERED = re.compile(r"(.*?)(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", re.DOTALL)
_MAX_OTHERS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the checkpoints of a prefix live.

    Attributes:
        directory: absolute path of the directory that holds them.
        prefix: what their names begin with; the part of the caller's prefix after its last ``/``.
        shown: the directory as the caller wrote it, for returned paths.
    """

    directory: str
    prefix: str
    shown: str

    def path(self, name: str) -> str:
        """Absolute path of a name in this place."""
        return os.path.join(self.directory, name)


def place(ckpt_dir: str, prefix: str) -> Place:
    """The place that a caller's directory and prefix mean.

    Raises:
        StorageError: a URL of a scheme that cannot be reached, or what was one.
    """
    head, tail = os.path.split(prefix)
    shown = os.path.join(ckpt_dir, head) if head else ckpt_dir
    # Where the prefix climbs out of a linked directory, only the file system knows where to.
    climbs = os.pardir in head.split(os.sep) and not paths.is_url(shown)
    absolute = os.path.realpath(paths.local(shown)) if climbs else paths.absolute(shown)
    return Place(absolute, tail, shown)


def names_in(where: Place) -> list[str]:
    """All names in the place's directory; none where it does not exist."""
    try:
        with files.translated(where.directory):
            names = paths.listdir(where.directory)
        return names if paths.is_url(where.directory) else names + files.recover(where.directory, names)
    except StorageError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return []
        raise


def complete_steps(where: Place, names: list[str] | None = None, *, quiet: bool = False) -> list[str]:
    """Names of the complete numeric checkpoints, oldest first; incomplete ones are named in one warning.

    Args:
        where: directory and prefix.
        names: what the directory holds, where the caller knows that.
        quiet: do without the warning.
    """
    complete, broken = [], []
    with paths.snapshot(where.directory):
        ours = steps.in_order(names_in(where) if names is None else names, where.prefix)
        if paths.is_url(where.directory):
            stores.know_sizes([where.path(name) for name in ours if paths.isfile(where.path(name))])
        for name in ours:
            missing = what_is_missing(where.path(name))
            if missing is None:
                complete.append(name)
            elif paths.lexists(where.path(name)):  # else another process has just evicted it
                broken.append(f"{name} ({missing})")
    if broken and not quiet:
        _log.warning("Skipping incomplete checkpoints in %s: %s", where.directory, "; ".join(broken))
    return complete


def what_is_missing(path: str) -> str | None:
    """Why a checkpoint is certainly not complete, or None; one that others remove meanwhile is not there.

    Raises:
        StorageError: it cannot be looked at.
    """
    try:
        with files.translated(path):
            return _detect.what_is_missing(path)
    except StorageError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return "it does not exist"
        raise


def newest(where: Place) -> str | None:
    """The name of the latest complete checkpoint: the highest step, or else the last ``prefix + text`` one."""
    with paths.snapshot(where.directory):
        return _newest(where)


def _newest(where: Place) -> str | None:
    everything = names_in(where)
    numeric = complete_steps(where, everything)
    if numeric:
        return numeric[-1]
    named = sorted(name for name in everything if steps.is_named(name, where.prefix))
    complete = [name for name in named if what_is_missing(where.path(name)) is None]
    return complete[-1] if complete else None


def why_none(where: Place, prefix: str) -> str:
    """Why a place holds no checkpoint of its prefix, and which ones it holds of others.

    Args:
        where: directory and prefix.
        prefix: as the caller wrote it.
    """
    if not paths.isdir(where.directory):
        there = paths.lexists(where.directory)
        return f"{where.directory} is no directory" if there else f"the directory {where.directory} does not exist"
    none = f"{where.directory} holds no checkpoint with the prefix {where.prefix!r}"
    others = list(itertools.islice(_others(where), _MAX_OTHERS))
    if not others:
        return none
    head = prefix.removesuffix(where.prefix)
    prefixes = " or ".join(dict.fromkeys(f"prefix={head + other!r}" for other, _ in others))
    return f"{none}; there are {', '.join(other + step for other, step in others)}: did you mean {prefixes}?"


def _others(where: Place) -> Iterator[tuple[str, str]]:
    """Prefix and step of the complete numeric checkpoints of other prefixes, oldest first."""
    found = [match.groups() for name in names_in(where) if (match := _NUMBERED.fullmatch(name))]
    for other, step in sorted(found, key=lambda parts: (parts[0], float(parts[1]))):
        name = other + step
        is_ours = steps.step_of(name, where.prefix) is not None or steps.is_foreign(name) or files.is_temporary(name)
        if not is_ours and _is_checkpoint(where.path(name)):
            yield other, step


def _is_checkpoint(path: str) -> bool:
    """True for what is complete and resembles nothing else, judged to make a suggestion; False where in doubt."""
    try:
        with files.translated(path):
            of_its_kind = _detect.is_orbax_directory(path) if paths.isdir(path) else _looks.looks_like(path) is None
            return _detect.what_is_missing(path) is None and of_its_kind
    except StorageError:
        return False
