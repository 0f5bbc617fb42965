"""Save with a user's Orbax checkpointer object, which is called and waited for, never changed; import no orbax."""

from __future__ import annotations

import functools
import os
from typing import Any

from flax_ckpt_compat._core.errors import CheckpointerError, translated
from flax_ckpt_compat._core.local import atomic, presence, temporaries
from flax_ckpt_compat._core.local.syncing import sync_directory, sync_tree
from flax_ckpt_compat._save import async_saves, validation
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat._save.retention import retain


def written_path(path: str) -> str:
    """Return the path for a checkpointer to write to: in a temporary if ``path`` exists, which stays restorable."""
    if not presence.lexists(path):
        return path
    folder = temporaries.staging_path(path)
    with translated(path):
        temporaries.create_directory(folder)
    return os.path.join(folder, os.path.basename(path))


def save(request: SaveRequest, target: Any, written: str | None = None, *, is_primary: bool = True) -> None:
    """Save with the request's checkpointer, to the `written_path`; the primary publishes and retains after the commit.

    A checkpointer that saves in the background goes on after this returns, unless the save replaces something."""
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
        what = f"the given orbax_checkpointer ({described(checkpointer)}) cannot save this tree: {error}"
        remedy = "pass one for pytrees, or leave orbax_checkpointer out"
        raise CheckpointerError(f"{request.path}: {what}; {remedy}", path=request.path) from error
    publish = functools.partial(_publish, request, written, is_primary=is_primary)
    if in_background and written == request.path:
        async_saves.start_commit(checkpointer, request.directory, publish)
    else:
        publish()


def described(checkpointer: Any) -> str:
    """Return the types of a checkpointer and its handler, for messages."""
    parts = (checkpointer, getattr(checkpointer, "handler", None))
    return " with ".join(type(part).__name__ for part in parts if part is not None)


def _publish(request: SaveRequest, written: str, *, is_primary: bool) -> None:
    """Publish what was committed, and retain, in the primary."""
    if not is_primary or not presence.lexists(written):
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
