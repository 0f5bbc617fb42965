"""Check what a save may overwrite, and remove old checkpoints after its commit; the same for both formats."""

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

# Names of files and folders in checkpoints of Orbax's releases, other than those of items and of single arrays.
_ORBAX_NAMES = {
    layout.STEP_METADATA, layout.TREE_METADATA, layout.SHARDING, layout.STRINGS, layout.ARRAY_METADATAS,
    layout.MSGPACK_FILE, layout.COMMIT_FILE, layout.DATA_DIRECTORY, layout.DESCRIPTOR, layout.JAX_KEY,
    layout.MANIFEST, layout.NUMPY_KEY, layout.V1_MARKER, *layout.JSON_FILES,
}  # fmt: skip
# How often to check a checkpoint that other writers keep replacing.
_ATTEMPTS = 100
_log = logging.getLogger("flax_ckpt_compat")


def check_directory(checkpoint_dir: CheckpointDir, name: str, step: Any) -> None:
    """Raise if the directory is itself a checkpoint: no look-up would find another one inside.

    Raises:
        InvalidCheckpointError: it is a checkpoint. A file of any other name fails later, when directories are made.
    """
    directory = checkpoint_dir.directory
    parent, own_name = os.path.split(directory)
    is_step = steps.step_of(own_name, checkpoint_dir.prefix) is not None
    if not (is_step and paths.isfile(directory)) and not _is_orbax(directory):
        return
    attempted = f"cannot save {'' if step is None else f'step {step} '}to {checkpoint_dir.path(name)}: {directory}"
    message = f"{attempted} is itself a checkpoint; pass the directory that holds it, {parent}"
    raise InvalidCheckpointError(message, path=checkpoint_dir.path(name), step=step)


def _steps_of(checkpoint_dir: CheckpointDir) -> list[str]:
    """Return the complete steps of a prefix, oldest first, without those that another prefix saved in this process."""
    others = prefixes.saved_by_other_prefixes(checkpoint_dir)
    return [name for name in listing.complete_steps(checkpoint_dir) if name not in others]


def check_overwrite(checkpoint_dir: CheckpointDir, name: str, step: Any, *, removes_newer: bool = True) -> None:
    """Raise, for a save without ``overwrite``, if its step exists or is older than the newest.

    Args:
        checkpoint_dir: directory and prefix.
        name: name of the checkpoint.
        step: as the caller gave it.
        removes_newer: whether ``overwrite`` would remove newer checkpoints, for the message.

    Raises:
        InvalidCheckpointError: the step exists or is older.
    """
    path = checkpoint_dir.path(name)
    if paths.lexists(path) and not _is_empty(path):
        missing = listing.what_is_missing(path)
        state = f"is there, incomplete ({missing})" if missing else "already exists"
        raise InvalidCheckpointError(
            f"cannot save step {step}: {path} {state}; pass overwrite=True to replace it.", path=path, step=step
        )
    step_number = steps.step_of(name, checkpoint_dir.prefix)
    last = (
        None
        if step_number is None
        else listing.newest_step(checkpoint_dir, but=prefixes.saved_by_other_prefixes(checkpoint_dir))
    )
    if step_number is None or last is None:
        return
    newest = _step(last, checkpoint_dir)
    if step_number <= newest:
        state = "is the same step" if step_number == newest else "is newer"
        raise InvalidCheckpointError(
            f"cannot save step {step}: {checkpoint_dir.path(last)} {state}; "
            f"pass overwrite=True to save it anyway{' and remove what is not older' if removes_newer else ''}.",
            path=path,
            step=step,
        )


def check_not_foreign(checkpoint_dir: CheckpointDir, name: str, step: Any) -> None:
    """Raise if the path is a directory in a format other than Flax's or Orbax's, even with ``overwrite``.

    Raises:
        InvalidCheckpointError: it is such a directory.
    """
    path = checkpoint_dir.path(name)
    format_name = _check_stable(path, detect.foreign_look)
    if format_name is not None:
        raise InvalidCheckpointError(
            f"cannot save to {path}: it is not a checkpoint of Flax or Orbax, but looks like {format_name}, and only "
            "checkpoints are replaced; save under another name, or remove it yourself.",
            path=path,
            step=step,
        )


