"""Overwrite checks before a save and clean-up after its commit; the same for both formats."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core import paths, steps
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import CheckpointError, CleanupError, StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import commit
from flax_ckpt_compat._discovery import detect, listing, opening
from flax_ckpt_compat._discovery.listing import CheckpointDir
from flax_ckpt_compat._save import prefixes
from flax_ckpt_compat.errors import InvalidCheckpointError

# The names that Orbax's releases give to the parts of a checkpoint, beside those of items and of single arrays.
_PARTS = {
    layout.STEP_METADATA, layout.TREE_METADATA, layout.SHARDING, layout.STRINGS, layout.ARRAY_METADATAS,
    layout.MSGPACK_FILE, layout.COMMIT_FILE, layout.DATA_DIRECTORY, layout.DESCRIPTOR, layout.JAX_KEY,
    layout.MANIFEST, layout.NUMPY_KEY, layout.V1_MARKER, *layout.JSON_FILES,
}  # fmt: skip
# How often to look at a checkpoint that others replace meanwhile.
_LOOKS = 100
_log = logging.getLogger("flax_ckpt_compat")


def check_directory(where: CheckpointDir, name: str, step: Any) -> None:
    """Refuse a directory that is itself a checkpoint, in which no look-up would find another one.

    Raises:
        InvalidCheckpointError: it is a checkpoint. A file of any other name is refused by whoever makes directories.
    """
    directory = where.directory
    parent, own_name = os.path.split(directory)
    is_step = steps.step_of(own_name, where.prefix) is not None
    if not (is_step and paths.isfile(directory)) and not _is_orbax(directory):
        return
    what = f"cannot save {'' if step is None else f'step {step} '}to {where.path(name)}: {directory}"
    message = f"{what} is itself a checkpoint; pass the directory that holds it, {parent}"
    raise InvalidCheckpointError(message, path=where.path(name), step=step)


def _steps_of(where: CheckpointDir) -> list[str]:
    """Return the complete steps of a prefix, oldest first, without those that another prefix saved in this process."""
    others = prefixes.of_others(where)
    return [name for name in listing.complete_steps(where) if name not in others]


def check_overwrite(where: CheckpointDir, name: str, step: Any, *, removes_newer: bool = True) -> None:
    """Refuses a save without ``overwrite`` whose step exists or is older than the newest.

    Args:
        where: directory and prefix.
        name: of the checkpoint.
        step: as the caller gave it.
        removes_newer: whether ``overwrite`` would remove what is newer, for the message.

    Raises:
        InvalidCheckpointError: before anything is written.
    """
    path = where.path(name)
    if paths.lexists(path) and not _is_void(path):
        missing = listing.what_is_missing(path)
        state = f"is there, incomplete ({missing})" if missing else "already exists"
        raise InvalidCheckpointError(
            f"cannot save step {step}: {path} {state}; pass overwrite=True to replace it.", path=path, step=step
        )
    mine = steps.step_of(name, where.prefix)
    last = None if mine is None else listing.newest_step(where, but=prefixes.of_others(where))
    if mine is None or last is None:
        return
    newest = _step(last, where)
    if mine <= newest:
        state = "is the same step" if mine == newest else "is newer"
        raise InvalidCheckpointError(
            f"cannot save step {step}: {where.path(last)} {state}; "
            f"pass overwrite=True to save it anyway{' and remove what is not older' if removes_newer else ''}.",
            path=path,
            step=step,
        )


def check_not_foreign(where: CheckpointDir, name: str, step: Any) -> None:
    """Refuse to save to a directory in a format that is not Flax's or Orbax's, also with ``overwrite``.

    Raises:
        InvalidCheckpointError: that directory is there.
    """
    path = where.path(name)
    look = _settled(path, detect.foreign_look)
    if look is not None:
        raise InvalidCheckpointError(
            f"cannot save to {path}: it is not a checkpoint of Flax or Orbax, but looks like {look}, and only "
            "checkpoints are replaced; save under another name, or remove it yourself.",
            path=path,
            step=step,
        )


def check_replaceable(where: CheckpointDir, name: str, step: Any, *, overwrite: bool) -> None:
    """Refuses to replace what is there, unless ``overwrite`` is given and all of it is one checkpoint.

    Raises:
        InvalidCheckpointError: it may not be replaced.
    """
    path = where.path(name)
    what = f"cannot save to {path}: " if step is None else f"cannot save step {step} to {path}: "
    if not paths.lexists(path) or _is_void(path):
        return
    foreign = _settled(path, _what_is_foreign)
    if foreign:
        hint = ", pass step= to save into this directory" if step is None and paths.isdir(path) else ""
        remedy = f"save under another name{hint}, or remove it yourself"
        message = f"{what}{foreign}, and only checkpoints are replaced; {remedy}."
        raise InvalidCheckpointError(message, path=path, step=step)
    if not overwrite:
        raise InvalidCheckpointError(f"{what}it exists; pass overwrite=True to replace it.", path=path, step=step)


def _settled(path: str, judge: Callable[[str], str | None]) -> str | None:
    """Return what ``judge`` says of a path, judged again while other writers replace what is there."""
    for _ in range(_LOOKS):
        before = _identity(path)
        if before is None and not paths.is_url(path):
            return None  # another writer has just removed it
        try:
            verdict = judge(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if _identity(path) != before:
                continue
            raise
        if verdict is None or _identity(path) == before:
            return verdict
    return "other writers keep replacing it"


def _identity(path: str) -> tuple[int, ...] | None:
    """Return what tells a local path's file or directory from its successor; None where there is nothing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        status = os.lstat(path)
        return status.st_dev, status.st_ino, status.st_mode, status.st_ctime_ns  # inodes are used again
    return None


