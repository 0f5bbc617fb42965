"""Which of several writers of one folder of a store goes on: the last to begin that saw no committed checkpoint.

A store has no locks, and a writer that died must not stop the next one. So each marks the folder when it begins, with
a number above those of the marks that it sees. Who sees a mark above its own gives up; the one with the highest removes
what the others wrote, their marks too. ``commit_success.txt`` is written only where there is none, and whoever wrote it
looks once more whether another began meanwhile, which then either removes it or gives up.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection
from contextlib import suppress

from flax_ckpt_compat._core import store_uploads, stores
from flax_ckpt_compat._core.errors import StorageError

COMMIT_FILE = "commit_success.txt"
_BEGUN = re.compile(r"_begun\.(\d+)\.([0-9a-f]{32})")
_COMMITTED = "All objects of this checkpoint were written before this one.\n{}\n"
# Seconds after which a writer that has not committed counts as dead.
_PATIENCE = 24 * 3600
_LOOKS, _PAUSE = 40, 0.25  # s; for the decision of a writer that began while this one committed


class LostTurnError(StorageError):
    """Another process writes, has written, or removes the same checkpoint."""


def is_mark(name: str) -> bool:
    """True for the names of objects that tell of a save or a removal in progress."""
    return _BEGUN.fullmatch(name) is not None


def is_old(mark: str) -> bool:
    """Whether the writer of a mark is surely dead."""
    return time.time() - _order(mark)[0] > _PATIENCE


def tag_of(mark: str) -> str:
    """What names end in that are of the same save alone, and no others."""
    return "." + mark.rpartition(".")[2]


def _order(mark: str) -> tuple[int, str]:
    match = _BEGUN.fullmatch(mark)
    return (int(match[1]), match[2]) if match else (0, "")


class Turn:
    """The attempt of one writer, or remover, to have a folder for itself.

    Attributes:
        url: of the folder.
        mark: name of the object that tells of it.
        seen: names of the objects in the folder before that.
    """

    def __init__(self, url: str, mark: str = ""):
        """Marks the folder, or goes on with the turn of a mark that this writer has made before."""
        self.url, self.mark = url, mark
        self.seen = frozenset(stores.fresh_keys(url))
        if mark:
            return
        last = max((_order(name)[0] for name in self.seen), default=0)
        self.mark = f"_begun.{max(int(time.time()), last + 1)}.{uuid.uuid4().hex}"
        stores.write(f"{url}/{self.mark}", b"")

    def others(self) -> set[str]:
        """Names of all other objects in the folder.

        Raises:
            LostTurnError: another writer goes on.
        """
        there = set(stores.fresh_keys(self.url))
        if self.mark not in there or self.is_behind(there):
            self.give_up()
        return there - {self.mark}

    def is_behind(self, there: Collection[str]) -> bool:
        """Whether a writer that began later has marked the folder, which has these names in it."""
        return any(_order(name) > _order(self.mark) for name in there)

    def clear(self, *, spare: bool = False, but: Collection[str] = ()) -> None:
        """Removes all that is in the folder but the mark, the sign of completeness before all else.

        Args:
            spare: give up where there is a committed checkpoint.
            but: names of objects that stay.

        Raises:
            LostTurnError: another writer goes on, or has finished.
        """
        there = self.others().difference(but)
        if spare and COMMIT_FILE in there:
            self.give_up()
        self.remove(there)

    def remove(self, names: Collection[str]) -> None:
        """Removes objects of the folder, the sign of completeness before all else."""
        if COMMIT_FILE in names:
            stores.delete(f"{self.url}/{COMMIT_FILE}")
        stores.delete_all(f"{self.url}/{name}" for name in names if name != COMMIT_FILE)

    def commit(self, names: Collection[str]) -> None:
        """Writes the sign of completeness, and ends the turn.

        Args:
            names: of all objects that are part of the checkpoint.

        Raises:
            LostTurnError: another writer began before that, and goes on.
        """
        if not store_uploads.write_if(f"{self.url}/{COMMIT_FILE}", _COMMITTED.format(self.mark).encode()):
            self.give_up()
        needed = {COMMIT_FILE, self.mark, *names}
        for _ in range(_LOOKS):
            there = set(stores.fresh_keys(self.url))
            if not needed <= there:
                self._take_back()
                self.give_up()
            if not self.is_behind(there):
                break
            time.sleep(_PAUSE)
        self.end()

    def _take_back(self) -> None:
        """Removes the sign of completeness if it is ours: whoever removed the rest may have looked too early for it."""
        with suppress(FileNotFoundError):
            if self.mark.encode() in stores.read(f"{self.url}/{COMMIT_FILE}"):
                stores.delete(f"{self.url}/{COMMIT_FILE}")

    def end(self) -> None:
        """Removes the mark."""
        stores.delete(f"{self.url}/{self.mark}")

    def give_up(self) -> None:
        """Ends the turn because of another writer."""
        self.end()
        raise LostTurnError(
            f"{self.url}: another process writes, wrote or removes this checkpoint at the same time, so this one was "
            "not committed; save each step from one place only",
            path=self.url,
        )
