"""Locate the checkpoint that a caller means, and read it while others write, rotate and replace checkpoints."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    ReplacedError,
    StorageError,
    UnrecognizedFormatError,
    add_sentence,
)
from flax_ckpt_compat._core.local import atomic, presence
from flax_ckpt_compat._core.local.presence import CANNOT_BE_THERE
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import is_denied, storage_error
from flax_ckpt_compat._discovery import contents, foreign, not_found, step_lookup
from flax_ckpt_compat._discovery.contents import Contents, State
from flax_ckpt_compat._discovery.log_once import log_once
from flax_ckpt_compat._discovery.not_found import Absence
from flax_ckpt_compat._discovery.orbax_directory import STEP_DIRECTORY, Layout
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

_Result = TypeVar("_Result")
_RECOVERED = "lost+found"  # of a file system's root; others may not list it
_MAY_BE_PARTS = {*layout.TREE_ITEMS, layout.DATA_DIRECTORY, layout.MSGPACK_FILE}
_ROUNDS = 100  # of a read, each of which fails if its checkpoint is removed or replaced meanwhile
_UNUSABLE = (CorruptCheckpointError, UnrecognizedFormatError, IncompleteCheckpointError)


@dataclasses.dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """The located checkpoint."""

    location: Location  # with the listing that it was found in
    named: bool  # the caller named it, by its step or its own path; else it is the latest

    @property
    def path(self) -> str:
        """Return the path, for errors."""
        return self.location.path


def find(checkpoint_dir: CheckpointDir, step: Any) -> LocatedCheckpoint | Absence:
    """Return the checkpoint that a caller means, or why there is none; raise for an explicit step that is absent."""
    if step is not None:
        listed = checkpoint_dir.listed_with(checkpoint_dir.root.listed())
        return LocatedCheckpoint(_step_path(listed, _text_of(step, listed)), named=True)
    return step_lookup.list_again_while_it_changes(
        checkpoint_dir.root, lambda listed, last: _find(checkpoint_dir.listed_with(listed), last)
    )


def _find(checkpoint_dir: CheckpointDir, last: bool) -> LocatedCheckpoint | Absence:
    root = checkpoint_dir.root
    if not _exists(root):
        return not_found.of_directory(root)
    # A stray file called "checkpoint" must not hide the checkpoints beside it, so those of the prefix go first unless
    # the directory has a marker that only Orbax writes.
    if not root.isdir() or contents.is_certainly_orbax(root):
        return LocatedCheckpoint(root, named=True)
    directory = step_lookup.Directory(checkpoint_dir, tolerant=last)
    latest = step_lookup.latest_of(directory)
    if latest is not None:
        return LocatedCheckpoint(latest.location, named=False)
    if _is_checkpoint(root):
        return LocatedCheckpoint(root, named=True)
    absence = not_found.of_checkpoints(checkpoint_dir, directory.names)
    return dataclasses.replace(absence, lost=step_lookup.newest_lost(directory))


def _is_checkpoint(root: Location) -> bool:
    """Return whether a directory is one checkpoint, also without the markers of newer releases.

    What the system refuses to list in it is not an item, unless its name, or that of the directory, may be one's."""
    try:
        found = contents.contents_of(root)
        if found.layout is Layout.ARRAYS and contents.checkpoint_around(root):
            return False  # arrays of a tree
        if found.is_one_checkpoint or found.state is State.TEMPORARY:
            return True
        if found.state is State.FOREIGN:
            return found.is_readable
        return found.state is State.INCOMPLETE and (found.is_marked or _has_begun(root))
    except StorageError as error:
        folder, name = os.path.split(error.path or root.path)
        is_step = STEP_DIRECTORY.fullmatch(root.name) and name != _RECOVERED
        if not is_denied(error) or folder != root.path or name in _MAY_BE_PARTS or is_step:
            raise
        return False


def _has_begun(root: Location) -> bool:
    """Return whether Orbax has begun to write items to a directory: those of whole checkpoints do not count."""
    begun = tuple(item + layout.TEMPORARY for item in layout.TREE_ITEMS)
    return any(name.startswith(begun) for name in root.listdir())


