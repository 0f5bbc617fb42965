"""Explain why there is nothing to restore; what lies one level up or down from a local path tells what may be meant.

These looks never raise, and object stores are not asked."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterator
from contextlib import suppress

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import CheckpointError, CheckpointNotFoundError
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat._discovery import contents, foreign, saved_steps
from flax_ckpt_compat._discovery.contents import Contents
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir, is_checkpoint

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
    if path.is_remote:
        return Absence(missing, is_start=True)
    with suppress(*_FAILURES):
        if outer := contents.checkpoint_around(path):
            return Absence(f"{missing}, and would be a part of the checkpoint {outer}", "pass that path")
        above, name = path.parent, path.name
        while not above.isdir():
            above, name = above.parent, above.name
        if name.startswith("~"):
            return Absence(missing, "'~' is not expanded, so pass os.path.expanduser(path)")
        names = [one for one in steps.natural_sort(above.listdir(), signed=False) if not one.startswith(".")]
        alike = difflib.get_close_matches(name, names, _MAX_NAMES, _SIMILAR)
        # A run whose name differs from others in numbers alone is a new one.
        alike = [one for one in alike if _DIGITS.sub("", one) != _DIGITS.sub("", name) or is_checkpoint(above / one)]
        if alike and above.path != "/":
            is_typo = difflib.SequenceMatcher(None, name, alike[0]).ratio() >= _TYPO
            return Absence(missing, f"did you mean {some([(above / one).path for one in alike])}?", not is_typo)
        there = "" if above.path == "/" else f"; {printable(above.path, one_line=True)} has {some(names) or 'nothing'}"
        return Absence(missing, f"check the path{there}", is_start=True)
    return Absence(missing, is_start=True)


def no_directory(path: Location) -> Absence:
    """Explain that a path is not a directory: it does not exist, or is a file."""
    if dangling := presence.dangling_link(path.path):
        return Absence(dangling)
    if path.exists():
        return Absence(f"{path} is not a directory", f"pass one, perhaps {path.parent}")
    return of_directory(path)


def of_checkpoints(checkpoint_dir: CheckpointDir, names: list[str]) -> Absence:
    """Explain that a directory, by these names in it, holds no checkpoint of its prefix; name other prefixes."""
    directory = checkpoint_dir.directory
    if not directory.isdir():
        found = no_directory(directory)
        return found if directory.exists() else dataclasses.replace(found, why=f"the directory {found.why}")
    none = f"{directory} holds no checkpoint with the prefix {checkpoint_dir.prefix!r}"
    # TensorBoard's files, and what saves left, are there before the first checkpoint.
    names = [name for name in names if not _EVENTS.fullmatch(name) and temporaries.parse(name) is None]
    if not names:
        return Absence(none, is_start=True)
    with suppress(*_FAILURES):
        if not directory.is_remote and (outer := contents.checkpoint_around(directory)):
            return Absence(f"{none}, as it is a part of the checkpoint {outer}", "pass that path")
        if others := list(itertools.islice(_others(checkpoint_dir, names), _MAX_NAMES)):
            head = checkpoint_dir.given_prefix.removesuffix(checkpoint_dir.prefix)
            prefixes = " or ".join(dict.fromkeys(f"prefix={head + other!r}" for other, _ in others))
            there = ", ".join(other + step for other, step in others)
            return Absence(f"{none}; there are {there}", f"did you mean {prefixes}?")
        shown = [name for name in steps.natural_sort(names, signed=False) if not name.startswith(".")]
        folders = (path for path in map(directory.__truediv__, shown) if not path.is_remote and path.isdir())
        if below := [one.path for one in itertools.islice(folders, _MAX_FOLDERS) if _holds_checkpoint(one)]:
            return Absence(f"{none}; there are checkpoints at {some(below)}", "pass one of these paths")
        if not foreign.is_unknown_look(look := foreign.names_look_like(names)):
            remedy = foreign.foreign_remedy(directory).rstrip(".")
            return Absence(f"{none}, but looks like {look}", remedy[0].lower() + remedy[1:])
    return Absence(none)


def _holds_checkpoint(folder: Location) -> bool:
    """Return whether a folder is a checkpoint, or holds one."""
    numbered = (name for name in folder.listdir() if not steps.is_foreign(name) and steps.split_step(name))
    paths = (folder, *(folder / name for name in itertools.islice(numbered, _MAX_FOLDERS)))
    return any(map(is_checkpoint, paths))


def of_other_prefixes(checkpoint_dir: CheckpointDir) -> list[str]:
    """Return the names of some complete checkpoints of other prefixes in a local directory, oldest first."""
    if checkpoint_dir.directory.is_remote:
        return []
    found = _others(checkpoint_dir, saved_steps.names_in(checkpoint_dir))
    return [prefix + step for prefix, step in itertools.islice(found, _MAX_NAMES)]


def _others(checkpoint_dir: CheckpointDir, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield prefix and step of the complete numeric checkpoints of other prefixes, oldest first."""
    found = filter(None, map(steps.split_step, itertools.filterfalse(steps.is_foreign, names)))
    for other, step in sorted(found, key=lambda parts: (parts[0], float(parts[1]))):
        name = other + step
        if steps.step_of(name, checkpoint_dir.prefix) is None and is_checkpoint(checkpoint_dir.directory / name):
            yield other, step


def some(names: list[str]) -> str:
    """Return the first names as text, and how many more there are."""
    shown = ", ".join(printable(name, one_line=True) for name in names[:_MAX_NAMES])
    return f"{shown} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else shown
