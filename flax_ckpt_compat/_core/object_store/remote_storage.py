"""Define `RemoteStorage`: what all stores answer from lists of files."""

from __future__ import annotations

import abc
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import removal, temporaries
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, is_upload_marker
from flax_ckpt_compat._core.storage import Listing, Stat, Storage
from flax_ckpt_compat._core.storage_errors import not_found, translated
from flax_ckpt_compat._core.thread_pools import in_parallel

_SHORT_HEAD = 32  # enough to tell a msgpack tree from most other files
_SLASHES_OF_BUCKET = 2
_TINY_AT_ONCE = 64  # requests for a few bytes


class RemoteStorage(Storage):
    """A store: paths are URLs, and a folder exists while a file is below it.

    Look-ups are answered by `list_files`, `find` and `read_range`, or by a listing."""

    is_remote = True
    names_processes = sets_aside = False
    max_key, max_inside = 1024, 128  # bytes that stores take, and of the names of a checkpoint's files

    @abc.abstractmethod
    def normal(self, path: str) -> str:
        """Return a URL with a lower-case scheme, without ``.``, ``..`` and redundant slashes."""

    @abc.abstractmethod
    def list_files(self, path: str) -> dict[str, Stat]:
        """Return all files below a folder, by their sorted paths relative to it; none if there is no such folder."""

    @abc.abstractmethod
    def find(self, path: str) -> Stat | None:
        """Return what the store tells of a file; None if there is none."""

    @abc.abstractmethod
    def read_range(self, path: str, start: int, stop: int | None) -> bytes:
        """Read a part of a file; fewer bytes if it ends before."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Remove one checkpoint; raise StorageError on failure."""

    def needs_commit_file(self, path: str) -> bool:  # noqa: ARG002  (one that does tells by the scheme)
        """Return whether a folder without ``commit_success.txt`` is incomplete, also without a mark of ours."""
        return False

    def listing(self, path: str) -> Listing:
        return Listing(path, self.list_files(path))

    def _inside(self, path: str, listing: Listing | None) -> dict[str, Stat]:
        known = None if listing is None else listing.below(path)
        return self.list_files(path) if known is None else known

    def _file(self, path: str, listing: Listing | None) -> Stat | None:
        if listing is not None and path.startswith(f"{listing.root}/"):
            return listing.file(path)
        return self.find(path)

    def _stat(self, path: str, listing: Listing | None = None) -> Stat:
        if (found := self._file(path, listing)) is None:
            raise not_found(path)
        return found

    def isdir(self, path: str, listing: Listing | None = None) -> bool:
        inside = self._inside(path, listing)
        if COMMIT_FILE in inside or not inside:
            return bool(inside)
        # A file hides a folder that is not complete. Without a listing, ask only where a mark makes that likely.
        asks = is_unfinished(inside) or listing is not None
        return not (asks and self._file(path, listing) is not None)

    def isfile(self, path: str, listing: Listing | None = None) -> bool:
        return self._file(path, listing) is not None and not self.isdir(path, listing)

    def exists(self, path: str, listing: Listing | None = None) -> bool:
        return bool(self._inside(path, listing)) or self._file(path, listing) is not None

    def listdir(self, path: str, listing: Listing | None = None) -> list[str]:
        if not (found := self._inside(path, listing)):
            raise not_found(path)
        return list(dict.fromkeys(key.partition("/")[0] for key in found))

    def files_below(self, path: str, listing: Listing | None = None) -> list[str]:
        return list(self._inside(path, listing))

    def why_too_long(self, path: str) -> str | None:
        size = len(path.partition("://")[2].partition("/")[2].encode())
        if size <= self.max_key - self.max_inside:
            return None
        inside = f"up to {self.max_inside} for its files"
        return f"{size} bytes without the bucket, and {inside}, are more than the store allows"

    def size(self, path: str, listing: Listing | None = None) -> int:
        return self._stat(path, listing).size

    def head(self, path: str, listing: Listing | None = None) -> bytes:
        if listing is None:
            return self.read_range(path, 0, _SHORT_HEAD)
        if path not in listing.heads:
            listing.heads[path] = self.read_range(path, 0, _SHORT_HEAD)
        return listing.heads[path]

    def total_size(self, path: str, listing: Listing | None = None) -> int:
        if inside := self._inside(path, listing):
            return sum(stat.size for stat in inside.values())
        found = self._file(path, listing)
        return found.size if found is not None else 0

    def read(self, path: str, start: int = 0, stop: int | None = None, listing: Listing | None = None) -> bytes:
        if listing is not None and path in listing.contents:
            return listing.contents[path][start:stop]
        return b"" if stop is not None and stop <= start else self.read_range(path, start, stop)

    def stored_crc32c(self, path: str) -> int | None:
        return self._stat(path).crc32c

    def version(self, path: str) -> bytes:
        return self._stat(path).version.encode()

    def watch(self, path: str, listing: Listing | None = None) -> Callable[[], bool]:
        before = _versions(self._inside(path, listing))
        # A running save adds files; those that were there stay until it commits. Of an empty folder nothing is read.
        return lambda: bool(before) and not before.items() <= _versions(self.list_files(path)).items()

    def prefetch_heads(self, paths: Collection[str], listing: Listing) -> None:
        there = [path for path in paths if self.isfile(path, listing)]
        _prefetch(listing.heads, there, lambda path: self.read_range(path, 0, _SHORT_HEAD))

    def prefetch_contents(self, paths: Collection[str], listing: Listing) -> None:
        _prefetch(listing.contents, paths, lambda path: self.read_range(path, 0, None))

    def why_unfinished(self, path: str, names: Collection[str]) -> str | None:
        if is_unfinished(names):
            return f"{COMMIT_FILE} is missing: its upload never ended, or it is being removed"
        if COMMIT_FILE not in names and self.needs_commit_file(path):
            return (
                f"{COMMIT_FILE} is missing, which Orbax writes last in this store; if all of it was copied here, add "
                "an empty object of that name"
            )
        return None

    def holds_nothing(self, path: str, listing: Listing | None = None) -> bool:
        inside, found = self._inside(path, listing), self._file(path, listing)
        if found is not None and COMMIT_FILE not in inside:
            return not found.size
        return is_unfinished(inside)

    def temporary_path(self, path: str) -> str:
        """Return a path in this user's folder for temporary files, and remove those of dead writers."""
        folder = os.path.join(tempfile.gettempdir(), f"flax_ckpt_compat-{os.getuid()}")
        with translated(folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise StorageError(f"{folder} is not this user's own folder; remove it, or set TMPDIR", path=folder)
        removal.remove_stale(folder)
        return temporaries.temporary_path(os.path.join(folder, path.rpartition("/")[2]))

    def discard(self, doomed: Iterable[str], listing: Listing | None = None) -> dict[str, StorageError]:  # noqa: ARG002
        failures = {}
        for path in doomed:
            try:
                self.remove(path)
            except StorageError as error:
                failures[path] = error
        return failures

    def resolve(self, path: str) -> str:
        return path

    def can_hold(self, path: str) -> bool:
        return path.count("/") > _SLASHES_OF_BUCKET

    def identity(self, path: str) -> None:
        """Return None: folders have no identity, and files are compared by their version."""

    def restore_set_aside(self, directory: str, names: Collection[str]) -> list[str]:  # noqa: ARG002
        """Return nothing: nothing is set aside."""
        return []

    def context(self) -> Any:
        """Return None, for TensorStore's default context."""
        return None

    def wait(self, path: str, future: Any, nbytes: int = 0) -> Any:  # noqa: ARG002  (a store has its own limit)
        with translated(path):
            return future.result()


def is_unfinished(names: Iterable[str]) -> bool:
    """Return whether a folder with these names has a marker of ours and no commit file."""
    there = set(names)
    return COMMIT_FILE not in there and any(map(is_upload_marker, there))


def _versions(found: dict[str, Stat]) -> dict[str, str]:
    return {name: one.version for name, one in found.items() if not is_upload_marker(name)}


def _prefetch(answers: dict[str, bytes], paths: Collection[str], request: Callable[[str], bytes]) -> None:
    """Ask the store for what is not among the answers, in parallel, before look-ups ask one by one."""

    def look(path: str) -> None:
        with suppress(FileNotFoundError):
            answers[path] = request(path)

    in_parallel(look, [path for path in paths if path not in answers], _TINY_AT_ONCE)
