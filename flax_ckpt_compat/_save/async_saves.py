"""Run async saves: Flax's AsyncManager, and a registry from which every failure is raised or logged."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core import paths, thread_pools
from flax_ckpt_compat._core.errors import CleanupError
from flax_ckpt_compat._discovery import absence, listing, locating

if TYPE_CHECKING:  # a listing of a directory loads this module, but not jax and flax
    from flax_ckpt_compat._save.request import SaveManager, SaveRequest

_log = logging.getLogger("flax_ckpt_compat")
_lock = threading.Lock()
_saves: list[_BackgroundSave] = []
_QUEUED_SECONDS = 60.0
_managers: weakref.WeakSet[AsyncManager] = weakref.WeakSet()


class AsyncManager:
    """Tracker of background saves: pass one to every ``save_checkpoint(…, async_manager=)``.

    In a forked process, it starts anew: the saves that run are its parent's.

    Attributes:
        executor: the thread pool; the interpreter waits for it at exit.
        save_future: the latest save, or None.
    """

    def __init__(self, max_workers: int = 1):
        self._max_workers = max_workers
        self._start()
        _managers.add(self)

    def _start(self) -> None:
        self.executor: ThreadPoolExecutor = ThreadPoolExecutor(max_workers=self._max_workers)
        self.save_future: Future[Any] | None = None

    def wait_previous_save(self) -> None:
        """Block until the previous save has ended.

        Raises:
            Exception: the failure of that save, once, however long ago it ended.
        """
        future, self.save_future = self.save_future, None
        if future is not None:
            _mark_seen(future)
            future.result()

    def save_async(self, task: Callable[[], Any]) -> None:
        """Run a task in the background, after the previous one, as ``save_future``.

        Raises:
            RuntimeError: the executor was shut down, or the interpreter exits; `save_checkpoint` then saves at once.
        """
        self.wait_previous_save()
        self.save_future = self.executor.submit(task)


@dataclasses.dataclass(eq=False, slots=True)
class _BackgroundSave:
    """One background save that is running, or that failed and whose failure was not raised yet.

    Attributes:
        directory: real path of the checkpoint's directory.
        lookup_timeout: maximum seconds that look-ups wait for a multi-process save; None if they do not wait.
        future: outcome of the save.
        raises: later calls raise its failure. False if the manager has no future: then only the manager can raise it.
        thread: identifier of the running thread.
    """

    directory: str
    lookup_timeout: float | None
    future: Future[Any]
    raises: bool = False
    thread: int | None = None


def start(
    manager: SaveManager, directory: str, task: Callable[[], Any], *, lookup_timeout: float | None = None
) -> None:
    """Start a save with a manager, or in the foreground if its pool takes no tasks; see `_BackgroundSave`."""

    def run() -> None:
        save.thread = threading.get_ident()
        try:
            task()
        except CleanupError as error:  # raised, it would prevent the next save
            _log.error("%s", error)

    once = thread_pools.Once(run)
    save = _BackgroundSave(_key(directory), lookup_timeout, once.future)
    try:
        manager.save_async(once)
    except RuntimeError as error:
        if not thread_pools.is_refusal(error):
            raise
        # The pool was shut down, or an exit handler or a late thread calls this.
        _log.info("Saving into %s in the foreground, because the thread pool takes no tasks: %s", directory, error)
        once()
        return
    future = getattr(manager, "save_future", None)
    if isinstance(future, Future):
        save.future, save.raises = future, True
    if save.raises or lookup_timeout is not None:
        with _lock:
            _saves.append(save)
    if not save.raises:
        save.future.add_done_callback(_mark_seen)


def wait_for_earlier_saves(request: SaveRequest) -> None:
    """Wait for the background saves before this one, so that commits keep the order of the calls; raise a failure."""
    from flax_ckpt_compat._save import checkpointer_adapter

    if request.async_manager:
        wait(request.async_manager)
    checkpointer_adapter.wait_for_checkpointer(request.orbax_checkpointer, request.directory)
    wait_for_async_saves(request.directory)


def wait_for_pending_saves(ckpt_dir: str, prefix: str, orbax_checkpointer: Any = None) -> None:
    """Wait before a restore for background saves to its directory, and raise the errors of our failed ones.

    Of our saves, multiprocess ones are waited for, so that all processes find the same checkpoint, and others where
    there is no checkpoint yet: a restore would return its target, and a program train from initial values.
    """
    from flax_ckpt_compat._save import checkpointer_adapter

    directories = {listing.checkpoint_dir(ckpt_dir, prefix).directory, os.path.dirname(paths.absolute(ckpt_dir))}
    for directory in directories:
        checkpointer_adapter.wait_for_checkpointer(orbax_checkpointer, directory)
        wait_for_multiprocess_saves(directory)
    running = [save for one in directories for save in _saves_into(one) if save.raises and not save.future.done()]
    if running and isinstance(locating.find(ckpt_dir, None, prefix), absence.Absence):
        for save in running:
            _wait_for(save)
    for directory in directories:
        raise_failures(directory)


def _wait_for(save: _BackgroundSave) -> None:
    """Wait until a save has ended, unless this thread runs it; for one that has not begun, a limited time."""
    if save.thread != threading.get_ident():
        with suppress(CancelledError, futures.TimeoutError):
            save.future.exception(_QUEUED_SECONDS)  # it may be queued behind this very restore
        if save.thread is not None:
            with suppress(CancelledError):
                save.future.exception()


def wait_for_multiprocess_saves(directory: str) -> None:
    """Wait until this process's multi-process background saves into a directory were published or failed.

    Call this before every look-up in the directory, so that processes that called the same saves find the same
    checkpoints. It waits for no other process, and raises no failure.
    """
    for save in _saves_into(directory):
        if save.lookup_timeout is not None and save.thread != threading.get_ident():
            with suppress(CancelledError, futures.TimeoutError):
                save.future.exception(save.lookup_timeout)


def wait(manager: Any) -> None:
    """Wait for a manager's previous save and raise its failure, even if the manager itself would not."""
    future = getattr(manager, "save_future", None)
    try:
        manager.wait_previous_save()
    finally:
        if isinstance(future, Future):
            _mark_seen(future)
            if manager.save_future is future:
                manager.save_future = None
    # Flax's own manager drops the failure of a save that has already ended.
    if isinstance(future, Future):
        future.result()


