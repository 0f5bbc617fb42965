"""Locate the checkpoint that a caller means, and read it while others write, rotate and replace checkpoints.

Where there is none, what lies one level up or down from a local path tells what may be meant: these looks never raise,
and object stores are not asked.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat._discovery import contents, foreign, saved_steps, steps
from flax_ckpt_compat._discovery.contents import STEP_DIRECTORY, ChangedError, Contents, Layout, State
from flax_ckpt_compat._discovery.orbax_directory import names_in
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir, Directory, is_checkpoint, log_once

_Result = TypeVar("_Result")
_RECOVERED = "lost+found"  # of a file system's root; others may not list it
_MAY_BE_PARTS = {*layout.TREE_ITEMS, layout.DATA_DIRECTORY, layout.MSGPACK_FILE}
_EVENTS = re.compile(r"(.*\.)?tfevents\..*", re.DOTALL)  # of TensorBoard, which name hosts and end in numbers
_DIGITS = re.compile(r"\d+")
_MAX_NAMES = 5
_KEEP_MORE = "keep more checkpoints (keep=), or save less often"
_MAX_FOLDERS = 20  # to look into, and names to look at in each
_SIMILAR, _TYPO = 0.6, 0.81  # of difflib: names to suggest; and those for which a restore is no first run
_FAILURES = (OSError, ValueError, errors.CheckpointError)


@dataclasses.dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """The located checkpoint."""

    location: Location  # with the listing that it was found in
    named: bool  # the caller named it, by its step or its own path; else it is the latest


@dataclasses.dataclass(frozen=True, slots=True)
class Absence:
    """Reason why a look-up found nothing."""

    why: str
    remedy: str = ""  # what to do next, or empty
    is_start: bool = False  # as in a program's first run, which is no warning
    lost: Contents | None = None  # the newest incomplete checkpoint, where no save can have left it

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}" if self.remedy else self.why

    def error(self, path: Location, before: str = "", after: str = "") -> errors.CheckpointNotFoundError:
        """Return this as an error, between other words."""
        remedy = "" if self.remedy else "; pass a checkpoint, or a directory of checkpoints"
        return errors.CheckpointNotFoundError(f"{before}{self}{remedy}{after}", path=path.path)


def find(checkpoint_dir: CheckpointDir, step: Any) -> LocatedCheckpoint | Absence:
    """Return the checkpoint that a caller means, or why there is none; raise for an explicit step that is absent."""
    look = _latest if step is None else functools.partial(_of_step, step=step)
    return saved_steps.in_one_listing(checkpoint_dir, look, root=checkpoint_dir.root)


def _latest(directory: Directory) -> LocatedCheckpoint | Absence:
    checkpoint_dir, root = directory.checkpoint_dir, directory.checkpoint_dir.root
    if not _exists(root):
        return absent(root)
    # A stray file called "checkpoint" must not hide the checkpoints beside it, so those of the prefix go first unless
    # the directory has a marker that only Orbax writes.
    if not root.isdir() or contents.is_certainly_orbax(root):
        return LocatedCheckpoint(root, named=True)
    if (latest := saved_steps.latest_of(directory)) is not None:
        return LocatedCheckpoint(latest.location, named=False)
    if _is_checkpoint(root):
        return LocatedCheckpoint(root, named=True)
    # In a store, an upload may not have ended.
    lost = directory.newest(lambda found: found.state is State.INCOMPLETE and not found.is_upload)
    absence = none_in(checkpoint_dir, directory.names)
    return dataclasses.replace(absence, lost=None if lost is None else directory.classify(lost))


def _is_checkpoint(root: Location) -> bool:
    """Return whether a directory is one checkpoint, also without the markers of newer releases.

    What the system refuses to list in it is not an item, unless its name, or that of the directory, may be one's."""
    try:
        found = contents.contents_of(root)
        if found.layout is Layout.ARRAYS and contents.checkpoint_around(root):
            return False  # arrays of a tree
        # Or Orbax has begun to write items to it: those of whole checkpoints do not count.
        begun = tuple(item + layout.TEMPORARY for item in layout.TREE_ITEMS)
        has_begun = found.is_marked or any(name.startswith(begun) for name in names_in(root))
    except errors.PermissionDeniedError as error:  # which tells nothing about what is beside the path
        folder, name = os.path.split(error.path or root.path)
        is_step = STEP_DIRECTORY.fullmatch(root.name) and name != _RECOVERED
        if folder != root.path or name in _MAY_BE_PARTS or is_step:
            raise
        return False
    is_unfinished = found.state is State.TEMPORARY or (found.state is State.INCOMPLETE and has_begun)
    return found.is_one_checkpoint or is_unfinished


