"""Run background saves, wait for them, and raise each failure once, or log it: Flax's AsyncManager, and a registry."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import re
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core import thread_pools
from flax_ckpt_compat._core.errors import CleanupError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.thread_pools import Task
from flax_ckpt_compat._discovery import locating
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

if TYPE_CHECKING:  # a listing of a directory loads this module, but not jax and flax
    from flax_ckpt_compat._save.request import SaveRequest

# Messages of Python when a pool was shut down, when the interpreter exits, and when no thread can be started.
_REFUSALS = re.compile("new futures|new thread")
_log = logging.getLogger("flax_ckpt_compat")
_managers: weakref.WeakSet[AsyncManager] = weakref.WeakSet()
# Changed by single operations only: with a lock, a signal handler that saves could wait for ever.
_saves: list[BackgroundSave] = []
_raised: weakref.WeakSet[Future[Any]] = weakref.WeakSet()  # whose outcome a caller has seen
# Threads that hand a save to a pool: a signal handler that interrupts one would wait for its lock for ever.
_submitting: list[int] = []


@dataclasses.dataclass(eq=False, slots=True)
class BackgroundSave:
    """One background save that is running, or whose outcome nobody has seen yet."""

    directory: str  # real path of the checkpoint's directory
    task: Task
    future: Future[Any]  # the manager's; a finished one for a commit of a user's checkpointer
    lookup_timeout: float | None = None  # seconds that look-ups wait for a multi-process save; None if they do not
    checkpointer: Any = None  # a user's, which commits; the task waits for it, and no thread begins that one

    def wait(self) -> None:
        """Wait for its end, unless this thread runs it; begin it if no thread has: its pool may wait for this one."""
        if self.task.thread != threading.get_ident():  # also after the task, for which its manager may call hooks
            if self.task.thread is None and self.checkpointer is None:
                thread_pools.Pool(1).begin([self.task])  # there, Ctrl-C ends this wait, and not the save
                self.task.wait(thread_pools.BEGIN_SECONDS)
            try:
                self.task.run()
            except KeyboardInterrupt:
                _drop(self)
                raise
            self.task.wait()


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
            _raise_once(self.save_future)

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


def start(manager: Any, directory: Location, task: Callable[[], Any], *, lookup_timeout: float | None = None) -> None:
    """Start a save with a manager, or in the foreground if its pool takes no tasks; see `BackgroundSave`."""
    work = Task(_run, task)
    del task
    if refusal := _submit(manager, directory.resolve(), work, lookup_timeout):
        _log.info("Saving into %s in the foreground, because the thread pool takes no tasks: %s", directory, refusal)
        work.result()


def _submit(manager: Any, directory: str, work: Task, lookup_timeout: float | None) -> str:
    """Give a save to a manager, and register it; return "", or why the manager's pool takes no tasks."""
    here = threading.get_ident()
    if _is_within(manager) or here in _submitting:
        return "none are taken within its tasks, or a call that a signal interrupted"

    def run() -> None:
        work.run()
        if work.thread is not None:  # else it was withdrawn
            work.result()

    _submitting.append(here)
    try:
        future = manager.save_async(run)
        if not isinstance(future, Future):
            future = getattr(manager, "save_future", None)
        if isinstance(future, Future):  # a manager without one alone raises its failures
            _saves.append(BackgroundSave(directory, work, future, lookup_timeout))
            future.add_done_callback(lambda ended: work.withdraw() if ended.cancelled() else None)
    except BaseException as error:
        if isinstance(error, RuntimeError) and _REFUSALS.search(str(error)):
            return str(error)  # the pool was shut down, or an exit handler or a late thread calls this
        work.withdraw()  # it may be queued all the same
        raise
    finally:
        _submitting.remove(here)
    return ""


def start_commit(checkpointer: Any, directory: Location, then: Callable[[], Any]) -> None:
    """Register a save that a user's checkpointer commits; the next call waits for it, and calls ``then``."""

    def finish() -> None:
        try:
            checkpointer.wait_until_finished()
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C or a signal's SystemExit, after which the commit goes on
                start_commit(checkpointer, directory, then)
            raise
        then()

    finished = Future[Any]()
    finished.set_result(None)
    _saves.append(BackgroundSave(directory.resolve(), Task(_run, finish), finished, checkpointer=checkpointer))


def _run(task: Callable[[], Any]) -> None:
    try:
        task()
    except CleanupError as error:  # raised, it would prevent the next save
        _log.error("%s", error)
    except BaseException as error:
        _clear_frames(error)  # until somebody asks for it, it would hold the copies of all arrays
        raise
    finally:
        del task