def _what_is_foreign(path: str) -> str | None:
    """What speaks against this being one checkpoint and nothing else; None where nothing does."""
    if paths.isdir(path):
        if not _is_orbax(path):
            return "nothing in that directory marks it as one checkpoint"
        strangers = _strangers(path)
        return f"it holds {', '.join(strangers[:3])} besides a checkpoint" if strangers else None
    if not paths.isfile(path):
        return "it is no regular file"
    try:
        opening.open_item(detect.Item(Format.MSGPACK, path)).close()
    except CheckpointError as error:
        return f"it does not open as a checkpoint ({error})"
    return None


def _is_orbax(path: str) -> bool:
    """True for a directory that is certainly one checkpoint of Orbax, by a marker that nothing else has."""
    # The cheap question first: a directory of many checkpoints is not gone through.
    return paths.isdir(path) and not detect.is_doubtful(path) and detect.is_orbax_directory(path)


def _strangers(path: str) -> list[str]:
    """What lies in a checkpoint of Orbax and is no part of it."""
    try:
        items = detect.detect(path).items
    except CheckpointError:
        items = {}
    found = []
    for name in sorted(paths.listdir(path)):
        child = os.path.join(path, name)
        if name in _PARTS or commit.is_mark(name) or name.startswith(layout.PROCESS_PREFIX) or detect.is_array(child):
            continue
        if name not in items or not paths.isdir(child):
            found.append(name)
        else:
            found += [os.path.join(name, inner) for inner in _strangers(child)]
    return found


def _is_void(path: str) -> bool:
    """True for what holds nothing at all and may be replaced: a zero-byte file, an empty or unfinished directory."""
    if paths.is_url(path) and paths.isdir(path):
        return commit.is_unfinished(paths.listdir(path))
    if os.path.islink(path):
        return False
    with atomic.translated(path), suppress(FileNotFoundError, NotADirectoryError):
        # Devices and pipes have no size either.
        return not paths.listdir(path) if paths.isdir(path) else paths.isfile(path) and paths.getsize(path) == 0
    return False  # another writer has just replaced it


def clean_up(
    where: CheckpointDir, saved: str, keep: int, overwrite: bool, keep_every_n_steps: float | None, remove_newer: bool
) -> None:
    """Remove what ``saved`` replaced, then newer checkpoints, then old ones (``keep``), after the commit.

    Raises:
        CleanupError: the checkpoint is saved, but others could not be listed or removed.
    """
    try:
        failures = _clean_up(where, saved, keep, overwrite, keep_every_n_steps, remove_newer)
    except StorageError as error:
        failures = [error]
    if failures:
        path, first = where.path(saved), failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        message = (
            f"{path} was saved, but old checkpoints could not be removed: {first}{more}. Delete them yourself, or "
            "correct the permissions: the next save removes them"
        )
        raise CleanupError(message, path=path, errno=first.errno) from first


def _clean_up(
    where: CheckpointDir, saved: str, keep: int, overwrite: bool, keep_every_n_steps: float | None, remove_newer: bool
) -> list[StorageError]:
    """Remove the checkpoints and return what went wrong; one that cannot be removed does not stop the others."""
    mine = steps.step_of(saved, where.prefix)
    if mine is None:
        return []  # ``prefix + text`` stands outside the order of steps: it evicts nothing
    ordered = _steps_of(where)
    if saved not in ordered:
        return []  # another writer removed it meanwhile: it is theirs to decide what stays
    # Two names can spell one step (7 and 7.0): overwriting the step replaces the other spelling too.
    replaced = [name for name in ordered if name != saved and overwrite and _step(name, where) == mine]
    newer = [name for name in ordered if remove_newer and _step(name, where) > mine]
    # The one just saved is the newest of its step; retention must not take it for the older one.
    rest = set(ordered) - {*replaced, *newer}
    kept = sorted(rest, key=lambda name: (_step(name, where), name == saved, name))
    # Where newer ones stay, it may not be among the newest, and yet nobody wants it removed at once.
    old = [name for name in steps.expired(kept, where.prefix, keep, keep_every_n_steps) if name != saved]
    failures = []
    for name in replaced + newer + old:
        _log.info("Removing checkpoint at %s", where.path(name))
        try:
            _remove(where, name)
        except StorageError as error:
            failures.append(error)
    if not paths.is_url(where.directory):  # where nothing tells whether their writer lives
        _collect_orphans(where)
    return failures


def _step(name: str, where: CheckpointDir) -> float:
    step = steps.step_of(name, where.prefix)
    assert step is not None  # only numeric checkpoints are listed
    return step


def _remove(where: CheckpointDir, name: str) -> None:
    # The main file goes first: without its arrays it would look like a checkpoint and not restore.
    for doomed in (name, name + steps.ARRAYS_POSTFIX):
        if paths.is_url(where.directory) or paths.lexists(where.path(doomed)):
            _discard(where.path(doomed))
    prefixes.forget(where, name)


def _discard(path: str) -> None:
    try:
        paths.discard(path)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):  # another process cleans the same directory
            raise


def _collect_orphans(where: CheckpointDir) -> None:
    """Removes array folders whose main file is gone, but for those whose main file is about to come."""
    for name in listing.names_in(where):
        main = name.removesuffix(steps.ARRAYS_POSTFIX)
        if main == name or steps.step_of(main, where.prefix) is None or _has_file(where, main):
            continue
        if not atomic.has_live_writer(where.path(main)) and not _has_file(where, main):
            _log.info("Removing orphaned arrays at %s", where.path(name))
            _discard(where.path(name))


def _has_file(where: CheckpointDir, name: str) -> bool:
    """True where a msgpack file has this name; the directories of the other format have no arrays beside them."""
    return paths.lexists(where.path(name)) and not paths.isdir(where.path(name))
