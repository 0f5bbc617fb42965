"""Why there is nothing to restore, and what the caller may have meant."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
import os
import re
from collections.abc import Iterator

from flax_ckpt_compat._core import paths, steps
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._discovery import foreign_folders, listing
from flax_ckpt_compat._discovery.listing import CheckpointDir

# Without a sign: the dash of ckpt-3 is part of its prefix for whoever chose it.
_NUMBERED = re.compile(r"(.*?)(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", re.DOTALL)
_EVENTS = re.compile(r"(.*\.)?tfevents\..*", re.DOTALL)  # of TensorBoard, which name hosts and end in numbers
_DIGITS = re.compile(r"\d+")
_MAX_OTHERS = 5
_LIKE_A_TYPO = 0.85


@dataclasses.dataclass(frozen=True, slots=True)
class Absence:
    """Why a look-up found nothing.

    Attributes:
        why: the reason, and what the caller may have meant.
        is_start: there is nothing at all, as when a program first runs.
    """

    why: str
    is_start: bool

    @property
    def level(self) -> int:
        """The level of the log record: a first start is no reason to warn."""
        return logging.INFO if self.is_start else logging.WARNING


def of_directory(path: str) -> Absence:
    """Explain that a path does not exist."""
    near = near_directory(path, _LIKE_A_TYPO)
    # Runs that differ in a number stand side by side on purpose.
    if near is None or _without_numbers(near) == _without_numbers(path):
        return Absence(f"{path} does not exist", True)
    return Absence(f"{path} does not exist: did you mean {near}?", False)


def of_checkpoints(where: CheckpointDir, prefix: str) -> Absence:
    """Explain that a place holds no checkpoint of its prefix, and name those that it holds of others.

    Args:
        where: directory and prefix.
        prefix: as the caller wrote it.
    """
    if not paths.isdir(where.directory):
        if paths.lexists(where.directory):
            return Absence(f"{where.directory} is no directory", False)
        return dataclasses.replace(found := of_directory(where.directory), why=f"the directory {found.why}")
    none = f"{where.directory} holds no checkpoint with the prefix {where.prefix!r}"
    names = listing.names_in(where)
    others = list(itertools.islice(_others(where, names), _MAX_OTHERS))
    if others:
        head = prefix.removesuffix(where.prefix)
        prefixes = " or ".join(dict.fromkeys(f"prefix={head + other!r}" for other, _ in others))
        there = ", ".join(other + step for other, step in others)
        return Absence(f"{none}; there are {there}: did you mean {prefixes}?", False)
    file = foreign_folders.msgpack_file_in(where.directory)
    if file is not None:
        return Absence(
            f"{none}, but looks like {foreign_folders.folder_looks_like(where.directory)}: restore {file}", False
        )
    return Absence(none, all(map(_says_nothing, names)))


def near_directory(path: str, cutoff: float = 0.6) -> str | None:
    """Return a directory in the same place whose name is much like that of a local one that does not exist."""
    if paths.is_url(path):
        return None
    parent, name = os.path.split(path)
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return None
    return next((os.path.join(parent, near) for near in difflib.get_close_matches(name, names, 1, cutoff)), None)


def _without_numbers(path: str) -> str:
    return _DIGITS.sub("", os.path.basename(path))


def _says_nothing(name: str) -> bool:
    """Return whether a name says nothing about checkpoints, and is there before the first one."""
    return _EVENTS.fullmatch(name) is not None or atomic.is_temporary(name)


def _others(where: CheckpointDir, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield prefix and step of the complete numeric checkpoints of other prefixes, oldest first."""
    names = [name for name in names if not _says_nothing(name) and not steps.is_foreign(name)]
    found = [match.groups() for match in map(_NUMBERED.fullmatch, names) if match]
    for other, step in sorted(found, key=lambda parts: (parts[0], float(parts[1]))):
        name = other + step
        if steps.step_of(name, where.prefix) is None and listing.is_checkpoint(where.path(name)):
            yield other, step