def _clear_frames(error: BaseException | None) -> None:
    """Free what the functions held that raised an error, and those before it, which may form a ring."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def saves_into(directory: Location) -> list[BackgroundSave]:
    """Return the registered saves into a directory."""
    with suppress(ValueError):  # no directory can have this name
        real = directory.resolve() if _saves else None
        return [save for save in list(_saves) if save.directory == real]
    return []


def _raise_once(future: Future[Any]) -> None:
    """Wait for a manager's save, and raise its failure unless somebody has seen it; the save stays the manager's."""
    with suppress(CancelledError):
        future.exception()
    if future not in _raised:
        _raised.add(future)
        for save in list(_saves):
            if save.future is future:
                _drop(save)
        future.result()


def _drop(save: BackgroundSave) -> bool:
    """Forget a save; return whether nobody has seen its outcome yet, be it in another thread."""
    try:
        _saves.remove(save)
    except ValueError:
        return False
    is_new = save.future not in _raised
    _raised.add(save.future)
    return is_new


def _raise_failures(saves: list[BackgroundSave]) -> None:
    """Raise the first failure of background saves that was not raised yet; never wait."""
    for save in saves:
        if save.task.done:
            try:
                save.task.result()
                if not save.future.done():  # its manager does more after the task
                    continue
                with suppress(CancelledError):  # the task ran all the same
                    save.future.result()
                _drop(save)
            except BaseException:
                if _drop(save):
                    raise


def wait_for_earlier_saves(request: SaveRequest) -> None:
    """Wait for the background saves before this one, so that commits keep the order of the calls; raise a failure."""
    if request.async_manager:
        _wait_for_manager(request.async_manager)
    _wait_for_checkpointer(request.orbax_checkpointer, request.directory)
    finish(saves_into(request.directory))


def wait_for_pending_saves(checkpoint_dir: CheckpointDir, orbax_checkpointer: Any = None) -> None:
    """Wait before a restore for a checkpointer's and multi-process saves to its directory; raise failures of all."""
    directories = {checkpoint_dir.directory, checkpoint_dir.root.parent}
    for directory in directories:
        _wait_for_checkpointer(orbax_checkpointer, directory)
        wait_for_multiprocess_saves(directory)
    saves = [save for one in directories for save in saves_into(one)]
    is_running = not all(save.task.done for save in saves)
    # A restore without a checkpoint would return its target, and the program train from initial values.
    if is_running and isinstance(locating.find(checkpoint_dir, None), locating.Absence):
        finish(saves)
    _raise_failures(saves)


def wait_for_multiprocess_saves(directory: Location) -> None:
    """Wait for this process's multi-process saves before a look-up: processes with the same saves find the same."""
    for save in saves_into(directory):
        if save.lookup_timeout is not None and not save.task.runs_here:
            save.task.wait(save.lookup_timeout)


def finish(saves: list[BackgroundSave]) -> None:
    """Wait for background saves; raise the failure of the first one that failed."""
    for save in saves:
        save.wait()
    _raise_failures(saves)


def _wait_for_checkpointer(checkpointer: Any, directory: Location) -> None:
    """Finish the saves of this checkpointer, and of any other into this directory; raise a failure."""
    here = saves_into(directory)
    commits = [save for save in list(_saves) if save.checkpointer is not None]
    finish([save for save in commits if save.checkpointer is checkpointer or save in here])
    if hasattr(checkpointer, "wait_until_finished"):
        checkpointer.wait_until_finished()


def _wait_for_manager(manager: Any) -> None:
    """Wait for a manager's previous save and raise its failure, even if the manager itself would not."""
    if _is_within(manager):
        return
    future = getattr(manager, "save_future", None)
    if isinstance(future, Future):
        _raise_once(future)  # Flax's own manager drops the failure of a save that has already ended
        if (future.cancelled() or future.exception() is not None) and manager.save_future is future:
            # It was raised before, and the manager would raise it at each call, in words of its own.
            manager.save_future = finished = Future[Any]()
            finished.set_result(None)
    manager.wait_previous_save()


def _is_within(manager: Any) -> bool:
    """Return whether this is a thread of the manager's pool, which would wait for its own task, or those behind it."""
    prefix = getattr(getattr(manager, "executor", None), "_thread_name_prefix", None)
    return bool(prefix) and threading.current_thread().name.startswith(f"{prefix}_")


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
        if save.task.done:
            try:
                _raise_failures([save])
            except BaseException as error:  # noqa: BLE001  (nothing can catch it at exit)
                message = "A background save of a checkpoint into %s failed: %r"
                _log.error(message, save.directory, error, exc_info=error)
        elif running:
            _log.error("A background save of a checkpoint into %s has not ended before the interpreter", save.directory)


def _finish_saves() -> None:
    for save in list(_saves):
        save.wait()
        if save.future.running():  # what its manager does after the task may need a pool, too
            save.future.exception()
    log_failures(running=False)  # now, as processes that multiprocessing forks call no exit handlers


# Python closes all thread pools before it joins threads and runs ``atexit``, and Orbax needs a pool to commit. Only
# hooks that are registered as the pools' own run before these.
with suppress(AttributeError, RuntimeError):  # too late at the exit
    threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]
