"""Explain why there is nothing to restore; what lies one level up or down from a local path tells what may be meant.

These looks never raise, and object stores are not asked."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import CheckpointError, CheckpointNotFoundError
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat._discovery import contents, foreign, saved_steps
from flax_ckpt_compat._discovery.contents import Contents
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

_EVENTS = re.compile(r"(.*\.)?tfevents\..*", re.DOTALL)  # of TensorBoard, which name hosts and end in numbers
_DIGITS = re.compile(r"\d+")
_MAX_NAMES = 5
_MAX_FOLDERS = 20  # to look into, and names to look at in each
_SIMILAR, _TYPO = 0.6, 0.85  # of difflib: told by errors; also a warning of a restore that goes on with the target
_FAILURES = (OSError, ValueError, CheckpointError)


@dataclasses.dataclass(frozen=True, slots=True)
class Absence:
    """Reason why a look-up found nothing."""

    why: str
    remedy: str = ""  # what to do next, or empty
    beside: str = ""  # what is beside the path, for errors
    is_start: bool = False  # there is nothing at all, as in a program's first run
    lost: Contents | None = None  # the newest incomplete checkpoint, where no save can have left it

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}" if self.remedy else self.why

    @property
    def level(self) -> int:
        """Return the level of the log record: no warning on a first run."""
        return logging.INFO if self.is_start else logging.WARNING

    def error(self, path: Location, before: str = "") -> CheckpointNotFoundError:
        """Return this as an error, after other words."""
        message = f"{before}{self}; {self.beside}" if self.beside else f"{before}{self}"
        return CheckpointNotFoundError(message, path=path.path, has_remedy=bool(self.remedy or self.beside))


def of_directory(path: Location) -> Absence:
    """Explain that a path does not exist."""
    missing = f"{path} does not exist"
    if why := path.why_too_long():
        return Absence(f"{missing}, as {why}", "shorten it")
    if not path.is_remote:
        with suppress(*_FAILURES):
            return _one_level_up(path, missing)
    return Absence(missing, is_start=True)


def _one_level_up(path: Location, missing: str) -> Absence:
    if expanded := unexpanded_home(path):
        return Absence(f"{missing}, as '~' is not expanded", f"write {expanded}")
    if foreign.is_prefix_of_tensorflow(path):
        return Absence(f"{missing}, but is the name of {foreign.TENSORFLOW}")
    if outer := contents.checkpoint_around(path):
        return Absence(f"{missing}, and would be a part of the checkpoint {outer}", "pass that path")
    above, name = path.parent, path.name
    while not above.isdir():  # a name above may be wrong
        above, name = above.parent, above.name
    names = [one for one in steps.natural_sort(above.listdir(), signed=False) if not one.startswith(".")]
    prefix, _ = steps.split_step(path.name) or (path.name, "")
    if prefix and above == path.parent and (there := _steps_of(prefix, above, names)):
        if prefix == path.name:
            return Absence(f"{missing}; there are {some(there)} in {above}", f"pass that directory, and {prefix=}")
        return Absence(f"{missing}; {above} has {some(there)}", "pass one of them, or that directory")
    if above.path == "/" or not names:
        return Absence(missing, beside=f"check the path; {above} exists", is_start=True)
    # Runs that differ in their numbers are all of interest.
    near = difflib.get_close_matches(name, [one for one in names if _shape(one) != _shape(name)], 1, _SIMILAR)
    if not near:
        return Absence(missing, beside=f"{printable(above.path, one_line=True)} has {some(names)}", is_start=True)
    meant = above / near[0] / path.path.removeprefix((above / name).path).lstrip("/")
    suggestion = f"did you mean {printable((meant if meant.exists() else above / near[0]).path, one_line=True)}?"
    if meant.isdir() and difflib.SequenceMatcher(None, name, near[0]).ratio() >= _TYPO:
        return Absence(missing, suggestion)
    return Absence(missing, beside=suggestion, is_start=True)


def _steps_of(prefix: str, folder: Location, names: Collection[str]) -> list[str]:
    """Return the names of a prefix's first checkpoints in a folder."""
    numbered = (name for name in names if (steps.split_step(name) or ("",))[0] == prefix)
    return [name for name in itertools.islice(numbered, _MAX_FOLDERS) if saved_steps.is_checkpoint(folder / name)]


