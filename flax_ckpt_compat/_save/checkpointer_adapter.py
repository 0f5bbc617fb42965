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

from flax_ckpt_compat._core import thread_pools
from flax_ckpt_compat._core.errors import CheckpointerError, CheckpointError
from flax_ckpt_compat._core.local import atomic, presence, removal, temporaries
from flax_ckpt_compat._core.local.syncing import sync_directory, sync_tree
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._save import validation
from flax_ckpt_compat._save.coordination import Coordinator
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat._save.retention import retain

_log = logging.getLogger("flax_ckpt_compat")
_pending: list[_FollowedSave] = []
_PUBLISHED = "published"


def written_path(path: str) -> str:
    """Return the path for a checkpointer to write to: in a temporary if ``path`` exists, which stays restorable."""
    if not presence.lexists(path):
        return path
    folder = temporaries.staging_path(path)
    with translated(path):
        temporaries.create_directory(folder)
    return os.path.join(folder, os.path.basename(path))


def save(request: SaveRequest, target: Any, written: str | None = None, coordinator: Coordinator | None = None) -> None:
    """Save with the request's checkpointer, and publish the result after its commit, if need be in the background.

    In a multi-process save, all processes agree on the `written_path`, and process 0 publishes.
    """
    checkpointer: Any = request.orbax_checkpointer
    written = written or written_path(request.path)
    try:
        checkpointer.save(written, target)
    except BaseException as error:
        temporaries.release(os.path.dirname(written))  # the next save removes what is left of it
        if not isinstance(error, (TypeError, AttributeError, KeyError)):  # its others say what is wrong with the tree
            raise
        raise CheckpointerError(
            f"{request.path}: the given orbax_checkpointer ({described(checkpointer)}) cannot save this tree: {error}; "
            "pass one for pytrees, or leave orbax_checkpointer out",
            path=request.path,
        ) from error
    if is_async(checkpointer):
        own_wait = checkpointer.wait_until_finished
        follow = functools.partial(_publish_after, own_wait, request, written, coordinator)
        _FollowedSave(checkpointer, request.location, follow).start()
    elif coordinator is None or coordinator.process.index == 0:
        _publish(request, written)


def wait_for_checkpointer(checkpointer: Any, directory: Location) -> None:
    """Wait for background saves of this checkpointer, and of any other into this directory; raise a failure."""
    if checkpointer is not None and is_async(checkpointer):
        checkpointer.wait_until_finished()
    for pending in list(_pending):
        if _is_same(pending.location.parent, directory):
            pending.wait()


def _is_same(one: Location, other: Location) -> bool:
    with suppress(ValueError):  # no directory can have this name
        return one.resolve() == other.resolve()
    return False


def described(checkpointer: Any) -> str:
    """Return the types of a checkpointer and its handler, for messages."""
    handler = getattr(checkpointer, "handler", None)
    names = [type(checkpointer).__name__, *([type(handler).__name__] if handler is not None else [])]
    return " with ".join(names)


def is_async(checkpointer: Any) -> bool:
    """Return whether a checkpointer may commit after `save` has returned."""
    return hasattr(checkpointer, "wait_until_finished")


def _publish(request: SaveRequest, written: str) -> None:
    """Publish what was committed, and retain."""
    if not presence.lexists(written):
        return
    try:
        with translated(written):
            sync_tree(written)  # Orbax does not (0.12.8, measured)
            sync_directory(os.path.dirname(written))
        if written != request.path:
            validation.publish(request, lambda location, new: atomic.publish(written, location.path, new=new))
    finally:
        if written != request.path:
            removal.remove_temporary(os.path.dirname(written))
    retain(request)


def _publish_after(
    own_wait: Callable[[], None], request: SaveRequest, written: str, coordinator: Coordinator | None
) -> None:
    """Wait for the commit; then publish, in process 0, which sends the outcome to the others."""
    if coordinator is not None and coordinator.process.index:
        own_wait()
        # Orbax has committed, but under another name where it replaces a step.
        coordinator.receive(_PUBLISHED)
        return
    failed = None
    try:
        own_wait()
        _publish(request, written)
    except BaseException as error:
        temporaries.release(os.path.dirname(written))
        failed = error
        raise
    finally:
        if coordinator is not None:
            with suppress(CheckpointError):  # the wait of the others has a timeout
                coordinator.send(_PUBLISHED, failed)


class _FollowedSave:
    """A save that a thread follows to its end: Orbax has no public hook after the commit.

    Until its outcome was seen, the checkpointer's ``wait_until_finished`` waits for that thread, whose failure its
    ``check_for_errors`` raises.
    """

    def __init__(self, checkpointer: Any, location: Location, follow: Callable[[], None]):
        # location: of the checkpoint.
        self.location, self._checkpointer, self._follow = location, checkpointer, follow
        methods = {"wait_until_finished": self.wait, "check_for_errors": self.check}
        self._methods = {name: method for name, method in methods.items() if hasattr(checkpointer, name)}
        self._own_check = getattr(checkpointer, "check_for_errors", None)
        self._own = {name: vars(checkpointer)[name] for name in methods if name in vars(checkpointer)}
        self._published = thread_pools.Task(self._run)

    def start(self) -> None:
        """Follow the save in a thread; at once if none can be started."""
        _wait_at_exit()
        _pending.append(self)
        vars(self._checkpointer).update(self._methods)
        if not thread_pools.start_thread(self._published.run):
            self._published.run()

    def _run(self) -> None:
        self._follow()
        self.forget()

    def wait(self) -> None:
        """Wait until the save was published and cleaned up; raise its failure once."""
        self._published.run()
        self._published.wait()  # after Ctrl-C, the next one raises it
        self.forget()
        self._published.result()

    def check(self) -> None:
        """Raise the failure of a save that has ended; do not wait."""
        if self._published.done:
            self.wait()
        elif self._own_check is not None:  # a checkpointer's wait may itself call it
            self._own_check()

    def forget(self) -> None:
        """Give the checkpointer its own methods back."""
        with suppress(ValueError):
            _pending.remove(self)
            attributes = vars(self._checkpointer)
            for name, method in self._methods.items():
                if attributes.get(name) == method:
                    del attributes[name]
                    if name in self._own:
                        attributes[name] = self._own[name]


@functools.cache
def _wait_at_exit() -> None:
    # Python closes all thread pools before it joins threads and runs ``atexit``, and Orbax needs a pool to commit.
    # Only hooks registered here, as the pools themselves do, run before theirs.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_all)


def _finish_all() -> None:
    for pending in list(_pending):
        try:
            pending.wait()
        except Exception:  # noqa: BLE001  (nothing can catch it at exit)
            _log.exception("A background save of the checkpoint at %s failed", pending.location)


def _forget_all() -> None:
    # The threads of these saves exist in the parent only: waiting for them here would never end.
    for pending in list(_pending):
        pending.forget()


os.register_at_fork(after_in_child=_forget_all)
