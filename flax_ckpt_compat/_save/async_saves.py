"""Saving in the background: Flax's AsyncManager, and what makes sure that no failure is lost."""

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
_saves: dict[str, list[Future[Any]]] = {}  # real directory → background saves whose outcome nobody has seen
_joint: dict[str, list[_JointSave]] = {}  # real directory → this process's parts of saves by several that go on


class AsyncManager:
    """Tracks background saves: pass one to every ``save_checkpoint(…, async_manager=)``.

    Attributes:
        executor: the pool that saves run in; the interpreter waits for it at exit.
        save_future: the latest save, or None.
    """

    def __init__(self, max_workers: int = 1):
        self.executor = ThreadPoolExecutor(max_workers=max_workers)
        self.save_future: Future[Any] | None = None

    def wait_previous_save(self) -> None:
        """Blocks until the previous save has ended.

        Raises:
            Exception: whatever that save failed with, once, however long ago it ended.
        """
        future, self.save_future = self.save_future, None
        if future is not None:
            _seen(future)
            future.result()

    def save_async(self, task: Callable[[], Any]) -> None:
        """Runs a task in the background, after the previous one; it is tracked as ``save_future``.

        Raises:
            RuntimeError: the executor was shut down, or the interpreter ends; `save_checkpoint` then saves at once.
        """
        self.wait_previous_save()
        self.save_future = self.executor.submit(task)


@dataclasses.dataclass(eq=False)
class _JointSave:
    """This process's part of a background save by several processes.

    Attributes:
        patience: seconds that a look-up waits for it at most.
        ended: it was published, or has failed.
        future: has its outcome a moment later, where its manager has such a thing.
        thread: the identifier of the thread that it runs in, once it does.
    """

    patience: float
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    future: Future[Any] | None = None
    thread: int | None = None


def start(manager: Any, directory: str, task: Callable[[], Any], *, joint: float | None = None) -> None:
    """Hand a save to a manager (ours, Flax's own, or a user's) and remember it until its outcome is seen.

    Args:
        manager: has ``save_async``.
        directory: that the checkpoint goes to.
        task: the save.
        joint: other processes take part in it, and look-ups of this one wait for it, so many seconds at most.
    """
    save = thread_pools.Once(_carry_out, task)
    try:
        if joint is None:
            manager.save_async(save)
        else:
            _start_joint(manager, directory, save, _JointSave(joint))
    except RuntimeError as error:
        if not thread_pools.is_refusal(error):
            raise
        # The pool was shut down, or the program has ended and calls this from an exit handler or a late thread.
        _log.info("Saving into %s in the foreground, because the background refuses: %s", directory, error)
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
            _joint[key].remove(save)
            if not _joint[key]:
                del _joint[key]

    with _lock:
        _joint.setdefault(key, []).append(save)
    try:
        manager.save_async(run)
    except BaseException:
        end()
        raise
    future = getattr(manager, "save_future", None)
    if isinstance(future, Future):
        save.future = future
        future.add_done_callback(end)  # it may be cancelled before it runs


def _carry_out(task: Callable[[], Any]) -> None:
    """Run a save; a failed clean-up is only logged: raised at the next save, it would keep that from being saved."""
    try:
        task()
    except CleanupError as error:
        _log.error("%s", error)


def wait_for_joint_saves(directory: str) -> None:
    """Wait until the background saves into a directory that this process takes part in were published, or failed.

    Call this before every look-up of what the directory holds: processes that have all called the same saves then
    find the same checkpoints. It waits for no other process, and raises no failure.
    """
    if not _joint:
        return
    with _lock:
        saves = list(_joint.get(_key(directory), ()))
    for save in saves:
        if save.thread != threading.get_ident() and save.ended.wait(save.patience) and save.future is not None:
            with suppress(CancelledError, TimeoutError):
                save.future.exception(save.patience)


def wait(manager: Any) -> None:
    """Waits for a manager's previous save and raises its failure, also where the manager itself would not."""
    future = getattr(manager, "save_future", None)
    try:
        manager.wait_previous_save()
    finally:
        if isinstance(future, Future):
            _seen(future)
            if manager.save_future is future:
                manager.save_future = None
    # Flax's own manager drops the failure of a save that has already ended.
    if isinstance(future, Future):
        future.result()


def wait_for_pending_saves(directory: str) -> None:
    """Waits for every background save into a directory, so that commits keep the order of the calls.

    Raises:
        Exception: what the first failed one failed with.
    """
    for future in _unseen(directory):
        # futures.wait() would wait for ever for one that its pool's shutdown cancelled.
        with suppress(CancelledError):
            future.exception()
    raise_failures(directory)


def raise_failures(directory: str) -> None:
    """Raises the failure of a background save into this directory that nobody has seen yet; waits for none."""
    for future in _unseen(directory):
        if future.done():
            _seen(future)
            future.result()


def _key(directory: str) -> str:
    return directory if paths.is_url(directory) else os.path.realpath(directory)


def _unseen(directory: str) -> list[Future[Any]]:
    with _lock:
        return list(_saves.get(_key(directory), ()))


def _seen(future: Future[Any]) -> None:
    with _lock:
        for directory, saves in list(_saves.items()):
            if future in saves:
                saves.remove(future)
                if not saves:
                    del _saves[directory]


def _forget_after_fork() -> None:
    # The threads that would end these saves live in the parent only; waiting for them here would never end.
    global _lock
    _lock = threading.Lock()
    _saves.clear()
    _joint.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


@atexit.register
def _log_failures() -> None:
    # The interpreter has joined all pools before it comes here.
    for directory, saves in _saves.items():
        for future in saves:
            error = future.exception() if future.done() and not future.cancelled() else None
            if error is not None:
                _log.error("A background save of a checkpoint into %s failed: %r", directory, error, exc_info=error)