def _exists(path: Location) -> bool:
    """Return whether a path exists, after restoring what a dead writer set aside."""
    if path.exists():
        return True
    if path.is_remote:
        return False
    parent = path.parent
    try:
        names = parent.listdir()
    except ValueError:  # a NUL in the path
        return False
    except OSError as error:
        failure = storage_error(parent.path, error, "listed")
        if not is_denied(failure) and error.errno not in CANNOT_BE_THERE:
            raise failure from error
        return False
    atomic.restore_set_aside(parent.path, names)
    return path.exists()


def _text_of(step: Any, checkpoint_dir: CheckpointDir) -> str:
    """Return a step as it is in the checkpoint's name; Flax has whole arrays there."""
    one = steps.of_replicated(step)
    as_flax = f"{step}" if one is not step else ""
    if as_flax and _exists(checkpoint_dir.path(checkpoint_dir.prefix + as_flax)):
        return as_flax
    return steps.step_text(one)


def _step_path(checkpoint_dir: CheckpointDir, text: str) -> Location:
    root, path = checkpoint_dir.root, checkpoint_dir.path(checkpoint_dir.prefix + text)
    if _exists(path):
        return path
    number = steps.parse_step(text)
    found = None if number is None else step_lookup.find_step(checkpoint_dir, number)
    if found is not None:
        return found.location
    available = [entry.text for entry in step_lookup.available(checkpoint_dir)]
    if why := path.why_too_long():
        known, has_remedy = f"{why}; shorten the step or the prefix", True
    elif available:
        known, has_remedy = f"available steps: {', '.join(available)}", True
    elif root.isfile() or contents.is_certainly_orbax(root):
        known, has_remedy = f"{root} is itself a checkpoint; leave out step=", True
    else:
        absent = not_found.of_checkpoints(checkpoint_dir).error(checkpoint_dir.directory)
        known, has_remedy = str(absent), absent.has_remedy
    raise CheckpointNotFoundError(
        f"Matching checkpoint not found: {path} ({known})", path=path.path, has_remedy=has_remedy
    )


def read_found(
    checkpoint_dir: CheckpointDir,
    step: Any,
    read: Callable[[Location], _Result],
    otherwise: Callable[[], _Result] | None = None,
    doing: str = "restore",
) -> _Result:
    """Locate a checkpoint and read it; again if it was removed or replaced meanwhile.

    Step None is the latest, and the new latest if that was removed. ``read`` reads the checkpoint at a location, inside
    `unchanged` if it reads several files. ``otherwise`` returns the result if there is no checkpoint; None raises.
    ``doing`` completes "nothing to …"."""
    removed: tuple[Location, Exception] | None = None
    for _ in range(_ROUNDS):
        found = find(checkpoint_dir, step) if removed is None else _find_again(checkpoint_dir, step, *removed)
        if isinstance(found, Absence):
            return _nothing(checkpoint_dir, found, otherwise, doing)
        log_once(_subject(checkpoint_dir), None)
        before = found.location.identity()
        try:
            with foreign.naming_lfs_pointers(found.location):
                return read(found.location.listed())
        except Exception as error:
            if not _has_changed(found, before, error, lambda: find(checkpoint_dir, step)):
                if not found.named and isinstance(error, _UNUSABLE):
                    _add_older_step(error, checkpoint_dir, found.location)
                raise
            if found.named and not is_there(found.location):
                raise removed_error(found.location) from error
            removed = found.location.unlisted(), error
    assert removed is not None
    path, cause = removed
    message = f"{path} was removed or replaced while it was read, as were {_ROUNDS - 1} before it"
    raise CheckpointNotFoundError(
        f"{message}; keep more checkpoints (keep=), or save less often", path=path.path
    ) from cause


def _add_older_step(error: CheckpointError, checkpoint_dir: CheckpointDir, path: Location) -> None:
    """Add to the error of the latest step which older one looks complete."""
    with suppress(CheckpointError, OSError):
        older = step_lookup.newest_complete(step_lookup.Directory(checkpoint_dir, tolerant=True), but=path)
        if older is not None:
            add_sentence(
                error, f"The newest other checkpoint that looks complete is {older.name}: pass step={older.text}."
            )