def _exists(path: Location) -> bool:
    """Return whether a path exists, after restoring what a dead writer set aside."""
    if (is_there := path.exists()) or path.is_remote:
        return is_there
    try:
        names = path.parent.listdir()
    except errors.StorageError as error:
        if isinstance(error, errors.PermissionDeniedError) or error.errno in presence.CANNOT_BE_THERE:
            return False
        raise
    path.parent.restore_set_aside(names)
    return path.exists()


def _of_step(directory: Directory, step: Any) -> LocatedCheckpoint:
    checkpoint_dir, root = directory.checkpoint_dir, directory.checkpoint_dir.root
    one = steps.of_replicated(step)
    if one is not step and _exists(found := checkpoint_dir.directory / f"{checkpoint_dir.prefix}{step}"):
        return LocatedCheckpoint(found, named=True)  # Flax has whole arrays in names
    if _exists(path := checkpoint_dir.directory / (checkpoint_dir.prefix + steps.step_text(one))):
        return LocatedCheckpoint(path, named=True)
    number = steps.step_of(path.name, checkpoint_dir.prefix)
    if alike := [entry for entry in directory.steps or directory.other_family if entry.step == number]:
        return LocatedCheckpoint(alike[-1].location, named=True)  # the same number, spelt otherwise
    missing = f"Matching checkpoint not found: {path}"
    if available := [entry.text for entry in saved_steps.available_in(directory)]:
        known = f"available steps: {', '.join(available)}; pass one of them"
    elif root.isfile() or contents.is_certainly_orbax(root):
        known = f"{root} is itself a checkpoint; leave out the step"
    else:
        raise none_in(checkpoint_dir, directory.names).error(path, f"{missing} (", ")")
    raise errors.CheckpointNotFoundError(f"{missing} ({known})", path=path.path)


def read_found(
    checkpoint_dir: CheckpointDir,
    step: Any,
    read: Callable[[Location], _Result],
    otherwise: Callable[[], _Result] | None = None,
    doing: str = "restore",
) -> _Result:
    """Locate a checkpoint and read it; again, or the new latest, if it was removed or replaced meanwhile.

    ``otherwise`` returns the result if there is no checkpoint; None raises. ``doing`` completes "nothing to …"."""
    removed: Location | None = None  # what an earlier attempt located, and its error
    cause: Exception | None = None
    subject = (checkpoint_dir.root.path, checkpoint_dir.given_prefix, "absent")

    def attempt(directory: Directory) -> _Result:
        nonlocal removed, cause
        found = _latest(directory) if step is None else _of_step(directory, step)
        if isinstance(found, Absence):
            if removed is None:
                return _nothing(found, otherwise, doing, checkpoint_dir.root, subject)
            # Never return the target here: the program would go on training from initial parameters.
            gone = f"{removed} was removed while it was read, and there is no other: {found.why}; {_KEEP_MORE}"
            raise errors.CheckpointNotFoundError(gone, path=removed.path) from cause
        log_once(subject, None)
        before = found.location.identity()
        try:
            with foreign.naming_lfs_pointers(found.location):
                return read(found.location.listed())
        except Exception as error:
            if not _has_changed(found, before, error, checkpoint_dir):
                _add_older_step(error, found, checkpoint_dir)
                raise
            if found.named and not is_there(found.location):
                raise removed_error(found.location) from error
            removed, cause = found.location.unlisted(), error
            if not directory.tolerant:
                raise ChangedError from error
            what = f"{removed} was removed or replaced while it was read, as were {saved_steps.ROUNDS - 1} before it"
            raise errors.CheckpointNotFoundError(f"{what}; {_KEEP_MORE}", path=removed.path) from error

    return saved_steps.in_one_listing(checkpoint_dir, attempt, root=checkpoint_dir.root)