def check_replaceable(checkpoint_dir: CheckpointDir, name: str, step: Any, *, overwrite: bool) -> None:
    """Raise if something is there, unless ``overwrite`` is given and all of it is one checkpoint.

    Raises:
        InvalidCheckpointError: it may not be replaced.
    """
    path = checkpoint_dir.path(name)
    attempted = f"cannot save to {path}: " if step is None else f"cannot save step {step} to {path}: "
    if not paths.lexists(path) or _is_empty(path):
        return
    foreign = _check_stable(path, _foreign_reason)
    if foreign:
        hint = ", pass step= to save into this directory" if step is None and paths.isdir(path) else ""
        remedy = f"save under another name{hint}, or remove it yourself"
        message = f"{attempted}{foreign}, and only checkpoints are replaced; {remedy}."
        raise InvalidCheckpointError(message, path=path, step=step)
    if not overwrite:
        raise InvalidCheckpointError(f"{attempted}it exists; pass overwrite=True to replace it.", path=path, step=step)


def _check_stable(path: str, check: Callable[[str], str | None]) -> str | None:
    """Return the reason that ``check`` finds against a path, repeated while other writers replace what is there."""
    for _ in range(_ATTEMPTS):
        before = _file_id(path)
        if before is None and not paths.is_url(path):
            return None  # another writer has just removed it
        try:
            reason = check(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if _file_id(path) != before:
                continue
            raise
        if reason is None or _file_id(path) == before:
            return reason
    return "other writers keep replacing it"


def _file_id(path: str) -> tuple[int, ...] | None:
    """Return an identifier of a local file or directory that changes when it is replaced; None if there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        status = os.lstat(path)
        return status.st_dev, status.st_ino, status.st_mode, status.st_ctime_ns  # inodes are used again
    return None


def _foreign_reason(path: str) -> str | None:
    """Return why the path is not exactly one checkpoint, or None if it is."""
    if paths.isdir(path):
        if not _is_orbax(path):
            return "nothing in that directory marks it as one checkpoint"
        extra = _extra_files(path)
        return f"it holds {', '.join(extra[:3])} besides a checkpoint" if extra else None
    if not paths.isfile(path):
        return "it is no regular file"
    try:
        opening.open_item(detect.Item(Format.MSGPACK, path)).close()
    except CheckpointError as error:
        return f"it does not open as a checkpoint ({error})"
    return None


def _is_orbax(path: str) -> bool:
    """Return whether a directory is certainly one Orbax checkpoint, by a marker that nothing else has."""
    # The cheap check first: it does not read through a directory of many checkpoints.
    return paths.isdir(path) and not detect.has_no_orbax_marker(path) and detect.is_orbax_directory(path)


def _extra_files(path: str) -> list[str]:
    """Return the names in an Orbax checkpoint that are no part of it."""
    try:
        items = detect.detect(path).items
    except CheckpointError:
        items = {}
    found = []
    for name in sorted(paths.listdir(path)):
        child = os.path.join(path, name)
        if name in _ORBAX_NAMES or commit.is_marker(name) or name.startswith(layout.PROCESS_PREFIX):
            continue
        if detect.is_array(child):
            continue
        if name not in items or not paths.isdir(child):
            found.append(name)
        else:
            found += [os.path.join(name, inner) for inner in _extra_files(child)]
    return found


def _is_empty(path: str) -> bool:
    """Return whether nothing is lost by replacing a path: a zero-byte file, an empty or unfinished directory."""
    if paths.is_url(path) and paths.isdir(path):
        return commit.is_unfinished(paths.listdir(path))
    if os.path.islink(path):
        return False
    with atomic.translated(path), suppress(FileNotFoundError, NotADirectoryError):
        # isfile: devices and pipes have size 0 too.
        return not paths.listdir(path) if paths.isdir(path) else paths.isfile(path) and paths.getsize(path) == 0
    return False  # another writer has just replaced it


def clean_up(
    checkpoint_dir: CheckpointDir,
    saved: str,
    keep: int,
    overwrite: bool,
    keep_every_n_steps: float | None,
    remove_newer: bool,
) -> None:
    """Remove what ``saved`` replaced, then newer checkpoints, then old ones (``keep``), after the commit.

    Raises:
        CleanupError: the checkpoint is saved, but others could not be listed or removed.
    """
    try:
        failures = _clean_up(checkpoint_dir, saved, keep, overwrite, keep_every_n_steps, remove_newer)
    except StorageError as error:
        failures = [error]
    if failures:
        path, first = checkpoint_dir.path(saved), failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        message = (
            f"{path} was saved, but old checkpoints could not be removed: {first}{more}. Correct the permissions, "
            "and the next save removes them; or delete them yourself"
        )
        raise CleanupError(message, path=path, errno=first.errno) from first


def _clean_up(
    checkpoint_dir: CheckpointDir,
    saved: str,
    keep: int,
    overwrite: bool,
    keep_every_n_steps: float | None,
    remove_newer: bool,
) -> list[StorageError]:
    """Remove the checkpoints and return the failures; a failure does not stop the removal of others."""
    step_number = steps.step_of(saved, checkpoint_dir.prefix)
    if step_number is None:
        return []  # not a numbered step: it evicts nothing
    ordered = _steps_of(checkpoint_dir)
    if saved not in ordered:
        return []  # another writer removed it meanwhile, and cleans up itself
    # Two names can mean one step (7 and 7.0): overwriting replaces the other name too.
    replaced = [name for name in ordered if name != saved and overwrite and _step(name, checkpoint_dir) == step_number]
    newer = [name for name in ordered if remove_newer and _step(name, checkpoint_dir) > step_number]
    # Sort the one just saved as the newest of its step.
    remaining = set(ordered) - {*replaced, *newer}
    kept = sorted(remaining, key=lambda name: (_step(name, checkpoint_dir), name == saved, name))
    # Never remove the one just saved, even if enough newer ones stay.
    old = [name for name in steps.expired(kept, checkpoint_dir.prefix, keep, keep_every_n_steps) if name != saved]
    failures = []
    for name in replaced + newer + old:
        _log.info("Removing checkpoint at %s", checkpoint_dir.path(name))
        try:
            _remove(checkpoint_dir, name)
        except StorageError as error:
            failures.append(error)
    if not paths.is_url(checkpoint_dir.directory):  # in a store, a live writer cannot be detected
        _remove_orphaned_arrays(checkpoint_dir)
    return failures


def _step(name: str, checkpoint_dir: CheckpointDir) -> float:
    step = steps.step_of(name, checkpoint_dir.prefix)
    assert step is not None  # only numeric checkpoints are listed
    return step


def _remove(checkpoint_dir: CheckpointDir, name: str) -> None:
    # The main file first: without its arrays it would look like a checkpoint and not restore.
    for doomed in (name, name + steps.ARRAYS_POSTFIX):
        if paths.is_url(checkpoint_dir.directory) or paths.lexists(checkpoint_dir.path(doomed)):
            _remove_path(checkpoint_dir.path(doomed))
    prefixes.forget(checkpoint_dir, name)


def _remove_path(path: str) -> None:
    try:
        paths.discard(path)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):  # another process cleans the same directory
            raise


def _remove_orphaned_arrays(checkpoint_dir: CheckpointDir) -> None:
    """Remove array folders without a main file, except those that a live writer is about to complete."""
    for name in listing.names_in(checkpoint_dir):
        main = name.removesuffix(steps.ARRAYS_POSTFIX)
        if main == name or steps.step_of(main, checkpoint_dir.prefix) is None or _has_file(checkpoint_dir, main):
            continue
        if not atomic.has_live_writer(checkpoint_dir.path(main)) and not _has_file(checkpoint_dir, main):
            _log.info("Removing orphaned arrays at %s", checkpoint_dir.path(name))
            _remove_path(checkpoint_dir.path(name))


def _has_file(checkpoint_dir: CheckpointDir, name: str) -> bool:
    """Return whether a msgpack file has this name; directories of Orbax's format have no arrays beside them."""
    return paths.lexists(checkpoint_dir.path(name)) and not paths.isdir(checkpoint_dir.path(name))
