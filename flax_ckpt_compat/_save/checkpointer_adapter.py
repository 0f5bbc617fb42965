"""Save with a user's Orbax checkpointer object, under our rules for overwriting, publishing and retention.

Never imports orbax: a caller with such an object has imported it already.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import CheckpointerError, CheckpointError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE
from flax_ckpt_compat._save.coordination import Coordinator

_log = logging.getLogger("flax_ckpt_compat")
_lock = threading.RLock()
_pending: list[_Pending] = []
_POLL_SECONDS = 0.01
_PUBLISHED = "published"


def written_path(path: str) -> str:
    """Return the path for a checkpointer to write to: a temporary one if ``path`` exists, which stays restorable."""
    return atomic.staging_path(path) if os.path.lexists(path) else path


def save(
    checkpointer: Any,
    path: str,
    target: Any,
    on_commit: Callable[[], None],
    *,
    written: str | None = None,
    coordinator: Coordinator | None = None,
) -> None:
    """Save with the checkpointer, and publish the result after its commit, if need be in the background.

    Args:
        checkpointer: the user's, of real Orbax.
        path: the final path.
        target: the user's tree.
        on_commit: called after the commit.
        written: `written_path` as agreed by several processes.
        coordinator: of a multi-process save; process 0 publishes and calls ``on_commit``.

    Raises:
        CheckpointerError: the checkpointer cannot save this tree.
    """
    pending = _Pending(checkpointer, written or written_path(path), path, on_commit, coordinator)
    try:
        checkpointer.save(pending.written, target)
    except (TypeError, AttributeError, KeyError) as error:  # its other errors say what is wrong with the tree
        raise CheckpointerError(
            f"{path}: the given orbax_checkpointer ({described(checkpointer)}) cannot save this tree: {error}; pass "
            "one for pytrees, or leave orbax_checkpointer out",
            path=path,
        ) from error
    if is_async(checkpointer):
        pending.watch()
    elif pending.is_primary:
        pending.finish()


def wait_for_pending_saves(checkpointer: Any, directory: str) -> None:
    """Wait for background saves of this checkpointer, and of any other into this directory, and for their clean-up.

    Raises:
        Exception: the failure of such a save.
    """
    if checkpointer is not None and is_async(checkpointer):
        checkpointer.wait_until_finished()
    for pending in list(_pending):
        if os.path.dirname(pending.path) == directory:
            pending.checkpointer.wait_until_finished()


def described(checkpointer: Any) -> str:
    """Return the types of a checkpointer and its handler, for messages."""
    handler = getattr(checkpointer, "handler", None)
    names = [type(checkpointer).__name__, *([type(handler).__name__] if handler is not None else [])]
    return " with ".join(names)


def is_async(checkpointer: Any) -> bool:
    """Return whether a checkpointer may commit after `save` has returned."""
    return hasattr(checkpointer, "wait_until_finished")


class _Pending:
    """A save that its checkpointer has not committed yet.

    Orbax has no public hook after the commit. So a thread polls for the last file of the commit, and the
    checkpointer's ``wait_until_finished`` is wrapped to wait for our clean-up too.

    Attributes:
        checkpointer: of real Orbax.
        path: the final path.
        written: the path that the checkpointer writes to.
        is_primary: this process publishes and cleans up: the only one, or process 0.
    """

    def __init__(
        self,
        checkpointer: Any,
        written: str,
        path: str,
        on_commit: Callable[[], None],
        coordinator: Coordinator | None = None,
    ):
        self.checkpointer, self.path, self._coordinator = checkpointer, path, coordinator
        self.is_primary = coordinator is None or coordinator.process.index == 0
        self.written, self._on_commit = written, on_commit
        self._own_wait = getattr(checkpointer, "wait_until_finished", None)
        self._replaced: dict[str, Any] = {}
        self._ended = threading.Event()
        self._failed: BaseException | None = None

    def watch(self) -> None:
        """Start polling for the commit."""
        _finish_at_exit()
        with _lock:
            _pending.append(self)
            own = vars(self.checkpointer)
            self._replaced = {name: own[name] for name in own if name == "wait_until_finished"}
            self.checkpointer.wait_until_finished = self._wait
        if self.is_primary:
            try:
                threading.Thread(target=self._poll, name="flax_ckpt_compat-commit", daemon=True).start()
            except RuntimeError:  # the interpreter ends, and has no more threads
                self._wait()

    def _wait(self) -> None:
        """Wait as the checkpointer does, then clean up."""
        assert self._own_wait is not None
        try:
            self._own_wait()
        except BaseException as error:
            if self._stop():
                self._send(error)
            raise
        if self.is_primary:
            self.finish()
        elif self._stop():
            # Orbax has committed, but under another name where it replaces a step.
            assert self._coordinator is not None
            self._coordinator.receive(_PUBLISHED)

    def finish(self, *, remember: bool = False) -> None:
        """Publish what was committed and clean up, once.

        Args:
            remember: keep a failure, so that the next call or wait raises it again.
        """
        with _lock:
            if self._ended.is_set():
                return
            if self._failed is None:
                self._failed = self._publish()
            if not (remember and self._failed):
                self._stop()
            if self._failed is not None:
                raise self._failed

    def _publish(self) -> BaseException | None:
        """Publish; return the error, or None."""
        try:
            if os.path.lexists(self.written):
                if self.written != self.path:
                    atomic.publish(self.written, self.path)
                self._on_commit()
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            self._send(error)
            return error
        self._send(None)
        return None

    def _send(self, failed: BaseException | None) -> None:
        """Send the outcome to the other processes, if the checkpointer does not make them wait for it."""
        if self._coordinator is not None and self.is_primary and is_async(self.checkpointer):
            with suppress(CheckpointError):  # their wait has a timeout
                self._coordinator.send(_PUBLISHED, failed)

    def _stop(self) -> bool:
        """Stop polling; return False if it had stopped already."""
        with _lock:
            if self._ended.is_set():
                return False
            self._ended.set()
            if self in _pending:
                _pending.remove(self)
                self._restore_wait()
            return True

    def _restore_wait(self) -> None:
        own = vars(self.checkpointer)
        if own.get("wait_until_finished") == self._wait:
            del own["wait_until_finished"]
            own.update(self._replaced)

    def _poll(self) -> None:
        # Orbax writes this file last, in every way of committing (since 0.12.3).
        commit_file = os.path.join(self.written, COMMIT_FILE)
        while not self._ended.wait(_POLL_SECONDS):
            if os.path.lexists(commit_file):
                try:
                    self.finish(remember=True)
                except Exception:  # noqa: BLE001  (raised by the next wait)
                    _log.exception("Cleaning up after the checkpoint at %s failed", self.path)
                    return


@functools.cache
def _finish_at_exit() -> None:
    # Python closes all thread pools before it joins threads and runs ``atexit``, and Orbax needs a pool to commit.
    # Only hooks registered here, as the pools themselves do, run before theirs.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_all)


def _finish_all() -> None:
    for pending in list(_pending):
        try:
            pending.checkpointer.wait_until_finished()
        except Exception:  # noqa: BLE001  (nothing can catch it at exit)
            _log.exception("A background save of the checkpoint at %s failed", pending.path)