def _add_older_step(error: Exception, latest: LocatedCheckpoint, checkpoint_dir: CheckpointDir) -> None:
    """Add to an error of damage in the latest step which older one looks complete."""
    path = latest.location.path
    # `diff` reads one checkpoint within the other, and rules read more: an error may be of another one.
    is_of_it = f"{getattr(error, 'path', None)}/".startswith((f"{path}/", f"{path}{steps.ARRAYS_POSTFIX}/"))
    if latest.named or not is_of_it or not isinstance(error, foreign.UNUSABLE):
        return
    with suppress(errors.CheckpointError, OSError):
        directory = Directory(checkpoint_dir, tolerant=True)  # a look of its own: steps may be gone since
        if one := directory.newest(lambda found: found.is_complete and found.location != latest.location):
            errors.add_sentence(error, f"The newest other one that looks complete is {one.name}: pass step {one.text}.")


def _nothing(
    found: Absence, otherwise: Callable[[], _Result] | None, doing: str, root: Location, subject: Hashable
) -> _Result:
    if (lost := found.lost) is not None:
        # No save that is interrupted leaves one on a file system under its final name: a program must not begin anew.
        what = f"{lost.location} is the newest checkpoint of its directory, and not complete: {lost.why}; no other is"
        remedy = "Files were lost, or not all were copied: restore them from a backup, or, to begin anew, move it away."
        raise errors.IncompleteCheckpointError(f"{what} complete. {remedy}", path=lost.location.path)
    if otherwise is None:
        raise found.error(root, f"nothing to {doing}: ")
    message = f"Nothing to restore, so the target is returned unchanged: {found}"
    log_once(subject, message, logging.INFO if found.is_start else logging.WARNING)
    return otherwise()


def _has_changed(found: LocatedCheckpoint, before: Any, error: Exception, checkpoint_dir: CheckpointDir) -> bool:
    """Return whether an error may be due to another program removing or replacing the checkpoint."""
    location = found.location
    is_replaced = isinstance(error, errors.ReplacedError) and error.path == location.path
    is_stale = location.is_remote and getattr(error, "errno", None) == errno.ESTALE
    if is_replaced or is_stale or (location.listing is not None and location.watch()()):  # since a store was listed
        return True
    location = location.unlisted()
    if not is_there(location) or location.identity() != before:
        return True
    if found.named:
        return False
    try:
        now = _latest(Directory(checkpoint_dir.listed(checkpoint_dir.root)))
    except (ChangedError, errors.CheckpointError) as failure:
        return isinstance(failure, ChangedError)
    return isinstance(now, Absence) or now.location.path != location.path


@contextmanager
def unchanged(path: Location, since: Callable[[], bool] | None = None) -> Iterator[Callable[[], bool]]:
    """Raise `ReplacedError` after the block if the directory was replaced during it, which may mix the two.

    ``since``, which an earlier block yielded, extends that back to its beginning. An error of a checkpoint that was
    removed meanwhile becomes CheckpointNotFoundError."""
    is_replaced = path.watch() if since is None else since
    cause = None
    try:
        yield is_replaced
    except Exception as error:
        if not is_there(path):
            raise removed_error(path) from error
        # In a store objects may just be lost, as the error says; a restore tries again, and finds out.
        if (since is not None and path.is_remote) or not is_replaced():
            raise
        cause = error
    if cause is not None or is_replaced():
        raise errors.ReplacedError(f"{path} was replaced while it was read; restore again", path=path.path) from cause


def is_there(path: Location) -> bool:
    """Return whether a path exists, or may exist."""
    try:
        return path.unlisted().exists()
    except errors.StorageError:
        return True


