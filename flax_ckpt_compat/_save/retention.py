"""Retain: remove what a committed save replaces and what ``keep`` evicts; the same for every kind of save."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress

from jax import monitoring

from flax_ckpt_compat._core.errors import CleanupError, ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.local import atomic, temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import contents, saved_steps, steps
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir, log_once
from flax_ckpt_compat._save import interrupted_saves
from flax_ckpt_compat._save.request import SaveRequest

_log = logging.getLogger("flax_ckpt_compat")
_CLOCK_SECONDS = 2.0  # by which the clock of a file system may be behind, and to which some round
_last_saved = time.time()
# Directory → name → prefix that this process saved it with: ``v23`` is step 23 of ``v`` and step 3 of ``v2``. One
# neither counts nor removes checkpoints of the other. Other processes cannot know, so a save warns. Changed by single
# operations only: with a lock, a signal handler or a fork that saves could wait for ever.
_saved: dict[str, dict[str, str]] = {}


def retain(request: SaveRequest) -> None:
    """Clean up after the commit. CleanupError: it is saved; ConcurrentWriteError: another program has removed it."""
    global _last_saved
    try:
        if request.step is not None:
            _saved.setdefault(request.directory.resolve(), {})[request.name] = request.checkpoint_dir.prefix
        if request.step is not None and request.number is not None:
            _remove_others(request)
        elif not request.location.is_remote and not request.location.exists():
            raise _removed_error(request)
    finally:  # the checkpoint is saved even if the clean-up failed
        since, event = request.start - _last_saved, "/jax/checkpoint/write/duration_since_last_checkpoint_secs"
        monitoring.record_event_duration_secs(event, since)
        _last_saved = request.start


def _remove_others(request: SaveRequest) -> None:
    """Remove other checkpoints; a failure does not stop the removal of the rest."""
    checkpoint_dir, failures = request.checkpoint_dir, list[StorageError]()
    try:
        listed = checkpoint_dir.listed()
        names = saved_steps.all_names(listed)
        if request.name not in names and not request.location.is_remote and request.location.exists():
            names.append(request.name)  # a listing misses what is being replaced
        counted, doomed = _counted_and_doomed(request, listed, names)
        if request.name in counted:
            failures += _remove(request, listed, doomed, names)
            if not checkpoint_dir.directory.is_remote:  # else a live writer cannot be detected
                failures += _remove_orphaned_arrays(checkpoint_dir, names)
        elif not _may_be_evicted(request):
            raise _removed_error(request)
    except ConcurrentWriteError:
        raise
    except StorageError as error:
        failures.append(error)
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        message = f"{request.path} was saved, but old checkpoints could not be removed: {failures[0]}{more}"
        remedy = "The next save tries again; or delete them yourself"
        raise CleanupError(f"{message}. {remedy}", path=request.path, errno=failures[0].errno) from failures[0]


def _is_complete(location: Location) -> bool:
    return contents.contents_of(location).is_complete


def _counted_and_doomed(request: SaveRequest, listed: CheckpointDir, names: list[str]) -> tuple[set[str], list[str]]:
    """Return the steps of this prefix that `saved_steps.counted_steps` counts, and which to remove.

    A look opens a file or lists a directory. So the first ones are at what decides if all count: the doomed; the step
    before each, from which ``keep_every_n_steps`` counts; the last ones, of which ``keep`` stay; and newer ones."""
    others, with_items = saved_by_other_prefixes(listed), request.orbax_checkpointer is not None
    ordered = [name for name in steps.in_order(names, listed.prefix) if name not in others]
    doomed = _to_remove(request, ordered)
    last_from = ordered.index(request.name) if request.name in ordered else 0
    if doomed:
        last_from = max(0, min(last_from - 1, len(ordered) - len(doomed) - request.keep))
    going = set(doomed)
    before = [before for before, name in itertools.pairwise(ordered) if name in going]
    deciding = {*going, *before, *ordered[last_from:]}
    counted = saved_steps.counted_steps(listed, list(deciding), with_items=with_items)
    if doomed and counted.keys() != deciding:
        rest = [name for name in ordered if name not in deciding]
        counted |= saved_steps.counted_steps(listed, rest, with_items=with_items)
        doomed = _to_remove(request, [name for name in ordered if name in counted])
    return {*counted}, [name for name in doomed if counted[name]]


def _may_be_evicted(request: SaveRequest) -> bool:
    """Return whether a writer of a newer step, or with ``overwrite`` of one since, may have removed this one."""
    if request.location.is_remote:
        return True
    if request.location.exists():
        return _is_complete(request.location)  # a listing may miss names that change
    names = saved_steps.all_names(request.checkpoint_dir)
    for name in steps.in_order(names, request.checkpoint_dir.prefix):
        with suppress(OSError):  # it vanished
            path, began = (request.directory / name).path, request.start - _CLOCK_SECONDS
            if request.is_newer(name) or os.path.getmtime(path) > began:
                return True
    return any(map(temporaries.parse, names))


def _removed_error(request: SaveRequest) -> ConcurrentWriteError:
    what = f"{request.path} was saved, and is not there, or not whole, any more: another program removes what is in"
    remedy = "Stop that, and save again; no older checkpoint was removed"
    return ConcurrentWriteError(f"{what} this directory. {remedy}", path=request.path, errno=errno.ENOENT)


def _to_remove(request: SaveRequest, ordered: list[str]) -> list[str]:
    """Return which of the complete steps to remove: replaced ones, newer ones (``overwrite``), old ones (``keep``)."""
    saved, prefix, number = request.name, request.checkpoint_dir.prefix, request.number or 0
    numbers = {name: steps.step_of(name, prefix) or 0 for name in ordered}
    replaced = set[str]()
    if request.overwrite:
        last = number if request.replace_only_checkpoints else math.inf
        # Two names can mean one step (7 and 7.0): overwriting replaces the other name too.
        replaced = {name for name, step in numbers.items() if number <= step <= last and name != saved}
    kept = sorted(numbers.keys() - replaced, key=lambda name: (numbers[name], name == saved, name))
    # Never remove the one just saved, even if enough newer ones stay.
    evicted = expired(kept, prefix, request.keep, request.keep_every_n_steps)
    return [name for name in ordered if name in replaced] + [name for name in evicted if name != saved]


def _remove(request: SaveRequest, listed: CheckpointDir, names: list[str], present: list[str]) -> list[StorageError]:
    """Remove checkpoints and their arrays while the one just saved is there; return the failures."""
    if not names:  # no need to lock the directory
        return []
    begun, is_local = list[str](), not listed.directory.is_remote
    # The writer of a newer step in a store, where nothing can be locked, may evict this one at the same time.
    is_watched = not is_local and any(map(request.is_newer, names))
    directory = request.directory if is_watched else listed.directory

    def going() -> Iterator[str]:
        """Yield names, and note them, while the one just saved is there: two writers may evict each other's."""
        with atomic.locked(directory.path) if is_local else nullcontext():
            for name in names:
                if (is_local and not request.location.exists()) or (is_watched and not _is_complete(request.location)):
                    return
                _log.info("Removing checkpoint at %s", directory / name)
                begun.append(name)
                yield name

    if is_local:
        atomic.remove_set_aside(directory.path, present, names)
    # The main files first: without its arrays one would look like a checkpoint and not restore.
    failed = directory.discard(going())
    removed = [name for name in begun if name not in failed]
    arrays = [name + steps.ARRAYS_POSTFIX for name in removed]
    # In a store, two requests for each.
    failed |= directory.discard(arrays if is_local else [name for name in arrays if name in present])
    for name in removed:
        _saved.get(directory.resolve(), {}).pop(name, None)
    if is_watched and not _is_complete(request.location):
        message = f"{request.path} was saved, and removed by another process that saves newer steps to this folder"
        raise ConcurrentWriteError(f"{message}; save again, from one process only", path=request.path)
    return list(failed.values())


