"""Save with a user's Orbax checkpointer object, under our rules for overwriting, publishing and retention.

The object is called and waited for, and never changed. Never imports orbax: a caller with such an object has imported
it already.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import threading
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import CheckpointerError, CleanupError
from flax_ckpt_compat._core.local import atomic, presence, temporaries
from flax_ckpt_compat._core.local.syncing import sync_directory, sync_tree
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._save import validation
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat._save.retention import retain

_log = logging.getLogger("flax_ckpt_compat")
# Background saves whose commit nobody has waited for. Changed by single operations only: a signal handler may save.
_pending: list[_PendingSave] = []


@dataclasses.dataclass(eq=False, slots=True)
class _PendingSave:
    """A save that a checkpointer may still be committing; the next call of ours for its directory finishes it."""

    request: SaveRequest
    is_primary: bool  # this process removes what the save replaces and ``keep`` evicts

    def finish(self) -> None:
        """Wait for the commit, and retain; raise a failure once."""
        checkpointer: Any = self.request.orbax_checkpointer
        try:
            checkpointer.wait_until_finished()
        except Exception:  # not Ctrl-C, after which the save goes on
            _forget(self)
            raise
        if _forget(self) and self.is_primary:
            try:
                _publish(self.request, self.request.path)
            except CleanupError as error:  # raised, it would prevent the next save
                _log.error("%s", error)


def _forget(pending: _PendingSave) -> bool:
    """Forget a save; return False if another thread has done so."""
    try:
        _pending.remove(pending)
    except ValueError:
        return False
    return True


def written_path(path: str) -> str:
    """Return the path for a checkpointer to write to: in a temporary if ``path`` exists, which stays restorable."""
    if not presence.lexists(path):
        return path
    folder = temporaries.staging_path(path)
    with translated(path):
        temporaries.create_directory(folder)
    return os.path.join(folder, os.path.basename(path))


def save(request: SaveRequest, target: Any, written: str | None = None, *, is_primary: bool = True) -> None:
    """Save with the request's checkpointer; publish the result, and retain, once it is committed.

    A checkpointer that saves in the background goes on after this returns, unless the save replaces something: then
    this waits for it. In a multi-process save, all processes agree on the `written_path`, and the primary publishes.
    """
    checkpointer: Any = request.orbax_checkpointer
    written = written or written_path(request.path)
    in_background = hasattr(checkpointer, "wait_until_finished")
    try:
        checkpointer.save(written, target)
        if in_background and written != request.path:
            checkpointer.wait_until_finished()
    except BaseException as error:
        temporaries.release(os.path.dirname(written))  # the next save removes what is left of it
        if not isinstance(error, (TypeError, AttributeError, KeyError)):  # its others say what is wrong with the tree
            raise
        raise CheckpointerError(
            f"{request.path}: the given orbax_checkpointer ({described(checkpointer)}) cannot save this tree: {error}; "
            "pass one for pytrees, or leave orbax_checkpointer out",
            path=request.path,
        ) from error
    if in_background and written == request.path:
        _finish_at_exit()
        _pending.append(_PendingSave(request, is_primary))
    elif is_primary:
        _publish(request, written)


def wait_for_checkpointer(checkpointer: Any, directory: Location) -> None:
    """Finish background saves of this checkpointer, and of any other into this directory; raise a failure."""
    for pending in list(_pending):
        if pending.request.orbax_checkpointer is checkpointer or _is_same(pending.request.directory, directory):
            pending.finish()
    if hasattr(checkpointer, "wait_until_finished"):
        checkpointer.wait_until_finished()


def _is_same(one: Location, other: Location) -> bool:
    with suppress(ValueError):  # no directory can have this name
        return one.resolve() == other.resolve()
    return False


def described(checkpointer: Any) -> str:
    """Return the types of a checkpointer and its handler, for messages."""
    handler = getattr(checkpointer, "handler", None)
    names = [type(checkpointer).__name__, *([type(handler).__name__] if handler is not None else [])]
    return " with ".join(names)


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
            atomic.remove_temporary(os.path.dirname(written))
    retain(request)


@functools.cache
def _finish_at_exit() -> None:
    # Python closes all thread pools before it joins threads and runs ``atexit``, and Orbax needs a pool to commit.
    # Only hooks registered here, as the pools themselves do, run before theirs.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_all)


def _finish_all() -> None:
    for pending in list(_pending):
        try:
            pending.finish()
        except Exception:  # noqa: BLE001  (nothing can catch it at exit)
            _log.exception("A background save of the checkpoint at %s failed", pending.request.location)


os.register_at_fork(after_in_child=_pending.clear)  # the threads of these saves exist in the parent only
