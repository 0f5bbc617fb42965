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
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from flax_ckpt_compat._core.errors import CleanupError, StorageError
from flax_ckpt_compat._core.object_store import client, uploads, views
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE

_BEGUN = re.compile(r"_begun\.(\d+)\.([0-9a-f]{32})")
_COMMITTED = "All objects of this checkpoint were written before this one.\n{}\n"
# Seconds after which a writer that has not committed counts as dead.
_PATIENCE = 24 * 3600
_LOOKS, _PAUSE = 40, 0.25  # s; for the decision of a writer that began while this one committed


class ConcurrentWriteError(StorageError):
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


@contextmanager
def after_commit(url: str) -> Iterator[None]:
    """Within it, what the store refuses is an error that says that the checkpoint was saved.

    Raises:
        ConcurrentWriteError: another writer replaces it.
        CleanupError: the store refused.
    """
    try:
        yield
    except (ConcurrentWriteError, CleanupError):
        raise
    except StorageError as error:
        message = f"{url} was saved, but what it replaced, or marks of this save, could not be removed: {error}"
        raise CleanupError(f"{message}. The next save of this step removes them", path=url) from error


class WriteLease:
    """The attempt of one writer, or remover, to have a folder for itself.

    Attributes:
        url: of the folder.
        mark: name of the object that tells of it.
        seen: names of the objects in the folder before that.
        goes_on_with: names of the folders of other saves whose objects this turn commits.
    """

    def __init__(self, url: str, mark: str = "", *, replaces: bool = False):
        """Mark the folder, or go on with the turn of a mark that this writer has made before.

        Args:
            url: of the folder.
            mark: made before.
            replaces: a checkpoint that is there is to stay complete until the new one is.
        """
        self.url, self.mark, self.goes_on_with = url, mark, list[str]()
        self.seen = frozenset(client.fresh_keys(url))
        if mark:
            return
        if replaces and self.seen and not views.commit_files(self.seen) and not any(map(is_mark, self.seen)):
            # On s3:// the copy of a local checkpoint is complete without the file, but not beside our mark.
            client.write(f"{url}/{COMMIT_FILE}", _COMMITTED.format("It is a copy.").encode())
            self.seen |= {COMMIT_FILE}
        last = max((max(_order(name), views.order_of_key(name))[0] for name in self.seen), default=0)
        self.mark = f"_begun.{max(int(time.time()), last + 1)}.{uuid.uuid4().hex}"
        client.write(f"{url}/{self.mark}", b"")

    def others(self) -> set[str]:
        """Names of all other objects in the folder.

        Raises:
            ConcurrentWriteError: another writer goes on.
        """
        there = set(client.fresh_keys(self.url))
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
            ConcurrentWriteError: another writer goes on, or has finished.
        """
        there = self.others().difference(but)
        if spare and views.commit_files(there):
            self.give_up()
        self.remove(there)

    def uncommit(self) -> None:
        """Remove the signs of completeness alone.

        Raises:
            ConcurrentWriteError: another writer goes on.
        """
        self.remove(views.commit_files(self.others()))

    def remove(self, names: Collection[str]) -> None:
        """Removes objects of the folder, the signs of completeness before all else."""
        signs = views.commit_files(names)
        for sign in signs:
            client.delete(f"{self.url}/{sign}")
        client.delete_all(f"{self.url}/{name}" for name in names if name not in signs)

    def commit(self, names: Collection[str], spent: Collection[str] = ()) -> None:
        """Write the sign of completeness, and end the turn.

        Args:
            names: of all objects that are part of the checkpoint.
            spent: of objects that are removed then.

        Raises:
            ConcurrentWriteError: another writer began before that, and goes on.
            CleanupError: the store refused to end the turn of what is committed.
        """
        if not uploads.write_if(f"{self.url}/{COMMIT_FILE}", self.sign()):
            self.give_up()
        with after_commit(self.url):
            self._end_committed({COMMIT_FILE, self.mark, *names}, spent)

    def _end_committed(self, needed: set[str], spent: Collection[str]) -> None:
        for _ in range(_LOOKS):
            there = set(client.fresh_keys(self.url))
            if not needed <= there:
                self._take_back()
                self.give_up()
            if not self.is_behind(there):
                break
            time.sleep(_PAUSE)
        self.remove(spent)
        self.end()

    def sign(self) -> bytes:
        """The content of a sign of completeness of this turn, by which others know whose the objects are."""
        return _COMMITTED.format(" ".join([self.mark, *self.goes_on_with])).encode()

    def _take_back(self) -> None:
        """Removes the sign of completeness if it is ours: whoever removed the rest may have looked too early for it."""
        with suppress(FileNotFoundError):
            if self.mark.encode() in client.read(f"{self.url}/{COMMIT_FILE}"):
                client.delete(f"{self.url}/{COMMIT_FILE}")

    def end(self) -> None:
        """Removes the mark."""
        client.delete(f"{self.url}/{self.mark}")

    def give_up(self) -> None:
        """Ends the turn because of another writer."""
        self.end()
        raise ConcurrentWriteError(
            f"{self.url}: another process writes, wrote or removes this checkpoint at the same time, so this one was "
            "not committed; save each step from one place only",
            path=self.url,
        )
