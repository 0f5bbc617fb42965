"""Arbitrate between writers of one folder of a store: until one of them has committed, the last to begin wins.

A store has no locks, and a dead writer must not block the next one. So each writer begins by writing a marker object,
numbered above all markers that it sees. A writer that sees a higher marker aborts; the one with the highest
removes what the others wrote, markers included. ``commit_success.txt`` is written only if there is none. Its writer
then checks once more for a newer writer, which either removes the file or aborts.
"""

from __future__ import annotations

import logging
import posixpath
import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

from flax_ckpt_compat._core.errors import CleanupError, ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.listing import AfterCommit
from flax_ckpt_compat._core.object_store import client, uploads, visible_objects
from flax_ckpt_compat._core.orbax_layout import BEGUN, COMMIT_FILE, is_upload_marker
from flax_ckpt_compat._core.progress import OFF
from flax_ckpt_compat._core.thread_pools import at_once, in_parallel

_log = logging.getLogger("flax_ckpt_compat")
_MARKER = re.compile(rf"{BEGUN}\.(\d+)\.([0-9a-f]{{32}})")
_COMMITTED = "All objects of this checkpoint were written before this one.\n{}\n"
# Seconds after which a writer without a commit counts as dead.
EXPIRES_AFTER = 24 * 3600
_POLLS_OF_LOSER = 10
_warned: set[str] = set()  # folders of checkpoints of which `warn_of_leftovers` has warned
_POLLS, _PAUSE = 40, 0.25  # s; until a writer that began during our commit has decided


def is_expired(marker: str) -> bool:
    """Return whether the writer of a marker counts as dead."""
    return is_old(_order(marker)[0])


def is_old(began: float) -> bool:
    """Return whether what began at a time, in seconds since 1970, and has not ended, counts as dead."""
    return time.time() - began > EXPIRES_AFTER


def tag_of(marker: str) -> str:
    """Return the suffix of names that belong to the marker's save only."""
    return "." + marker.rpartition(".")[2]


def _order(marker: str) -> tuple[int, str]:
    match = _MARKER.fullmatch(marker)
    return (int(match[1]), match[2]) if match else (0, "")


@contextmanager
def after_commit(url: str) -> Iterator[None]:
    """Convert StorageErrors within the context to CleanupErrors, which say that the checkpoint was saved."""
    try:
        yield
    except (ConcurrentWriteError, CleanupError):
        raise
    except StorageError as error:
        message = f"{url} was saved, but what it replaced, or markers of this save, could not be removed: {error}"
        raise CleanupError(f"{message}. The next save of this step removes them", path=url) from error


def warn_of_leftovers(url: str, what: str, error: StorageError) -> None:
    """Log that objects which do no harm could not be removed: as a warning once for a folder of checkpoints."""
    folder = posixpath.dirname(url)
    level = logging.INFO if folder in _warned else logging.WARNING
    _warned.add(folder)
    message = "Cannot remove %s at %s: %s. It does no harm; what else cannot be removed in %s is logged as info"
    _log.log(level, message, what, url, error, folder)


