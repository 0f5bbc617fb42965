"""Explain why there is nothing to restore; what lies one level up or down from a local path tells what may be meant.

These looks never raise, and object stores are not asked."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
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
_SIMILAR, _TYPO = 0.6, 0.81  # of difflib: names to suggest; and those for which a restore is no first run
_FAILURES = (OSError, ValueError, CheckpointError)


@dataclasses.dataclass(frozen=True, slots=True)
class Absence:
    """Reason why a look-up found nothing."""

    why: str
    remedy: str = ""  # what to do next, or empty
    is_start: bool = False  # as in a program's first run, which is no warning
    lost: Contents | None = None  # the newest incomplete checkpoint, where no save can have left it

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}" if self.remedy else self.why

    def error(self, path: Location, before: str = "", after: str = "") -> CheckpointNotFoundError:
        """Return this as an error, between other words."""
        return CheckpointNotFoundError(f"{before}{self}{after}", path=path.path, has_remedy=bool(self.remedy))


def of_directory(path: Location) -> Absence:
    """Explain that a path does not exist, by what is beside it, or beside the first folder on the way that is not."""
    missing = f"{path} does not exist"
    if why := path.why_too_long():
        return Absence(f"{missing}, as {why}", "shorten it")
    if path.is_remote:
        return Absence(missing, is_start=True)
    with suppress(*_FAILURES):
        if expanded := unexpanded_home(path):
            return Absence(f"{missing}, as '~' is not expanded", f"write {expanded}")
        if outer := contents.checkpoint_around(path):
            return Absence(f"{missing}, and would be a part of the checkpoint {outer}", "pass that path")
        above, name = path.parent, path.name
        while not above.isdir():
            above, name = above.parent, above.name
        names = [one for one in steps.natural_sort(above.listdir(), signed=False) if not one.startswith(".")]
        # A run whose name differs from others in numbers alone is a new one.
        alike = [
            one
            for one in difflib.get_close_matches(name, names, _MAX_NAMES, _SIMILAR)
            if saved_steps.is_checkpoint(above / one) or _DIGITS.sub("", one) != _DIGITS.sub("", name)
        ]
        if alike and above.path != "/":
            is_typo = difflib.SequenceMatcher(None, name, alike[0]).ratio() >= _TYPO
            return Absence(missing, f"did you mean {some([(above / one).path for one in alike])}?", not is_typo)
        there = f"{printable(above.path, one_line=True)} {f'has {some(names)}' if names else 'is empty'}"
        return Absence(missing, "check the path" if above.path == "/" else f"check the path; {there}", is_start=True)
    return Absence(missing, is_start=True)


def unexpanded_home(path: Location) -> str | None:
    """Return the expression to write for a path whose ``~``, as the caller wrote it, became a directory's name."""
    with suppress(*_FAILURES):
        shown = "" if path.is_remote else os.path.relpath(path.path)
        return f"os.path.expanduser({shown!r})" if shown != os.path.expanduser(shown) else None
    return None


def no_directory(path: Location) -> Absence:
    """Explain that a path is not a directory: it does not exist, or is a file."""
    if dangling := presence.dangling_link(path.path):
        return Absence(dangling)
    if path.exists():
        return Absence(f"{path} is not a directory", f"pass one, perhaps {path.parent}")
    return of_directory(path)


def of_checkpoints(checkpoint_dir: CheckpointDir, listed: list[str] | None = None) -> Absence:
    """Explain that a directory holds no checkpoint of its prefix; name other prefixes.

    ``listed`` are the names on which that was decided: others may have been saved since."""
    directory = checkpoint_dir.directory
    if not directory.isdir():
        found = no_directory(directory)
        return found if directory.exists() else dataclasses.replace(found, why=f"the directory {found.why}")
    none = f"{directory} holds no checkpoint with the prefix {checkpoint_dir.prefix!r}"
    names = saved_steps.names_in(checkpoint_dir) if listed is None else listed
    if all(map(_is_unrelated, names)):
        return Absence(none, is_start=True)
    with suppress(*_FAILURES):
        if not directory.is_remote and (outer := contents.checkpoint_around(directory)):
            return Absence(f"{none}, as it is a part of the checkpoint {outer}", "pass that path")
        if others := list(itertools.islice(_others(checkpoint_dir, names), _MAX_NAMES)):
            head = checkpoint_dir.given_prefix.removesuffix(checkpoint_dir.prefix)
            prefixes = " or ".join(dict.fromkeys(f"prefix={head + other!r}" for other, _ in others))
            there = ", ".join(other + step for other, step in others)
            return Absence(f"{none}; there are {there}", f"did you mean {prefixes}?")
        if not directory.is_remote and (below := _one_level_down(directory, names)):
            return Absence(f"{none}; there are checkpoints at {some(below)}", "pass one of these paths")
        if not foreign.is_unknown_look(look := foreign.names_look_like(names)):
            remedy = foreign.foreign_remedy(directory).rstrip(".")
            return Absence(f"{none}, but looks like {look}", remedy[0].lower() + remedy[1:])
    return Absence(none)


def _one_level_down(directory: Location, names: Collection[str]) -> list[str]:
    """Return the folders of a directory that are checkpoints, or hold some."""
    paths = (directory / name for name in steps.natural_sort(names, signed=False) if not name.startswith("."))
    folders = itertools.islice((path for path in paths if path.isdir()), _MAX_FOLDERS)
    return [folder.path for folder in folders if _holds_checkpoint(folder)]


def _holds_checkpoint(folder: Location) -> bool:
    numbered = (name for name in folder.listdir() if not steps.is_foreign(name) and steps.split_step(name))
    paths = (folder, *(folder / name for name in itertools.islice(numbered, _MAX_FOLDERS)))
    return any(map(saved_steps.is_checkpoint, paths))


def _is_unrelated(name: str) -> bool:
    """Return whether a name is unrelated to checkpoints, such as a file that exists before the first one."""
    return _EVENTS.fullmatch(name) is not None or temporaries.parse(name) is not None


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
