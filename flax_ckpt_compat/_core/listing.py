"""Define `Listing`: one listing of a folder of a store, made by whoever begins a call, and handed down with locations.

A store answers look-ups by requests, so a call lists a folder once, whole, and takes its answers from there. On a disk
look-ups are quick, and nothing is kept: `Storage.listing` returns None.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.thread_pools import Task, start_thread


class Listing:
    """All keys below a folder at one moment, and what was learnt of its files since then."""

    __slots__ = ("contents", "heads", "keys", "root", "sizes", "visible")

    def __init__(self, root: str, keys: Sequence[str], visible: Sequence[str] | None = None):
        """Keep the keys below ``root``, relative to it and sorted; ``visible`` are those of complete checkpoints."""
        self.root, self.keys = root, keys
        self.visible = keys if visible is None else visible
        self.heads: dict[str, bytes] = {}  # path of a file → its first bytes
        self.sizes: dict[str, int] = {}  # path of a file → its bytes
        self.contents: dict[str, bytes] = {}  # path of a small file → what it holds

    def covers(self, folder: str) -> bool:
        """Return whether a folder is this one, or below it."""
        return folder == self.root or folder.startswith(f"{self.root}/")

    def below(self, folder: str, *, every: bool = False) -> list[str] | None:
        """Return the visible keys below a folder, or ``every`` one, relative to it; None if it is not covered."""
        if not self.covers(folder):
            return None
        found = self.keys if every else self.visible
        if folder == self.root:
            return list(found)
        inner = folder[len(self.root) + 1 :] + "/"
        first = bisect.bisect_left(found, inner)
        last = bisect.bisect_left(found, inner[:-1] + "0", first)  # "0" follows "/"
        return [key[len(inner) :] for key in found[first:last]]

    def holds_file(self, path: str, *, every: bool = False) -> bool | None:
        """Return whether a path is a listed file; None if the folder that it is in is not covered."""
        if not path.startswith(f"{self.root}/"):
            return None
        found, key = self.keys if every else self.visible, path[len(self.root) + 1 :]
        index = bisect.bisect_left(found, key)
        return index < len(found) and found[index] == key


class AfterCommit:
    """The listing of ``folder`` that a commit made, and the tasks that it leaves to run beside what comes next.

    As a context, its end waits for the tasks, and raises their failure unless there is another."""

    def __init__(self, folder: str):
        """Ask the commit to list this folder, which is above the checkpoint; on a disk it lists nothing."""
        self.folder = folder
        self.listing: Listing | None = None
        self._tasks: list[Task] = []

    def run_beside(self, function: Callable[[], Any]) -> None:
        """Start a function in a thread of its own."""
        task = Task(function)
        self._tasks.append(task)
        start_thread(task.run)

    def __enter__(self) -> AfterCommit:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for all tasks."""
        try:
            while self._tasks and error is None:
                self._tasks.pop().result()
        finally:
            left, self._tasks = self._tasks, []
            for task in left:
                with suppress(StorageError):
                    task.result()
