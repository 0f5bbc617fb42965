"""Run async saves, and wait for them: Flax's AsyncManager; `save_registry` has those that run or failed."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core import thread_pools
from flax_ckpt_compat._core.errors import CleanupError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import locating, not_found
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir
from flax_ckpt_compat._save import save_registry
from flax_ckpt_compat._save.save_registry import BackgroundSave

if TYPE_CHECKING:  # a listing of a directory loads this module, but not jax and flax
    from flax_ckpt_compat._save.request import SaveManager, SaveRequest

_log = logging.getLogger("flax_ckpt_compat")
_QUEUED_SECONDS = 60.0  # how long a restore waits for a save that may be queued behind it
_AT_EXIT_SECONDS = 1.0
_managers: weakref.WeakSet[AsyncManager] = weakref.WeakSet()
# Threads that hand a save to a pool: a signal handler that interrupts one would wait for its lock for ever.
_submitting: list[int] = []


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
        if self.save_future is not None:
            _raise_failure(self, self.save_future)

    def save_async(self, task: Callable[[], Any]) -> Future[Any]:
        """Run a task in the background, after the previous one, as ``save_future``.

        Returns:
            The task's future; threads that share a manager replace each other's ``save_future``.

        Raises:
            RuntimeError: the executor was shut down, or the interpreter exits; `save_checkpoint` then saves at once.
        """
        self.wait_previous_save()
        self.save_future = future = self.executor.submit(task)
        return future


def start(
    manager: SaveManager, directory: Location, task: Callable[[], Any], *, lookup_timeout: float | None = None
) -> None:
    """Start a save with a manager, or in the foreground if its pool takes no tasks; see `BackgroundSave`."""
    save = BackgroundSave(directory.resolve(), lookup_timeout, thread_pools.Task(_run, task))
    refusal, here = "", threading.get_ident()
    if _is_within(manager) or here in _submitting:
        refusal = "none are taken within its tasks, or a call that a signal interrupted"
    else:
        _submitting.append(here)
        try:
            future = manager.save_async(functools.partial(_in_pool, save.task))
        except BaseException as error:
            if not thread_pools.is_refusal(error):
                save.task.withdraw()  # it may be queued all the same
                raise
            refusal = str(error)  # the pool was shut down, or an exit handler or a late thread calls this
        finally:
            _submitting.remove(here)
    if refusal:
        _log.info("Saving into %s in the foreground, because the thread pool takes no tasks: %s", directory, refusal)
        save.task()
        return
    if not isinstance(future, Future):
        future = getattr(manager, "save_future", None)
    save.future = future if isinstance(future, Future) else None
    if save.future is not None or lookup_timeout is not None:
        save_registry.add(save)


def _in_pool(task: thread_pools.Task) -> Any:
    """Return or raise the outcome of a save; one whose start Ctrl-C interrupted was withdrawn, and fails nobody."""
    return None if task.was_withdrawn else task.result()


def _run(task: Callable[[], Any]) -> None:
    try:
        task()
    except CleanupError as error:  # raised, it would prevent the next save
        _log.error("%s", error)
    except BaseException as error:
        thread_pools.clear_frames(error)  # until somebody asks for it, it would hold the copies of all arrays
        raise
    finally:
        del task


def wait_for_earlier_saves(request: SaveRequest) -> None:
    """Wait for the background saves before this one, so that commits keep the order of the calls; raise a failure."""
    from flax_ckpt_compat._save import checkpointer_adapter

    if request.async_manager:
        wait(request.async_manager)
    checkpointer_adapter.wait_for_checkpointer(request.orbax_checkpointer, request.directory)
    wait_for_async_saves(request.directory)


def wait_for_pending_saves(checkpoint_dir: CheckpointDir, orbax_checkpointer: Any = None) -> None:
    """Wait before a restore for background saves to its directory, and raise the errors of our failed ones.

    Of our saves, multiprocess ones are waited for, so that all processes find the same checkpoint, and others where
    there is no checkpoint yet: a restore would return its target, and a program train from initial values.
    """
    from flax_ckpt_compat._save import checkpointer_adapter

    directories = {checkpoint_dir.directory, checkpoint_dir.root.parent}
    for directory in directories:
        checkpointer_adapter.wait_for_checkpointer(orbax_checkpointer, directory)
        wait_for_multiprocess_saves(directory)
    saves = [save for one in directories for save in save_registry.saves_into(one)]
    running = [save for save in saves if save.future is not None and not save.done]
    if running and isinstance(locating.find(checkpoint_dir, None), not_found.Absence):
        for save in running:
            _wait_for(save, _QUEUED_SECONDS)
    for directory in directories:
        save_registry.raise_failures(directory)


def _wait_for(save: BackgroundSave, until_begun: float) -> None:
    """Wait until a save has ended, unless this thread runs it; for one that has not begun, so many seconds."""
    if not save.task.runs_here:
        save.wait(until_begun)
        if save.task.thread is not None:
            save.wait()


def wait_for_multiprocess_saves(directory: Location) -> None:
    """Wait for this process's multi-process background saves into a directory, before every look-up in it.

    Processes that called the same saves then find the same checkpoints. Wait for no other process; raise no failure."""
    for save in save_registry.saves_into(directory):
        if save.lookup_timeout is not None and not save.task.runs_here:
            save.wait(save.lookup_timeout)


def wait(manager: Any) -> None:
    """Wait for a manager's previous save and raise its failure, even if the manager itself would not."""
    if _is_within(manager):
        return
    future = getattr(manager, "save_future", None)
    if isinstance(future, Future):
        save_registry.wait_for(future)  # Ctrl-C comes here, where it takes no failure away
    try:
        manager.wait_previous_save()
    except Exception:  # not Ctrl-C, after which the save still runs, and may fail
        if isinstance(future, Future):
            _forget(manager, future)
        raise
    # Flax's own manager drops the failure of a save that has already ended.
    if isinstance(future, Future):
        _raise_failure(manager, future)