class WriteLease:
    """Exclusive access of one writer, or remover, to a folder, until a newer one begins.

    All methods raise ConcurrentWriteError if it is lost.
    """

    def __init__(self, url: str, marker: str = "", *, replaces: bool = False, initial: Collection[str] | None = None):
        """Write the marker, or continue with an earlier one; with ``replaces`` the checkpoint there stays complete.

        ``initial`` is a list of the folder that was just made."""
        # adopted: names of the folders of other saves whose objects this lease commits.
        self.url, self.marker, self.adopted = url, marker, list[str]()
        self.after: AfterCommit | None = None  # takes what those who come next can use
        self.meter = OFF  # counts the bytes of the files that are uploaded
        self.is_alone = False  # whether a list after the marker showed nothing else
        # Names of the objects in the folder before the marker.
        self.initial = frozenset(client.fresh_keys(url) if initial is None else initial)
        if marker:
            return
        if (
            replaces
            and self.initial
            and not visible_objects.commit_files(self.initial)
            and not any(map(is_upload_marker, self.initial))
        ):
            # On s3:// the copy of a local checkpoint is complete without the file, but not beside our marker.
            client.write(f"{url}/{COMMIT_FILE}", _COMMITTED.format("It is a copy.").encode())
            self.initial |= {COMMIT_FILE}
        last = max((max(_order(name), visible_objects.order_of(name))[0] for name in self.initial), default=0)
        self.marker = f"{BEGUN}.{max(int(time.time()), last + 1)}.{uuid.uuid4().hex}"
        client.write(f"{url}/{self.marker}", b"")

    def list_others(self) -> set[str]:
        """Return the names of all other objects in the folder."""
        there = set(client.fresh_keys(self.url))
        if not self.is_held(there):
            self.abort()
        return there - {self.marker}

    def is_held(self, there: Collection[str]) -> bool:
        """Return whether a folder with these names has the marker and no newer one."""
        return self.marker in there and not self.is_superseded(there)

    def is_superseded(self, there: Collection[str]) -> bool:
        """Return whether a folder with these names has a newer marker."""
        return any(_order(name) > _order(self.marker) for name in there)

    def clear(self, *, keep_committed: bool = False, keep: Collection[str] = ()) -> None:
        """Remove all objects but the marker and ``keep``; abort for ``keep_committed`` if a checkpoint is committed."""
        found, seen = at_once(self.list_others, lambda: self._versions(self.initial.difference(keep)))
        there = found.difference(keep)
        if keep_committed and visible_objects.commit_files(there):
            self.abort()
        self.remove(there, seen)

    def uncommit(self) -> None:
        """Remove the commit files only."""
        self.remove(visible_objects.commit_files(self.list_others()))

    def _versions(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the versions of objects that other writers write too, if the store deletes just a version."""
        if not client.scheme_of(self.url).deletes_versions():
            return {}
        found = uploads.versions(self.url, list(filter(visible_objects.is_shared, names)))
        return {name: version for name, version in found.items() if version != client.NO_OBJECT}

    def remove(self, names: Collection[str], seen: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Remove objects of the folder, commit files first.

        For names that other writers share, delete only the current version, or the one in ``seen``, so that a late
        deletion deletes nothing newer."""
        seen = {**self._versions(set(names).difference(seen)), **seen}
        commit_files = visible_objects.commit_files(names)

        def delete(name: str) -> None:
            url = f"{self.url}/{name}"
            if name in seen:
                client.delete_version(url, seen[name])
            else:
                client.delete(url)

        for name in commit_files:
            delete(name)
        in_parallel(delete, set(names).difference(commit_files))

    def commit(self, names: Collection[str], leftovers: Collection[str] = ()) -> None:
        """Write the commit file for these objects, remove ``leftovers``, and release the lease."""
        if not uploads.write_if(f"{self.url}/{COMMIT_FILE}", self.commit_content()):
            self.abort()
        with after_commit(self.url):
            self._end_committed({COMMIT_FILE, self.marker, *names}, leftovers)

    def _end_committed(self, needed: set[str], leftovers: Collection[str]) -> None:
        for _ in range(_POLLS):
            there = set(client.keys_after_commit(self.url, self.after))
            if not needed <= there:
                self._retract_commit()
                self.abort()
            if not self.is_superseded(there):
                break
            time.sleep(_PAUSE)
        # All at once: while there is the folder's own commit file, those below ``_next…`` say nothing.
        client.delete_all(f"{self.url}/{name}" for name in leftovers)
        # The checkpoint is complete beside our marker, so evictions need not wait for its removal.
        if self.after is None:
            self.release_committed()
        else:
            self.after.run_beside(self.release_committed)

    def release_committed(self) -> None:
        """Remove the marker beside a complete checkpoint, where it does no harm if that is refused."""
        try:
            self.release()
        except StorageError as error:
            warn_of_leftovers(self.url, "the marker of a save that is complete", error)

    def commit_content(self) -> bytes:
        """Return the content of a commit file, which tells other writers whose objects these are."""
        return _COMMITTED.format(" ".join([self.marker, *self.adopted])).encode()

    def _retract_commit(self) -> None:
        """Remove the commit file if it is ours: the writer that removed the rest may have missed it."""
        url = f"{self.url}/{COMMIT_FILE}"
        with suppress(FileNotFoundError):
            there = client.version(url)
            if self.marker.encode() in client.read(url):
                client.delete_version(url, there)

    def release(self) -> None:
        """Remove the marker."""
        client.delete(f"{self.url}/{self.marker}")

    def remove_abandoned(self, names: Collection[str]) -> None:
        """Remove objects of this writer, which lost, unless another one commits: alone they would hide a msgpack file.

        Whoever removes the folder may have listed it before they arrived."""
        with suppress(StorageError):  # the error is that the lease is lost
            for _ in range(_POLLS_OF_LOSER):
                there = set(client.fresh_keys(self.url))
                if visible_objects.commit_files(there):
                    return
                if not any(map(is_upload_marker, there)):
                    self._remove_without_marker(there.intersection(names))
                    return
                time.sleep(_PAUSE)

    def _remove_without_marker(self, names: Collection[str]) -> None:
        seen = self._versions(names)
        there = set(client.fresh_keys(self.url))
        # A writer that began since the versions were read has others, and removes these itself.
        if not any(map(is_upload_marker, there)) and not visible_objects.commit_files(there):
            self.remove(there.intersection(names), seen)

    def abort(self) -> None:
        """Release the lease and raise ConcurrentWriteError."""
        with suppress(StorageError):  # the error is that the lease is lost
            self.release()
        raise ConcurrentWriteError(
            f"{self.url}: another process writes, wrote or removes this checkpoint at the same time, so this one was "
            "not committed; save each step from one place only",
            path=self.url,
        )
