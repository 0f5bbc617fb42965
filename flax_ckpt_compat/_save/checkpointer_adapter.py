"""Checkpointer objects of real Orbax that callers pass in: they write, our rules stay around them.

Never imports orbax: whoever passes such an object has imported it already.
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
# The last thing that Orbax writes into a checkpoint, in every way of committing it (since 0.12.3).


def written_path(path: str) -> str:
    """Where a checkpointer shall write: what has the final name stays restorable until the new one is complete."""
    return atomic.staging_path(path) if os.path.lexists(path) else path


def save(
    checkpointer: Any,
    path: str,
    target: Any,
    on_commit: Callable[[], None],
    *,
    written: str | None = None,
    team: Coordinator | None = None,
) -> None:
    """Lets the checkpointer write, and publishes what it wrote once that is committed, in the background if need be.

    Args:
        checkpointer: of real Orbax.
        path: the final path.
        target: the user's tree.
        on_commit: what to do after the commit.
        written: of `written_path`, where several processes have to agree on it.
        team: of several processes, of which process 0 publishes and does ``on_commit``.
    """
    pending = _Pending(checkpointer, written or written_path(path), path, on_commit, team)
    try:
        checkpointer.save(pending.written, target)
    except (TypeError, AttributeError, KeyError) as error:  # its other errors say what is wrong with the tree
        raise CheckpointerError(
            f"{path}: the given orbax_checkpointer ({described(checkpointer)}) cannot save this tree: {error}; give "
            f"one for pytrees, or leave orbax_checkpointer out",
            path=path,
        ) from error
    if is_async(checkpointer):
        pending.watch()
    elif pending.leads:
        pending.finish()


def wait_for_pending_saves(checkpointer: Any, directory: str) -> None:
    """Waits for background saves of this checkpointer, and of any other into this directory, and for their clean-up.

    Raises:
        Exception: what such a save failed with.
    """
    if checkpointer is not None and is_async(checkpointer):
        checkpointer.wait_until_finished()
    for pending in list(_pending):
        if os.path.dirname(pending.path) == directory:
            pending.checkpointer.wait_until_finished()


def described(checkpointer: Any) -> str:
    """Return its type and that of its handler, for messages."""
    handler = getattr(checkpointer, "handler", None)
    names = [type(checkpointer).__name__, *([type(handler).__name__] if handler is not None else [])]
    return " with ".join(names)


def is_async(checkpointer: Any) -> bool:
    """Whether it may commit after `save` has returned."""
    return hasattr(checkpointer, "wait_until_finished")


class _Pending:
    """One save that a checkpointer has not committed yet.

    Orbax offers no public hook after the commit, so the commit is seen by the last file of it, and the
    checkpointer's own ``wait_until_finished`` is lengthened until our clean-up has run.

    Attributes:
        checkpointer: of real Orbax.
        path: the final path.
        written: where it writes.
        leads: false in processes that leave publishing and the clean-up to process 0.
    """

    def __init__(
        self, checkpointer: Any, written: str, path: str, on_commit: Callable[[], None], team: Coordinator | None = None
    ):
        self.checkpointer, self.path, self._team = checkpointer, path, team
        self.leads = team is None or team.share.index == 0
        self.written, self._on_commit = written, on_commit
        self._own_wait = getattr(checkpointer, "wait_until_finished", None)
        self._replaced: dict[str, Any] = {}
        self._ended = threading.Event()
        self._failed: BaseException | None = None

    def watch(self) -> None:
        """Starts looking for the commit."""
        _finish_at_exit()
        with _lock:
            _pending.append(self)
            own = vars(self.checkpointer)
            self._replaced = {name: own[name] for name in own if name == "wait_until_finished"}
            self.checkpointer.wait_until_finished = self._wait
        if self.leads:
            try:
                threading.Thread(target=self._poll, name="flax_ckpt_compat-commit", daemon=True).start()
            except RuntimeError:  # the interpreter ends, and has no more threads
                self._wait()

    def _wait(self) -> None:
        """The checkpointer's own wait, then our clean-up."""
        assert self._own_wait is not None
        try:
            self._own_wait()
        except BaseException as error:
            if self._retire():
                self._announce(error)
            raise
        if self.leads:
            self.finish()
        elif self._retire():
            # Orbax has committed, but under another name where it replaces a step.
            assert self._team is not None
            self._team.hear(_PUBLISHED)

    def finish(self, *, remember: bool = False) -> None:
        """Publishes what was committed and cleans up; once.

        Args:
            remember: where it fails, the next who calls this, or waits, gets the same error.
        """
        with _lock:
            if self._ended.is_set():
                return
            if self._failed is None:
                self._failed = self._publish()
            if not (remember and self._failed):
                self._retire()
            if self._failed is not None:
                raise self._failed

    def _publish(self) -> BaseException | None:
        """What it failed with, if it did."""
        try:
            if os.path.lexists(self.written):
                if self.written != self.path:
                    atomic.publish(self.written, self.path)
                self._on_commit()
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            self._announce(error)
            return error
        self._announce(None)
        return None

    def _announce(self, failed: BaseException | None) -> None:
        """Tells the other processes, which wait for it where the checkpointer does not wait for them."""
        if self._team is not None and self.leads and is_async(self.checkpointer):
            with suppress(CheckpointError):  # they wait in bounded time
                self._team.announce(_PUBLISHED, failed)

    def _retire(self) -> bool:
        """Ends the watch; False where it had ended already."""
        with _lock:
            if self._ended.is_set():
                return False
            self._ended.set()
            if self in _pending:
                _pending.remove(self)
                self._give_back()
            return True

    def _give_back(self) -> None:
        own = vars(self.checkpointer)
        if own.get("wait_until_finished") == self._wait:
            del own["wait_until_finished"]
            own.update(self._replaced)

    def _poll(self) -> None:
        sign = os.path.join(self.written, COMMIT_FILE)
        while not self._ended.wait(_POLL_SECONDS):
            if os.path.lexists(sign):
                try:
                    self.finish(remember=True)
                except Exception:  # noqa: BLE001  (raised by the next wait)
                    _log.exception("Cleaning up after the checkpoint at %s failed", self.path)
                    return


@functools.cache
def _finish_at_exit() -> None:
    # Python refuses new tasks to all thread pools before it joins threads and comes to ``atexit``, and Orbax needs a
    # pool to commit. Only this hook, the one that the pools themselves use, is called earlier than theirs.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_all)


def _finish_all() -> None:
    for pending in list(_pending):
        try:
            pending.checkpointer.wait_until_finished()
        except Exception:  # noqa: BLE001  (the interpreter is going: nobody is left to raise it to)
            _log.exception("A background save of the checkpoint at %s failed", pending.path)