def removed_error(path: Location) -> errors.CheckpointNotFoundError:
    """Return the error for a named checkpoint that was removed, or is a link to nothing."""
    removed = f"{path} was removed while it was read; restore another step, or keep more checkpoints (keep=)"
    dangling = presence.dangling_link(path.path)
    return errors.CheckpointNotFoundError(dangling or removed, path=path.path)


def absent(path: Location) -> Absence:
    """Explain that a path does not exist, by what is beside it, or beside the first folder on the way that is not."""
    missing = f"{path} does not exist"
    if path.is_remote:
        return Absence(missing, is_start=True)
    with suppress(*_FAILURES):
        if outer := contents.checkpoint_around(path):
            return Absence(f"{missing}, and would be a part of the checkpoint {outer}", "pass that path")
        above, name, rest = path.parent, path.name, ""
        while not above.isdir():
            above, name, rest = above.parent, above.name, f"/{name}{rest}"
        if name.startswith("~"):
            return Absence(missing, "'~' is not expanded, so pass os.path.expanduser(path)")
        names = [one for one in steps.natural_sort(above.listdir(), signed=False) if not one.startswith(".")]
        alike = difflib.get_close_matches(name, names, _MAX_NAMES, _SIMILAR)
        # A run whose name differs from others in numbers alone is a new one.
        alike = [one for one in alike if _DIGITS.sub("", one) != _DIGITS.sub("", name) or is_checkpoint(above / one)]
        if alike and above.path != "/":
            is_typo = difflib.SequenceMatcher(None, name, alike[0]).ratio() >= _TYPO
            full = [one + rest for one in alike if os.path.exists(os.path.join(above.path, one + rest))]
            meant = a_few([(above / one).path for one in full or alike])
            return Absence(missing, f"did you mean {meant}?", not is_typo)
        there = "" if above.path == "/" else f"; {printable(above.path, one_line=True)} has {a_few(names) or 'nothing'}"
        return Absence(missing, f"check the path{there}", is_start=True)
    return Absence(missing, is_start=True)


def no_directory(path: Location) -> Absence:
    """Explain that a path is not a directory: it does not exist, or is a file."""
    if dangling := presence.dangling_link(path.path):
        why, _, remedy = dangling.rpartition(": ")
        return Absence(why, remedy)
    if path.exists():
        return Absence(f"{path} is not a directory", f"pass one, perhaps {path.parent}")
    return absent(path)


def none_in(checkpoint_dir: CheckpointDir, names: list[str]) -> Absence:
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
            prefixes = " or ".join(dict.fromkeys(repr(head + other) for other, _ in others))
            there = ", ".join(other + step for other, step in others)
            return Absence(f"{none}; there are {there}", f"did you mean the prefix {prefixes}?")
        shown = [name for name in steps.natural_sort(names, signed=False) if not name.startswith(".")]
        folders = (path for path in map(directory.__truediv__, shown) if not path.is_remote and path.isdir())
        if below := [one.path for one in itertools.islice(folders, _MAX_FOLDERS) if _holds_checkpoint(one)]:
            return Absence(f"{none}; there are checkpoints at {a_few(below)}", "pass one of these paths")
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
    found = _others(checkpoint_dir, saved_steps.all_names(checkpoint_dir))
    return [prefix + step for prefix, step in itertools.islice(found, _MAX_NAMES)]


def _others(checkpoint_dir: CheckpointDir, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield prefix and step of the complete numeric checkpoints of other prefixes, oldest first."""
    found = filter(None, map(steps.split_step, itertools.filterfalse(steps.is_foreign, names)))
    for other, step in sorted(found, key=lambda parts: (parts[0], float(parts[1]))):
        name = other + step
        if steps.step_of(name, checkpoint_dir.prefix) is None and is_checkpoint(checkpoint_dir.directory / name):
            yield other, step


def a_few(names: list[str]) -> str:
    """Return the first names as text, and how many more there are."""
    shown = ", ".join(printable(name, one_line=True) for name in names[:_MAX_NAMES])
    return f"{shown} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else shown