def wait_for_async_saves(directory: str) -> None:
    """Wait for every background save into a directory; raise the failure of the first one that failed."""
    for save in _saves_into(directory):
        if save.raises:  # a manager without a future may never run its task
            # futures.wait() would never return for a future that its pool's shutdown cancelled.
            with suppress(CancelledError):
                save.future.exception()
    raise_failures(directory)


def raise_failures(directory: str) -> None:
    """Raise the first failure of a background save into this directory that was not raised yet; never wait."""
    for save in _saves_into(directory):
        if save.raises and save.future.done():
            _mark_seen(save.future)
            save.future.result()


def _key(directory: str) -> str:
    return paths.storage_of(directory).resolve(directory)


def _saves_into(directory: str) -> list[_BackgroundSave]:
    if not _saves:
        return []
    try:
        key = _key(directory)
    except ValueError:  # no directory can have this name
        return []
    with _lock:
        return [save for save in _saves if save.directory == key]


def _mark_seen(future: Future[Any]) -> None:
    with _lock:
        _saves[:] = [save for save in _saves if save.future is not future]


def _clear_after_fork() -> None:
    # The threads of these saves exist in the parent only: waiting for them here would never end, nor would tasks that
    # a pool queues for them.
    global _lock
    _lock = threading.Lock()
    _saves.clear()
    for manager in list(_managers):
        manager._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_clear_after_fork)


@atexit.register
def _log_failures() -> None:
    # By now, the interpreter has joined all pools.
    for save in _saves:
        error = save.future.exception() if save.future.done() and not save.future.cancelled() else None
        if error is not None:
            _log.error("A background save of a checkpoint into %s failed: %r", save.directory, error, exc_info=error)
