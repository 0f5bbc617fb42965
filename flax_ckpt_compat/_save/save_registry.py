"""Keep a registry of the background saves of this process, from which every failure is raised once, or logged."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import os
import weakref
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core import thread_pools
from flax_ckpt_compat._core.location import Location

_log = logging.getLogger("flax_ckpt_compat")
# Changed by single operations only: with a lock, a signal handler that saves could wait for ever.
_saves: list[BackgroundSave] = []
_raised: weakref.WeakSet[Future[Any]] = weakref.WeakSet()  # their failures, without their managers


@dataclasses.dataclass(eq=False, slots=True)
class BackgroundSave:
    """One background save that is running, or that failed and whose failure was not raised yet."""

    directory: str  # real path of the checkpoint's directory
    lookup_timeout: float | None  # seconds that look-ups wait for a multi-process save; None if they do not
    task: thread_pools.Task
    # Its outcome, which later calls raise; None if the manager has none: then only the manager can raise it.
    future: Future[Any] | None = None
    is_logged: bool = False

    @property
    def done(self) -> bool:
        """Return whether the save has ended, or was cancelled."""
        return self.task.done if self.future is None else self.future.done()

    def wait(self, timeout: float = math.inf) -> None:
        """Wait until it has ended or was cancelled, at most so many seconds; run nothing."""
        if self.future is None:
            self.task.wait(timeout)
        else:
            wait_for(self.future, timeout)


def wait_for(future: Future[Any], timeout: float = math.inf) -> None:
    """Wait until a future is done or cancelled, at most so many seconds."""
    with suppress(CancelledError, TimeoutError):
        future.exception(None if math.isinf(timeout) else timeout)


def add(save: BackgroundSave) -> None:
    """Register a save whose outcome later calls raise, or for which look-ups wait."""
    _saves.append(save)


def all_saves() -> list[BackgroundSave]:
    """Return all registered saves, into any directory."""
    return list(_saves)


def raise_failures(directory: Location) -> None:
    """Raise the first failure of a background save into this directory that was not raised yet; never wait."""
    for save in saves_into(directory):
        if save.future is not None and save.done:
            _drop(save)
            _raised.add(save.future)
            save.future.result()


def saves_into(directory: Location) -> list[BackgroundSave]:
    """Return the registered saves into a directory; forget those that ended and whose outcome only a manager has."""
    if not _saves:
        return []
    try:
        real = directory.resolve()
    except ValueError:  # no directory can have this name
        return []
    for save in list(_saves):
        if save.future is None and save.done:
            _drop(save)
    return [save for save in list(_saves) if save.directory == real]


def was_raised(future: Future[Any]) -> bool:
    """Return whether `raise_failures` has raised the outcome of a save."""
    return future in _raised


def mark_seen(future: Future[Any]) -> None:
    """Forget a save whose outcome its manager raises."""
    for save in list(_saves):
        if save.future is future:
            _drop(save)


def _failure_of(future: Future[Any]) -> BaseException | None:
    return CancelledError("cancelled") if future.cancelled() else future.exception()


def _drop(save: BackgroundSave) -> None:
    with suppress(ValueError):  # another thread did
        _saves.remove(save)


# The threads of these saves exist in the parent only: waiting for them in a child would never end.
os.register_at_fork(after_in_child=_saves.clear)


@atexit.register
def log_failures(*, running: bool = True) -> None:
    """Log failures that nothing has raised, and, with ``running``, saves that have not ended."""
    # At the exit, the interpreter has joined all pools, unless Ctrl-C interrupted it.
    for save in list(_saves):
        error: BaseException | None = None
        if save.future is not None and save.done:
            error = _failure_of(save.future)
        elif save.future is not None and running:
            error = RuntimeError("it has not ended before the interpreter does")
        if error is not None and not save.is_logged:
            save.is_logged = True
            _log.error("A background save of a checkpoint into %s failed: %r", save.directory, error, exc_info=error)
