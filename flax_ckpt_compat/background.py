"""Saving in the background: Flax's AsyncManager, and what makes sure that no failure is lost."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.errors import CleanupError

_log = logging.getLogger("flax_ckpt_compat")
_lock = threading.Lock()
_saves: dict[str, list[Future[Any]]] = {}  # real directory → background saves whose outcome nobody has seen


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
        """Runs a task in the background, after the previous one; it is tracked as ``save_future``."""
        self.wait_previous_save()
        self.save_future = self.executor.submit(task)


def start(manager: Any, directory: str, task: Callable[[], Any]) -> None:
    """Hands a save to a manager (ours, Flax's own, or a user's) and remembers it until its outcome is seen."""
    manager.save_async(functools.partial(_carry_out, task))
    future = getattr(manager, "save_future", None)
    if isinstance(future, Future):
        with _lock:
            _saves.setdefault(_key(directory), []).append(future)


def _carry_out(task: Callable[[], Any]) -> None:
    """Run a save; a failed clean-up is only logged: raised at the next save, it would keep that from being saved."""
    try:
        task()
    except CleanupError as error:
        _log.error("%s", error)


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


def settle(directory: str) -> None:
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
