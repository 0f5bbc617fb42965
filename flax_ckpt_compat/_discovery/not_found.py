"""Explain why there is nothing to restore, and suggest corrections."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import CheckpointError, CheckpointNotFoundError
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import foreign, hints, saved_steps
from flax_ckpt_compat._discovery.contents import Contents, State, contents_of
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

_EVENTS = re.compile(r"(.*\.)?tfevents\..*", re.DOTALL)  # of TensorBoard, which name hosts and end in numbers
_ARTIFACT = re.compile(r".*:v\d+", re.DOTALL)  # of Weights & Biases, whose versions are not steps
_MAX_OTHERS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Absence:
    """Reason why a look-up found nothing."""

    why: str
    remedy: str = ""  # what to do next, or empty
    is_start: bool = False  # there is nothing at all, as in a program's first run
    lost: Contents | None = None  # the newest incomplete checkpoint, where no save can have left it

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}" if self.remedy else self.why

    @property
    def level(self) -> int:
        """Return the level of the log record: no warning on a first run."""
        return logging.INFO if self.is_start else logging.WARNING

    def error(self, path: Location, before: str = "") -> CheckpointNotFoundError:
        """Return this as an error, after other words; with what is beside the path, if there is no other remedy."""
        beside = None if self.remedy else hints.beside(path)
        message = f"{before}{self}; {beside}" if beside else f"{before}{self}"
        return CheckpointNotFoundError(message, path=path.path, has_remedy=bool(self.remedy or beside))


def of_directory(path: Location) -> Absence:
    """Explain that a path does not exist."""
    if why := path.why_too_long():
        return Absence(f"{path} does not exist, as {why}", "shorten it")
    if foreign.is_prefix_of_tensorflow(path):
        return Absence(f"{path} does not exist, but is the name of {foreign.TENSORFLOW}")
    if expanded := hints.unexpanded_home(path):
        return Absence(f"{path} does not exist, as '~' is not expanded", f"write {expanded}")
    if outer := hints.checkpoint_around(path):
        return Absence(f"{path} does not exist, and would be a part of the checkpoint {outer}", "pass that path")
    if near := hints.sibling_directory(path):
        return Absence(f"{path} does not exist", f"did you mean {near}?")
    if others := hints.steps_beside(path):
        there = f"{path.parent} has {hints.some(others)}"
        return Absence(f"{path} does not exist; {there}", "pass one of them, or that directory")
    if others := hints.steps_of_prefix(path):
        parent, prefix = path.parent, path.name
        there = f"there are {hints.some(others)} in {parent}"
        return Absence(f"{path} does not exist; {there}", f"pass that directory, and {prefix=}")
    return Absence(f"{path} does not exist", is_start=True)


def no_directory(path: Location) -> Absence:
    """Explain that a path is not a directory of checkpoints: it does not exist, or is a file."""
    if (dangling := presence.dangling_link(path.path)) is not None:
        return Absence(dangling)
    if path.exists():
        return Absence(f"{path} is a file", f"pass the directory of the checkpoints, perhaps {path.parent}")
    return of_directory(path)


def of_checkpoints(checkpoint_dir: CheckpointDir, listed: list[str] | None = None) -> Absence:
    """Explain that a directory holds no checkpoint of its prefix; name other prefixes.

    ``listed`` are the names on which that was decided: others may have been saved since."""
    directory = checkpoint_dir.directory
    if not directory.isdir():
        if directory.exists():
            return Absence(presence.dangling_link(directory.path) or f"{directory} is not a directory")
        return dataclasses.replace(found := of_directory(directory), why=f"the directory {found.why}")
    none = f"{directory} holds no checkpoint with the prefix {checkpoint_dir.prefix!r}"
    if why := checkpoint_dir.path(checkpoint_dir.prefix).why_too_long():
        return Absence(f"{none}, as {why}", "shorten the prefix")
    if outer := hints.checkpoint_around(directory):
        return Absence(f"{none}, as it is a part of the checkpoint {outer}", "pass that path")
    names = saved_steps.names_in(checkpoint_dir) if listed is None else listed
    others = list(itertools.islice(_others(checkpoint_dir, names), _MAX_OTHERS))
    if others:
        head = checkpoint_dir.given_prefix.removesuffix(checkpoint_dir.prefix)
        prefixes = " or ".join(dict.fromkeys(f"prefix={head + other!r}" for other, _ in others))
        there = ", ".join(other + step for other, step in others)
        return Absence(f"{none}; there are {there}", f"did you mean {prefixes}?")
    if (file := foreign.msgpack_file_in(directory)) is not None:
        return Absence(f"{none}, but looks like {foreign.folder_looks_like(directory)}", f"restore {file}")
    nearby = hints.checkpoints_below(directory) or []
    if below := [path for path in nearby if os.path.relpath(path, directory.path).partition(os.sep)[0] in names]:
        remedy = "pass this path" if len(below) == 1 else "pass one of these paths"
        return Absence(f"{none}; there are checkpoints at {hints.some(below)}", remedy)
    is_start = all(map(_is_unrelated, names))
    return (None if is_start else _of_kind(directory, none)) or Absence(none, is_start=is_start)


def _of_kind(directory: Location, none: str) -> Absence | None:
    """Explain that a local directory is something else of a known kind; None if it is not."""
    if directory.is_remote:
        return None
    with suppress(CheckpointError, OSError):
        found = contents_of(directory)
        if found.state is State.FOREIGN and not foreign.is_unknown_look(found.why):
            remedy = foreign.foreign_remedy(directory).rstrip(".")
            return Absence(f"{none}, but looks like {found.why}", remedy[0].lower() + remedy[1:])
    return None


def _is_unrelated(name: str) -> bool:
    """Return whether a name is unrelated to checkpoints, such as a file that exists before the first one."""
    return _EVENTS.fullmatch(name) is not None or temporaries.is_temporary(name)


def of_other_prefixes(checkpoint_dir: CheckpointDir) -> list[str]:
    """Return the names of some complete checkpoints of other prefixes in a local directory, oldest first."""
    if checkpoint_dir.directory.is_remote:
        return []
    found = _others(checkpoint_dir, saved_steps.names_in(checkpoint_dir))
    return [prefix + step for prefix, step in itertools.islice(found, _MAX_OTHERS)]


def _others(checkpoint_dir: CheckpointDir, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield prefix and step of the complete numeric checkpoints of other prefixes, oldest first."""
    names = [name for name in names if not _is_unrelated(name) and not steps.is_foreign(name)]
    if not checkpoint_dir.directory.is_remote:  # of local artifacts, `nearby` names the path to pass
        names = [name for name in names if not _ARTIFACT.fullmatch(name)]
    found = filter(None, map(steps.split_step, names))
    for other, step in sorted(found, key=lambda parts: (parts[0], float(parts[1]))):
        name = other + step
        if steps.step_of(name, checkpoint_dir.prefix) is None and saved_steps.is_checkpoint(checkpoint_dir.path(name)):
            yield other, step