def _shape(name: str) -> str:
    """Return a name without its numbers."""
    return _DIGITS.sub("", name)


def unexpanded_home(path: Location) -> str | None:
    """Return the expression to write for a path whose ``~``, as the caller wrote it, became a directory's name."""
    with suppress(*_FAILURES):
        shown = "" if path.is_remote else os.path.relpath(path.path)
        return f"os.path.expanduser({shown!r})" if shown != os.path.expanduser(shown) else None
    return None


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
    names = saved_steps.names_in(checkpoint_dir) if listed is None else listed
    if not directory.is_remote:
        with suppress(*_FAILURES):
            if outer := contents.checkpoint_around(directory):
                return Absence(f"{none}, as it is a part of the checkpoint {outer}", "pass that path")
    if others := list(itertools.islice(_others(checkpoint_dir, names), _MAX_NAMES)):
        head = checkpoint_dir.given_prefix.removesuffix(checkpoint_dir.prefix)
        prefixes = " or ".join(dict.fromkeys(f"prefix={head + other!r}" for other, _ in others))
        there = ", ".join(other + step for other, step in others)
        return Absence(f"{none}; there are {there}", f"did you mean {prefixes}?")
    if not directory.is_remote:
        with suppress(*_FAILURES):
            if below := _one_level_down(directory, names):
                remedy = "pass this path" if len(below) == 1 else "pass one of these paths"
                return Absence(f"{none}; there are checkpoints at {some(below)}", remedy)
    if all(map(_is_unrelated, names)):
        return Absence(none, is_start=True)
    look = foreign.names_look_like(names)
    if not foreign.is_unknown_look(look):
        with suppress(*_FAILURES):
            remedy = foreign.foreign_remedy(directory).rstrip(".")
            return Absence(f"{none}, but looks like {look}", remedy[0].lower() + remedy[1:])
    return Absence(none)


def _one_level_down(directory: Location, names: Collection[str]) -> list[str]:
    """Return the paths to restore that are one level below a directory: checkpoints, and directories of them."""
    if "snapshots" in names:  # a cache of Hugging Face
        directory /= "snapshots"
        names = directory.listdir()
    paths = (directory / name for name in steps.natural_sort(names, signed=False) if not name.startswith("."))
    folders = itertools.islice((path for path in paths if path.isdir()), _MAX_FOLDERS)
    return [found.path for found in map(_checkpoint_in, folders) if found is not None]


def _checkpoint_in(folder: Location) -> Location | None:
    """Return a folder that is a checkpoint or holds some, or its only msgpack file; else None."""
    numbered = (name for name in folder.listdir() if not steps.is_foreign(name) and steps.split_step(name))
    paths = (folder, *(folder / name for name in itertools.islice(numbered, _MAX_FOLDERS)))
    return folder if any(map(saved_steps.is_checkpoint, paths)) else foreign.msgpack_file_in(folder)


def _is_unrelated(name: str) -> bool:
    """Return whether a name is unrelated to checkpoints, such as a file that exists before the first one."""
    return _EVENTS.fullmatch(name) is not None or temporaries.is_temporary(name)


def of_other_prefixes(checkpoint_dir: CheckpointDir) -> list[str]:
    """Return the names of some complete checkpoints of other prefixes in a local directory, oldest first."""
    if checkpoint_dir.directory.is_remote:
        return []
    found = _others(checkpoint_dir, saved_steps.names_in(checkpoint_dir))
    return [prefix + step for prefix, step in itertools.islice(found, _MAX_NAMES)]


def _others(checkpoint_dir: CheckpointDir, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield prefix and step of the complete numeric checkpoints of other prefixes, oldest first."""
    names = [name for name in names if not _is_unrelated(name) and not steps.is_foreign(name)]
    found = filter(None, map(steps.split_step, names))
    for other, step in sorted(found, key=lambda parts: (parts[0], float(parts[1]))):
        name = other + step
        if steps.step_of(name, checkpoint_dir.prefix) is None and saved_steps.is_checkpoint(checkpoint_dir.path(name)):
            yield other, step


def some(names: list[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = len(names) - _MAX_NAMES
    return ", ".join([printable(name, one_line=True) for name in names[:_MAX_NAMES]]) + (
        f" and {more} more" if more > 0 else ""
    )
