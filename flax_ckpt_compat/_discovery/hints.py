"""Look near a local path that is not a checkpoint for what is meant: one level up or down, a few names of each.

Only for messages of what is absent: nothing raises, and object stores are not asked."""

from __future__ import annotations

import difflib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.location import Location, of_text
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat._discovery import contents, foreign, saved_steps

_Result = TypeVar("_Result")
_DIGITS = re.compile(r"\d+")
_WORDS = re.compile(r"[^a-zA-Z]+")
_SHORTEST_WORD = 4  # letters, of which one may be a typo
_MAX_NAMES = 5
_MAX_FOLDERS = 20  # to look into, and names to look at in each
# Of difflib: for one name of all that are told; for a name, and a word of it, that a restore proposes.
_SIMILAR, _ALIKE, _LIKE_A_TYPO = 0.6, 0.85, 0.75


def _quietly(look: Callable[[str], _Result]) -> Callable[[Location], _Result | None]:
    """Decorate a look at a local path: it takes a location, and returns None of a store, and where the look fails."""

    @functools.wraps(look)
    def wrapped(location: Location) -> _Result | None:
        try:
            return None if location.is_remote else look(location.path)
        except (OSError, ValueError, CheckpointError):
            return None

    return wrapped


@_quietly
def checkpoints_below(directory: str) -> list[str]:
    """Return the paths to restore that are one level below a directory: checkpoints, and directories of them."""
    snapshots = os.path.join(directory, "snapshots")
    directory = snapshots if os.path.isdir(snapshots) else directory  # a cache of Hugging Face
    names = steps.natural_sort(os.listdir(directory), signed=False)
    folders = (os.path.join(directory, name) for name in names if not name.startswith("."))
    found = map(_checkpoint_at, itertools.islice(filter(os.path.isdir, folders), _MAX_FOLDERS))
    return [path for path in found if path is not None]


@_quietly
def steps_of_prefix(path: str) -> list[str]:
    """Return the names of checkpoints whose prefix is a path that does not exist, oldest first."""
    parent, prefix = os.path.split(path)
    found = [name for name in os.listdir(parent) if prefix and (steps.split_step(name) or ("",))[0] == prefix]
    names = itertools.islice(steps.natural_sort(found, signed=False), _MAX_FOLDERS)
    return [name for name in names if saved_steps.is_checkpoint(of_text(os.path.join(parent, name)))]


@_quietly
def steps_beside(path: str) -> list[str]:
    """Return the names of checkpoints beside a step that does not exist, with its prefix, oldest first."""
    parent, name = os.path.split(path)
    prefix, _ = steps.split_step(name) or ("", "")
    return steps_of_prefix(of_text(os.path.join(parent, prefix))) or [] if prefix else []


@_quietly
def sibling_directory(path: str) -> str | None:
    """Return the directory that a path differs from by a typo in one of its names, or None."""
    parent, below = os.path.split(path)[0], [os.path.basename(path)]
    while not os.path.isdir(parent):  # the typo may be in a name above
        parent, name = os.path.split(parent)
        below.insert(0, name)
    with os.scandir(parent) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    paths = (os.path.join(parent, name, *below[1:]) for name in names if _is_like_a_typo(name, below[0]))
    return next(filter(os.path.isdir, paths), None)


@_quietly
def beside(path: str) -> str:
    """Return what is beside a path that does not exist, without a final stop: a similar name, or some of all."""
    if os.path.lexists(path):
        return ""
    parent = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    names = [name for name in os.listdir(parent) if not name.startswith(".")]
    if parent == os.path.dirname(parent) or not names:
        return f"check the path; {printable(parent, one_line=True)} exists" if parent != "/" else "check the path"
    missing = os.path.relpath(path, parent).partition(os.sep)[0]
    near = difflib.get_close_matches(missing, names, 1, _SIMILAR)
    if near and not _differ_in_numbers(near[0], missing):  # of other steps, all are of interest
        return f"did you mean {printable(os.path.join(parent, near[0]), one_line=True)}?"
    return f"{printable(parent, one_line=True)} has {some(steps.natural_sort(names, signed=False))}"


@_quietly
def checkpoint_around(path: str) -> str | None:
    """Return the checkpoint that a path lies in, or None; see `contents.checkpoint_around`."""
    found = contents.checkpoint_around(of_text(path))
    return None if found is None else found.path


@_quietly
def unexpanded_home(path: str) -> str | None:
    """Return the expression to write for a path whose ``~``, as the caller wrote it, became a directory's name."""
    shown = os.path.relpath(path)
    return f"os.path.expanduser({shown!r})" if shown != os.path.expanduser(shown) else None


def _is_like_a_typo(name: str, other: str) -> bool:
    """Return whether names differ a little, or one longer word does; sibling runs differ in numbers (run_1, run_2)."""
    if _differ_in_numbers(name, other):
        return False
    if difflib.SequenceMatcher(None, name, other).ratio() >= _ALIKE:
        return True
    words = itertools.zip_longest(_WORDS.split(name), _WORDS.split(other), fillvalue="")
    differing = [pair for pair in words if pair[0] != pair[1]]
    if len(differing) != 1 or min(map(len, differing[0])) < _SHORTEST_WORD:
        return False
    return difflib.SequenceMatcher(None, *differing[0]).ratio() >= _LIKE_A_TYPO


def _differ_in_numbers(name: str, other: str) -> bool:
    return _DIGITS.sub("", name) == _DIGITS.sub("", other)


def some(names: list[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = len(names) - _MAX_NAMES
    return ", ".join([printable(name, one_line=True) for name in names[:_MAX_NAMES]]) + (
        f" and {more} more" if more > 0 else ""
    )


def _checkpoint_at(folder: str) -> str | None:
    """Return a folder that is a checkpoint or holds some, or the path of its only msgpack file; else None."""
    if saved_steps.is_checkpoint(of_text(folder)):
        return folder
    numbered = itertools.islice(_numbered(folder), _MAX_FOLDERS)
    if any(saved_steps.is_checkpoint(of_text(path)) for path in numbered):
        return folder
    file = foreign.msgpack_file_in(of_text(folder))
    return None if file is None else file.path


def _numbered(folder: str) -> Iterator[str]:
    for name in os.listdir(folder):
        if not steps.is_foreign(name) and steps.split_step(name):
            yield os.path.join(folder, name)
