"""Run background saves, wait for them, and raise each failure once, or log it: Flax's AsyncManager, and a registry."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core import thread_pools
from flax_ckpt_compat._core.errors import CleanupError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import locating, not_found
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

if TYPE_CHECKING:  # a listing of a directory loads this module, but not jax and flax
    from flax_ckpt_compat._save.request import SaveManager, SaveRequest

_log = logging.getLogger("flax_ckpt_compat")
_QUEUED_SECONDS = 60.0  # how long a restore waits for a save that may be queued behind it
_AT_EXIT_SECONDS = 1.0
_managers: weakref.WeakSet[AsyncManager] = weakref.WeakSet()
# Changed by single operations only: with a lock, a signal handler that saves could wait for ever.
_saves: list[BackgroundSave] = []
_raised: weakref.WeakSet[Future[Any]] = weakref.WeakSet()  # their failures, without their managers
# Threads that hand a save to a pool: a signal handler that interrupts one would wait for its lock for ever.
_submitting: list[int] = []


@dataclasses.dataclass(eq=False, slots=True)
class BackgroundSave:
    """One background save that is running, or that failed and whose failure was not raised yet."""

    directory: str  # real path of the checkpoint's directory
    lookup_timeout: float | None  # seconds that look-ups wait for a multi-process save; None if they do not
    task: thread_pools.Task
    # Its outcome, which later calls raise; None if the manager has none: then only the manager can raise it.
    future: Future[Any] | None = None

    @property
    def done(self) -> bool:
        """Return whether the save has ended, or was cancelled."""
        return self.task.done if self.future is None else self.future.done()

    def wait(self, timeout: float = math.inf) -> None:
        """Wait until it has ended or was cancelled, at most so many seconds; run nothing."""
        if self.future is None:
            self.task.wait(timeout)
        else:
            _wait_for_future(self.future, timeout)


def _wait_for_future(future: Future[Any], timeout: float = math.inf) -> None:
    """Wait until a future is done or cancelled, at most so many seconds."""
    with suppress(CancelledError, TimeoutError):
        future.exception(None if math.isinf(timeout) else timeout)


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
        _saves.append(save)


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


def _drop(save: BackgroundSave) -> None:
    with suppress(ValueError):  # another thread did
        _saves.remove(save)


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
    saves = [save for one in directories for save in saves_into(one)]
    running = [save for save in saves if save.future is not None and not save.done]
    if running and isinstance(locating.find(checkpoint_dir, None), not_found.Absence):
        for save in running:
            _wait_for(save, _QUEUED_SECONDS)
    for directory in directories:
        raise_failures(directory)


def _wait_for(save: BackgroundSave, until_begun: float) -> None:
    """Wait until a save has ended, unless this thread runs it; for one that has not begun, so many seconds."""
    if not save.task.runs_here:
        save.wait(until_begun)
        if save.task.thread is not None:
            save.wait()


def wait_for_multiprocess_saves(directory: Location) -> None:
    """Wait for this process's multi-process background saves into a directory, before every look-up in it.

    Processes that called the same saves then find the same checkpoints. Wait for no other process; raise no failure."""
    for save in saves_into(directory):
        if save.lookup_timeout is not None and not save.task.runs_here:
            save.wait(save.lookup_timeout)


def wait(manager: Any) -> None:
    """Wait for a manager's previous save and raise its failure, even if the manager itself would not."""
    if _is_within(manager):
        return
    future = getattr(manager, "save_future", None)
    if isinstance(future, Future):
        _wait_for_future(future)  # Ctrl-C comes here, where it takes no failure away
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
    _wait_for_future(future)
    if _forget(manager, future) and future not in _raised:
        future.result()


def _forget(manager: Any, future: Future[Any]) -> bool:
    """Forget the failure of a save that is raised now; return False if it was already.

    The save stays the manager's, as in Flax, whose callers ask for its result after a wait."""
    for save in list(_saves):
        if save.future is future:
            _drop(save)
    if manager.save_future is not future:
        return False
    if future.cancelled() or future.exception() is not None:
        manager.save_future = finished = Future[Any]()
        finished.set_result(None)
    return True


def wait_for_async_saves(directory: Location) -> None:
    """Wait for every background save into a directory; raise the failure of the first one that failed."""
    for save in saves_into(directory):
        # A manager without a future may never run its task.
        if save.future is not None and not save.task.runs_here:
            save.wait()
    raise_failures(directory)


def _start_after_fork() -> None:
    # The threads of their pools exist in the parent only: tasks that these queue for them would never run here.
    _saves.clear()
    for manager in list(_managers):
        manager._start()


os.register_at_fork(after_in_child=_start_after_fork)


@atexit.register
def log_failures(*, running: bool = True) -> None:
    """Log failures that nothing has raised, and, with ``running``, saves that have not ended."""
    # At the exit, the interpreter has joined all pools, unless Ctrl-C interrupted it.
    for save in list(_saves):
        error: BaseException | None = None
        if save.future is not None and save.done:
            error = CancelledError("cancelled") if save.future.cancelled() else save.future.exception()
        elif save.future is not None and running:
            error = RuntimeError("it has not ended before the interpreter does")
        if error is not None:
            _drop(save)
            _log.error("A background save of a checkpoint into %s failed: %r", save.directory, error, exc_info=error)


def _finish_saves() -> None:
    # An executor does not end a thread whose start Ctrl-C interrupted, and the interpreter would wait for it for ever.
    for manager in list(_managers):
        with suppress(Exception):  # the interpreter would not wait for other saves; a program may set the executor
            manager.executor.shutdown(wait=False)
    for save in list(_saves):
        if save.future is not None:
            _wait_for(save, _AT_EXIT_SECONDS)
    log_failures(running=False)  # now, as processes that multiprocessing forks call no exit handlers


with suppress(AttributeError, RuntimeError):  # it is called before threads are waited for; too late at the exit
    threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]
