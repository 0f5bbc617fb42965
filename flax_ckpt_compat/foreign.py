"""Checkpointer objects of real Orbax that callers pass in: they write and read, our rules stay around them.

Never imports orbax: whoever passes such an object has imported it already.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core import files
from flax_ckpt_compat._core.backend import Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, map_leaves

_log = logging.getLogger("flax_ckpt_compat")
_lock = threading.RLock()
_pending: list[_Pending] = []
_POLL_SECONDS = 0.01


def save(checkpointer: Any, path: str, target: Any, on_commit: Callable[[], None]) -> None:
    """Lets the checkpointer write ``path``; ``on_commit`` runs once it is committed, in the background if need be.

    What has that name already stays restorable until the new one is complete.
    """
    if _is_async(checkpointer):
        aside = files.set_aside(path) if os.path.lexists(path) else None
        pending = _Pending(checkpointer, path, aside, on_commit)
        try:
            checkpointer.save(path, target)
        except BaseException:
            pending.give_up()
            raise
        pending.watch()
        return
    staged = path if not os.path.lexists(path) else files.staging_path(path)
    checkpointer.save(staged, target)
    if staged != path:
        files.publish(staged, path)
    on_commit()


def settle(checkpointer: Any, directory: str) -> None:
    """Waits for background saves of this checkpointer, and of any other into this directory, and for their clean-up.

    Raises:
        Exception: what such a save failed with.
    """
    if checkpointer is not None and _is_async(checkpointer):
        checkpointer.wait_until_finished()
    for pending in list(_pending):
        if os.path.dirname(pending.path) == directory:
            pending.checkpointer.wait_until_finished()


def _is_async(checkpointer: Any) -> bool:
    return hasattr(checkpointer, "wait_until_finished")


class _Pending:
    """One save that an asynchronous checkpointer has not committed yet.

    Orbax offers no public hook after the commit, so the commit is seen by its one certain sign, the final
    name, and the checkpointer's own ``wait_until_finished`` is lengthened until our clean-up has run.
    """

    def __init__(self, checkpointer: Any, path: str, aside: str | None, on_commit: Callable[[], None]):
        self.checkpointer, self.path = checkpointer, path
        self._aside, self._on_commit = aside, on_commit
        self._wait = checkpointer.wait_until_finished
        self._done = False

    def watch(self) -> None:
        """Starts looking for the commit."""
        with _lock:
            _pending.append(self)
            self.checkpointer.wait_until_finished = self.wait_until_finished
        threading.Thread(target=self._poll, name="flax_ckpt_compat-commit", daemon=True).start()

    def wait_until_finished(self) -> None:
        """The checkpointer's own wait, then our clean-up."""
        try:
            self._wait()
        finally:
            self.finish()

    def finish(self) -> None:
        """Cleans up after a commit, or puts the old checkpoint back after a failure; once."""
        with _lock:
            if self._done:
                return
            if not os.path.lexists(self.path):
                self.give_up()
                return
            self._retire()
            if self._aside is not None:
                files.discard(self._aside)
            self._on_commit()

    def give_up(self) -> None:
        """The save failed: what had the name gets it back."""
        with _lock:
            self._retire()
            if self._aside is not None:
                files.put_back(self._aside, self.path)

    def _retire(self) -> None:
        self._done = True
        if self in _pending:
            _pending.remove(self)
        if self.checkpointer.__dict__.get("wait_until_finished") == self.wait_until_finished:
            del self.checkpointer.wait_until_finished

    def _poll(self) -> None:
        while not self._done:
            if os.path.lexists(self.path):
                try:
                    self.finish()
                except CheckpointError:
                    _log.exception("Cleaning up after the checkpoint at %s failed", self.path)
                return
            time.sleep(_POLL_SECONDS)


@atexit.register
def _finish_all() -> None:
    # Orbax's own threads have been joined by now, so each commit has happened or never will.
    for pending in list(_pending):
        pending.finish()


class Reader:
    """Reads a checkpoint through the caller's checkpointer; what is in it, our own metadata reader tells."""

    format = Format.ORBAX

    def __init__(self, checkpointer: Any, path: str, tree: Node):
        self._checkpointer, self.path, self.tree = checkpointer, path, tree

    def read(self, wanted: Mapping[Path, Any]) -> dict[Path, Any]:
        """The values of all leaves; ``wanted`` maps key paths to target leaves, whose shardings are asked for."""
        arguments = {}
        if type(_handler(self._checkpointer)).__name__ == "PyTreeCheckpointHandler":
            arguments["restore_args"] = _plain(
                map_leaves(lambda at, leaf: _restore_args(leaf, wanted.get(at)), self.tree)
            )
        restored = self._checkpointer.restore(self.path, **arguments)
        return {path: _at(restored, path) for path, leaf in iter_leaves(self.tree) if isinstance(leaf, LeafHandle)}


def restore_raw(checkpointer: Any, path: str) -> Any:
    """Whatever the checkpointer makes of a directory that our own reader does not know."""
    return checkpointer.restore(path)


def _handler(checkpointer: Any) -> Any:
    handler = getattr(checkpointer, "handler", None) or getattr(checkpointer, "_handler", None)
    return getattr(handler, "_handler_impl", handler) if type(handler).__name__.startswith("_") else handler


def _restore_args(leaf: Any, target: Any) -> Any:
    orbax: Any = sys.modules["orbax.checkpoint"]
    if not isinstance(leaf, LeafHandle) or leaf.kind is not LeafKind.ARRAY:
        return orbax.RestoreArgs()
    sharding = getattr(target, "sharding", None) if isinstance(target, (jax.Array, jax.ShapeDtypeStruct)) else None
    if sharding is None:
        return orbax.RestoreArgs(restore_type=np.ndarray)
    return orbax.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)


def _plain(node: Node) -> Any:
    if not isinstance(node, Branch):
        return node
    children = {name: _plain(child) for name, child in node.children.items()}
    return list(children.values()) if node.container.is_sequence else children


def _at(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree[int(name)] if isinstance(tree, (list, tuple)) else tree[name]
    return tree
