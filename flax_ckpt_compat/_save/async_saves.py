"""Run async saves: Flax's AsyncManager, and a registry from which every failure is raised or logged."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core import paths, thread_pools
from flax_ckpt_compat._core.errors import CleanupError

_log = logging.getLogger("flax_ckpt_compat")
_lock = threading.Lock()
_saves: dict[str, list[Future[Any]]] = {}  # real directory → background saves whose failure would not be raised yet
_joint_saves: dict[str, list[_JointSave]] = {}  # real directory → running multi-process saves


class AsyncManager:
    """Tracker of background saves: pass one to every ``save_checkpoint(…, async_manager=)``.

    Attributes:
        executor: the thread pool; the interpreter waits for it at exit.
        save_future: the latest save, or None.
    """

    def __init__(self, max_workers: int = 1):
        self.executor = ThreadPoolExecutor(max_workers=max_workers)
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


@dataclasses.dataclass(eq=False)
class _JointSave:
    """This process's part of a background multi-process save.

    Attributes:
        lookup_timeout: seconds that a look-up waits for it at most.
        ended: set once it was published or has failed.
        future: its outcome, a moment later, if the manager has a future.
        thread: identifier of the running thread.
    """

    lookup_timeout: float
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    future: Future[Any] | None = None
    thread: int | None = None


def start(manager: Any, directory: str, task: Callable[[], Any], *, lookup_timeout: float | None = None) -> None:
    """Start a save with a manager (ours, Flax's, or a user's), and keep it until its outcome is raised.

    If the manager's pool refuses new tasks, save in the foreground.

    Args:
        manager: has ``save_async``.
        directory: the checkpoint's.
        task: the save.
        lookup_timeout: for a multi-process save, the seconds that look-ups of this process wait for it at most.
    """
    save = thread_pools.Once(_run, task)
    try:
        if lookup_timeout is None:
            manager.save_async(save)
        else:
            _start_joint(manager, directory, save, _JointSave(lookup_timeout))
    except RuntimeError as error:
        if not thread_pools.is_refusal(error):
            raise
        # The pool was shut down, or an exit handler or a late thread calls this.
        _log.info("Saving into %s in the foreground, because the thread pool takes no tasks: %s", directory, error)
        save()
        return
    future = getattr(manager, "save_future", None)
    if isinstance(future, Future):
        with _lock:
            _saves.setdefault(_key(directory), []).append(future)


def _start_joint(manager: Any, directory: str, task: Callable[[], Any], save: _JointSave) -> None:
    key = _key(directory)

    def run() -> None:
        save.thread = threading.get_ident()
        try:
            task()
        finally:
            end()

    def end(_: Any = None) -> None:
        save.ended.set()
        with _lock, suppress(KeyError, ValueError):
            _joint_saves[key].remove(save)
            if not _joint_saves[key]:
                del _joint_saves[key]

    with _lock:
        _joint_saves.setdefault(key, []).append(save)
    try:
        manager.save_async(run)
    except BaseException:
        end()
        raise
    future = getattr(manager, "save_future", None)
    if isinstance(future, Future):
        save.future = future
        future.add_done_callback(end)  # it may be cancelled before it runs


def _run(task: Callable[[], Any]) -> None:
    """Run a save. Log a failed clean-up, which would prevent the next save if it was raised there."""
    try:
        task()
    except CleanupError as error:
        _log.error("%s", error)


def wait_for_joint_saves(directory: str) -> None:
    """Wait until this process's multi-process background saves into a directory were published or failed.

    Call this before every look-up in the directory, so that processes that called the same saves find the same
    checkpoints. It waits for no other process, and raises no failure.
    """
    if not _joint_saves:
        return
    with _lock:
        saves = list(_joint_saves.get(_key(directory), ()))
    for save in saves:
        if save.thread != threading.get_ident() and save.ended.wait(save.lookup_timeout) and save.future is not None:
            with suppress(CancelledError, TimeoutError):
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


def wait_for_pending_saves(directory: str) -> None:
    """Wait for every background save into a directory, so that commits keep the order of the calls.

    Raises:
        Exception: the failure of the first one that failed.
    """
    for future in _unseen_saves(directory):
        # futures.wait() would never return for a future that its pool's shutdown cancelled.
        with suppress(CancelledError):
            future.exception()
    raise_failures(directory)


def raise_failures(directory: str) -> None:
    """Raise the first failure of a background save into this directory that was not raised yet; never wait."""
    for future in _unseen_saves(directory):
        if future.done():
            _mark_seen(future)
            future.result()


def _key(directory: str) -> str:
    return directory if paths.is_url(directory) else os.path.realpath(directory)


def _unseen_saves(directory: str) -> list[Future[Any]]:
    with _lock:
        return list(_saves.get(_key(directory), ()))


def _mark_seen(future: Future[Any]) -> None:
    with _lock:
        for directory, saves in list(_saves.items()):
            if future in saves:
                saves.remove(future)
                if not saves:
                    del _saves[directory]


def _clear_after_fork() -> None:
    # The threads of these saves exist in the parent only: waiting for them here would never end.
    global _lock
    _lock = threading.Lock()
    _saves.clear()
    _joint_saves.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_clear_after_fork)


@atexit.register
def _log_failures() -> None:
    # By now, the interpreter has joined all pools.
    for directory, saves in _saves.items():
        for future in saves:
            error = future.exception() if future.done() and not future.cancelled() else None
            if error is not None:
                _log.error("A background save of a checkpoint into %s failed: %r", directory, error, exc_info=error)
