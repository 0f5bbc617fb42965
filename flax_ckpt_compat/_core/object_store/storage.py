"""Reach URLs of stores, where a folder exists while a file is below it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Set
from contextlib import suppress
from typing import Self

from flax_ckpt_compat._core.byte_reads import Source
from flax_ckpt_compat._core.errors import StorageError, not_found
from flax_ckpt_compat._core.local import atomic, presence, temporaries
from flax_ckpt_compat._core.object_store import commit
from flax_ckpt_compat._core.object_store.commit import Upload, client_for, is_unfinished
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import SHORT_HEAD, Listing, Location, Stat
from flax_ckpt_compat._core.thread_pools import in_parallel

_TINY_AT_ONCE = 64  # requests for a few bytes


class ObjectLocation(Location):
    """A URL; look-ups are answered by the listing, or by requests of the client of its scheme."""

    __slots__ = ()
    is_remote = True

    def listed(self) -> Self:
        if self.listing is not None and f"{self}/".startswith(f"{self.listing.root}/"):
            return self
        return self.with_listing(Listing(self.path, client_for(self.path).list(self.path)))

    def _inside(self) -> dict[str, Stat]:
        known = None if self.listing is None else self.listing.below(self.path)
        return client_for(self.path).list(self.path) if known is None else known

    def _file(self) -> Stat | None:
        if self.listing is not None and self.path.startswith(f"{self.listing.root}/"):
            return self.listing.file(self.path)
        return client_for(self.path).find(self.path)

    def isdir(self) -> bool:
        inside = self._inside()
        if COMMIT_FILE in inside or not inside:
            return bool(inside)
        # A file hides a folder that is not complete. Each look costs a request, and tools give folders empty objects:
        # without a listing, ask only where a mark makes a file likely.
        asks = is_unfinished(inside) or self.listing is not None
        return not (asks and self._file() is not None)

    def isfile(self) -> bool:
        return self._file() is not None and not self.isdir()

    def exists(self) -> bool:
        return bool(self._inside()) or self._file() is not None

    def listdir(self) -> list[str]:
        if not (found := self._inside()):
            raise not_found(self.path)
        return list(dict.fromkeys(key.partition("/")[0] for key in found))

    def files_below(self) -> list[str]:
        return list(self._inside())

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        if self.listing is not None and self.path in self.listing.contents:
            return self.listing.contents[self.path][start:stop]
        return b"" if stop is not None and stop <= start else client_for(self.path).read(self.path, start, stop)

    def head(self) -> bytes:
        heads = self.listing.heads if self.listing is not None else {}
        if self.path not in heads:
            heads[self.path] = client_for(self.path).read(self.path, 0, SHORT_HEAD)
        return heads[self.path]

    def size(self) -> int:
        if (found := self._file()) is None:
            raise not_found(self.path)
        return found.size

    def total_size(self) -> int:  # of a folder also where an object hides it
        found = self._inside().values() or [self._file()]
        return sum(one.size for one in found if one is not None)

    def identity(self) -> None:  # stores have no inodes
        return None

    def why_too_long(self) -> None:  # each store has its own limit
        return None

    resolve = Location.__str__

    def watch(self) -> Callable[[], bool]:
        def versions(found: dict[str, Stat]) -> Set[tuple[str, str]]:
            return {(name, one.version) for name, one in found.items() if not is_upload_marker(name)}

        before = versions(self._inside())
        # A running save adds files; those that were there stay until it commits. Of an empty folder nothing is read.
        return lambda: bool(before) and not before <= versions(client_for(self.path).list(self.path))

    def prefetch(self, names: Iterable[str], *, heads: bool = False) -> None:
        if self.listing is None:
            return
        answers, stop = (self.listing.heads, SHORT_HEAD) if heads else (self.listing.contents, None)
        paths = [there.path for there in map(self.__truediv__, names) if there.isfile()]

        def look(path: str) -> None:
            with suppress(FileNotFoundError):
                answers[path] = client_for(path).read(path, 0, stop)

        in_parallel(look, [path for path in paths if path not in answers], _TINY_AT_ONCE)

    # Checkpoints.

    def why_unfinished(self, names: Collection[str]) -> str | None:
        if is_unfinished(names):
            return f"{COMMIT_FILE} is missing: its upload never ended, or it is being removed"
        if COMMIT_FILE not in names and client_for(self.path).needs_commit_file:
            remedy = "if all of it was copied here, add an empty object of that name"
            return f"{COMMIT_FILE} is missing, which Orbax writes last in this store; {remedy}"
        return None

    def holds_nothing(self) -> bool:
        inside, found = self._inside(), self._file()
        if found is not None and COMMIT_FILE not in inside and (found.size or not inside):
            return not found.size
        return is_unfinished(inside)

    def restore_set_aside(self, names: Collection[str]) -> list[str]:  # noqa: ARG002
        return []

    def temporary_path(self) -> str:
        """Return a path in this user's folder for temporary files, and remove those of dead writers."""
        atomic.remove_stale(folder := temporaries.own_folder())
        return temporaries.temporary_path(os.path.join(folder, self.name))

    def discard(self, names: Iterable[str]) -> dict[str, StorageError]:
        failures = {}
        for name in names:
            try:
                commit.remove((self / name).path)
            except StorageError as error:
                failures[name] = error
        return failures

    def open_file(self) -> Source:
        return client_for(self.path).open(self.path)

    def prepare_directory(self) -> None:
        client_for(self.path).prepare(self.path)
        for name, found in commit.leftovers(self.path, self._inside()).items():
            with commit.harmless(f"{self}/{name}", "what an interrupted save left"):  # it must not prevent a save
                commit.delete(f"{self}/{name}", found, commit.versions_of(found))

    def leftovers(self, *, remove: Collection[str] = ()) -> dict[str, bool]:
        there = client_for(self.path).list(self.path)
        found = commit.leftovers(self.path, there)
        for name in found.keys() & {*remove}:
            commit.delete(f"{self}/{name}", found[name], commit.versions_of(found[name]))
        # Parts that are no object yet are in no list; an object of that name, which is complete, stays.
        parts = {name: name not in there for name in client_for(self.path).stale_parts(self.path, remove)}
        return parts | {name: f"{name}/{COMMIT_FILE}" not in there for name in found}

    def publish(self, temporary: str, *, new: bool = False, meter: Meter = OFF) -> None:
        if presence.isdir(temporary):
            Upload(self.path).publish(temporary, new=new, meter=meter)
        else:
            commit.publish_object(temporary, self.path, new=new, meter=meter)
            if not new:
                commit.remove_arrays_beside(self.path)
        atomic.remove_temporary(temporary)