def _remove_orphaned_arrays(checkpoint_dir: CheckpointDir, names: list[str]) -> list[StorageError]:
    """Remove arrays of steps whose file is missing for a day: before, a copy of both may be under way, or a save."""
    failures, end = list[StorageError](), steps.ARRAYS_POSTFIX
    arrays = steps.in_order([name.removesuffix(end) for name in names if name.endswith(end)], checkpoint_dir.prefix)
    for one in interrupted_saves.in_folder(checkpoint_dir.directory, [name + end for name in arrays]):
        if not one.kept:
            _log.info("Removing orphaned arrays at %s", one.location)
            try:
                interrupted_saves.remove(one)
            except StorageError as error:
                failures.append(error)
    return failures


def expired(names: Sequence[str], prefix: str, keep: int, keep_every_n_steps: float | None) -> list[str]:
    """Return the checkpoints that retention removes, of a prefix's numeric ones, oldest first (`in_order`)."""
    if keep == 0:
        return []
    if not keep_every_n_steps:
        return list(names[:-keep])
    removed, last_kept = list[str](), -math.inf
    for name in names[:-keep]:
        step = steps.step_of(name, prefix)
        # Step 0 counts as "no step" here, as in legacy Flax: keep_every_n_steps never keeps it.
        if step and step - last_kept >= keep_every_n_steps:
            last_kept = step
        else:
            removed.append(name)
    return removed


def saved_by_other_prefixes(checkpoint_dir: CheckpointDir) -> set[str]:
    """Return names that look like steps of this prefix, but were saved with another one; warn of them once."""
    prefix, directory = checkpoint_dir.prefix, checkpoint_dir.directory
    known = [(name, other) for name, other in list(_saved.get(directory.resolve(), {}).items()) if other != prefix]
    found = {name: other for name, other in known if steps.step_of(name, prefix) is not None}
    for other in set(found.values()):
        first, second = sorted((prefix, other))
        both = f"The prefixes {first!r} and {second!r}"
        what = f"{both} are both saved to {directory}, where some names are steps of both"
        why = "other processes and later runs confuse their checkpoints"
        remedy = f"Use prefixes of which none is the start of another, such as {first + '_'!r}"
        log_once((directory.path, first, second), f"{what}: {why}. {remedy}")
    return set(found)