def _find_again(checkpoint_dir: CheckpointDir, step: Any, path: Location, cause: Exception) -> LocatedCheckpoint:
    found = find(checkpoint_dir, step)
    if isinstance(found, Absence):
        # Never return the target here: the program would go on training from initial parameters.
        raise found.error(path, f"{path} was removed while it was read, and there is no other: ") from cause
    return found


def _nothing(
    checkpoint_dir: CheckpointDir, found: Absence, otherwise: Callable[[], _Result] | None, doing: str
) -> _Result:
    if found.lost is not None:
        raise IncompleteCheckpointError(_only_lost(found.lost), path=found.lost.path)
    if otherwise is None:
        raise found.error(checkpoint_dir.root, f"nothing to {doing}: ")
    message = f"Nothing to restore, so the target is returned unchanged: {found}"
    log_once(_subject(checkpoint_dir), message, found.level)
    return otherwise()


def _only_lost(lost: Contents) -> str:
    """Return the error for an incomplete checkpoint without a complete one beside it.

    No save that is interrupted leaves one under its final name on a file system, so a program must not begin anew."""
    return (
        f"{lost.path} is the newest checkpoint of its directory, and not complete: {lost.why}; no other is complete. "
        "Files were lost, or not all were copied: restore them from a backup, or, to begin anew, move it away."
    )


def _subject(checkpoint_dir: CheckpointDir) -> tuple[str, str, str]:
    return checkpoint_dir.root.path, checkpoint_dir.given_prefix, "absent"


def _has_changed(
    found: LocatedCheckpoint, before: Any, error: Exception, find_now: Callable[[], LocatedCheckpoint | Absence]
) -> bool:
    """Return whether an error may be due to another program removing or replacing the checkpoint."""
    of_itself = isinstance(error, ReplacedError) and error.path == found.path
    is_replaced = of_itself or _is_rewritten(found, error)
    location = found.location.unlisted()
    if is_replaced or not is_there(location) or location.identity() != before:
        return True
    if found.named:
        return False
    try:
        now = find_now()
    except CheckpointError:
        return False
    return isinstance(now, Absence) or now.path != found.path


def _is_rewritten(found: LocatedCheckpoint, error: Exception) -> bool:
    """Return whether a store has another version of an object, or other objects, than when it was listed."""
    if not found.location.is_remote:
        return False
    if getattr(error, "errno", None) == errno.ESTALE:
        return True
    return found.location.listing is not None and found.location.watch()()


@contextmanager
def unchanged(path: Location, since: Callable[[], bool] | None = None) -> Iterator[Callable[[], bool]]:
    """Raise `ReplacedError` after the block if the directory was replaced during it, which may mix the two.

    With ``since``, which an earlier block yielded, it may not have been replaced since that one began, either."""
    is_replaced = path.watch() if since is None else since
    cause = None
    try:
        yield is_replaced
    except Exception as error:
        # In a store objects may just be lost, as the error says; a restore tries again, and finds out.
        if (since is not None and path.is_remote) or not is_replaced():
            raise
        cause = error
    if cause is not None or is_replaced():
        raise ReplacedError(f"{path} was replaced while it was read; restore again", path=path.path) from cause


def is_there(path: Location) -> bool:
    """Return whether a path exists, or may exist."""
    try:
        return path.unlisted().exists()
    except StorageError:
        return True


def removed_error(path: Location) -> CheckpointNotFoundError:
    """Return the error for a named checkpoint that was removed, or is a link to nothing."""
    removed = f"{path} was removed while it was read; restore another step, or keep more checkpoints (keep=)"
    dangling = presence.dangling_link(path.path)
    return CheckpointNotFoundError(dangling or removed, path=path.path, has_remedy=dangling is not None)


@contextmanager
def reporting_removal(path: Location) -> Iterator[None]:
    """Raise CheckpointNotFoundError for an error of reading a checkpoint that was removed meanwhile."""
    try:
        yield
    except Exception as error:
        if is_there(path):
            raise
        raise removed_error(path) from error