def _is_within(manager: Any) -> bool:
    """Return whether this is a thread of the manager's pool, which would wait for its own task, or those behind it."""
    prefix = getattr(getattr(manager, "executor", None), "_thread_name_prefix", None)
    return bool(prefix) and threading.current_thread().name.startswith(f"{prefix}_")


def _raise_failure(manager: Any, future: Future[Any]) -> None:
    """Wait for a manager's save and raise its failure, once: not if another thread did meanwhile."""
    save_registry.wait_for(future)
    if _forget(manager, future) and not save_registry.was_raised(future):
        future.result()


def _forget(manager: Any, future: Future[Any]) -> bool:
    """Forget the failure of a save that is raised now; return False if it was already.

    The save stays the manager's, as in Flax, whose callers ask for its result after a wait."""
    save_registry.mark_seen(future)
    if manager.save_future is not future:
        return False
    if future.cancelled() or future.exception() is not None:
        manager.save_future = finished = Future[Any]()
        finished.set_result(None)
    return True


def wait_for_async_saves(directory: Location) -> None:
    """Wait for every background save into a directory; raise the failure of the first one that failed."""
    for save in save_registry.saves_into(directory):
        # A manager without a future may never run its task.
        if save.future is not None and not save.task.runs_here:
            save.wait()
    save_registry.raise_failures(directory)


def _start_after_fork() -> None:
    # The threads of their pools exist in the parent only: tasks that these queue for them would never run here.
    for manager in list(_managers):
        manager._start()


os.register_at_fork(after_in_child=_start_after_fork)  # after `save_registry`, which forgets the parent's saves


def _finish_saves() -> None:
    # An executor does not end a thread whose start Ctrl-C interrupted, and the interpreter would wait for it for ever.
    for manager in list(_managers):
        with suppress(Exception):  # the interpreter would not wait for other saves; a program may set the executor
            manager.executor.shutdown(wait=False)
    for save in save_registry.all_saves():
        if save.future is not None:
            _wait_for(save, _AT_EXIT_SECONDS)
    save_registry.log_failures(running=False)  # now, as processes that multiprocessing forks call no exit handlers


with suppress(AttributeError, RuntimeError):  # it is called before threads are waited for; too late at the exit
    threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]
