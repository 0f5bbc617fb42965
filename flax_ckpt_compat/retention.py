"""Overwrite checks before a save and clean-up after its commit; the same for both formats."""

from __future__ import annotations

import logging
import os
from typing import Any

from flax_ckpt_compat import _listing
from flax_ckpt_compat._core import files, steps
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._listing import Place
from flax_ckpt_compat.errors import InvalidCheckpointError

_log = logging.getLogger("flax_ckpt_compat")


def check_overwrite(where: Place, name: str, step: Any) -> None:
    """Refuses a save without ``overwrite`` whose step exists or is older than the newest.

    Raises:
        InvalidCheckpointError: before anything is written.
    """
    path = where.path(name)
    if os.path.lexists(path) and not _is_void(path):
        missing = _listing.what_is_missing(path)
        state = f"is there, incomplete ({missing})" if missing else "already exists"
        raise InvalidCheckpointError(
            f"cannot save step {step}: {path} {state}; pass overwrite=True to replace it.", path=path, step=step
        )
    mine, complete = steps.step_of(name, where.prefix), _listing.complete_steps(where, quiet=True)
    if mine is None or not complete:
        return
    newest = _step(complete[-1], where)
    if mine <= newest:
        state = "is the same step" if mine == newest else "is newer"
        raise InvalidCheckpointError(
            f"cannot save step {step}: {where.path(complete[-1])} {state}; "
            "pass overwrite=True to save it anyway and remove what is not older.",
            path=path,
            step=step,
        )


def _is_void(path: str) -> bool:
    """True for what holds nothing at all and may be replaced: a zero-byte file, an empty directory."""
    if os.path.islink(path):
        return False
    with files.translated(path):
        return not os.listdir(path) if os.path.isdir(path) else os.path.getsize(path) == 0


def clean_up(where: Place, saved: str, keep: int, overwrite: bool, keep_every_n_steps: float | None) -> None:
    """Removes newer checkpoints (``overwrite``), then old ones (``keep``), after ``saved`` was committed."""
    mine = steps.step_of(saved, where.prefix)
    if mine is None:
        return  # ``prefix + text`` stands outside the order of steps: it evicts nothing
    ordered = _listing.complete_steps(where)
    if saved not in ordered:
        return  # another writer removed it meanwhile: it is theirs to decide what stays
    # Two names can spell one step (7 and 7.0): overwriting the step replaces the other spelling too.
    newer = [name for name in ordered if name != saved and _step(name, where) >= mine] if overwrite else []
    # The one just saved is the newest of its step; retention must not take it for the older one.
    kept = sorted(set(ordered) - set(newer), key=lambda name: (_step(name, where), name == saved, name))
    for name in newer + steps.expired(kept, where.prefix, keep, keep_every_n_steps):
        _log.info("Removing checkpoint at %s", where.path(name))
        _remove(where, name)
    _collect_orphans(where)


def _step(name: str, where: Place) -> float:
    step = steps.step_of(name, where.prefix)
    assert step is not None  # only numeric checkpoints are listed
    return step


def _remove(where: Place, name: str) -> None:
    # The main file goes first: without its arrays it would look like a checkpoint and not restore.
    for doomed in (name, name + steps.ARRAYS_POSTFIX):
        if os.path.lexists(where.path(doomed)):
            _discard(where.path(doomed))


def _discard(path: str) -> None:
    try:
        files.discard(path)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):  # another process cleans the same directory
            raise


def _collect_orphans(where: Place) -> None:
    """Removes array folders whose main file is gone."""
    names = set(_listing.names_in(where))
    for name in names:
        main = name.removesuffix(steps.ARRAYS_POSTFIX)
        if main != name and main not in names and steps.step_of(main, where.prefix) is not None:
            _log.info("Removing orphaned arrays at %s", where.path(name))
            _discard(where.path(name))
