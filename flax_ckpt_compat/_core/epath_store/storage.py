"""Define `EpathStorage`: folders of files that can be listed, read, written and deleted, and nothing more.

A folder is published as in object stores: a marker, all files, ``commit_success.txt``, and the marker goes. A replaced
one is incomplete from its first change until the commit, and two writers of one name are told apart only as far as the
store refuses to replace a file. Saves warn of that once.
"""

from __future__ import annotations

import logging
import os
import posixpath
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.epath_store import mirror
from flax_ckpt_compat._core.epath_store.files import READ_ONLY, FileInfo, Files
from flax_ckpt_compat._core.errors import ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.listing import AfterCommit, Listing
from flax_ckpt_compat._core.local import atomic, presence
from flax_ckpt_compat._core.local.directories import files_below
from flax_ckpt_compat._core.object_store import commit
from flax_ckpt_compat._core.object_store.writer_markers import is_expired
from flax_ckpt_compat._core.orbax_layout import BEGUN, COMMIT_FILE, is_upload_marker
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.storage import HEAD_BYTES, RemoteStorage, Source
from flax_ckpt_compat._core.storage_errors import TENSORSTORE_ERRORS, not_found, storage_error, translated
from flax_ckpt_compat._core.thread_pools import in_parallel, results_of
from flax_ckpt_compat._core.upload import Upload

_log = logging.getLogger("flax_ckpt_compat")
_HEAD, _AT_ONCE = 32, 16
_warned: set[str] = set()  # schemes


class EpathStorage(RemoteStorage):
    """The store of one scheme."""

    has_client = False

    def __init__(self, scheme: str, files: Files):
        """Keep what reaches the files."""
        self._scheme, self._files = scheme, files

    def normal(self, path: str) -> str:
        scheme, _, rest = path.partition("://")
        bucket, _, key = rest.partition("/")
        if not bucket:
            raise StorageError(f"{path} names no bucket; write {scheme}://bucket/folder", path=path)
        return f"{scheme.lower()}://{bucket}{posixpath.normpath('/' + key.lstrip('/'))}".rstrip("/")

    # Names and listings.

    def listing(self, path: str) -> Listing:
        found = self._files.below(path)
        listing = Listing(path, sorted(found))
        listing.sizes.update({f"{path}/{name}": info.size for name, info in found.items()})
        return listing

    def _keys(self, path: str, listing: Listing | None) -> list[str]:
        known = None if listing is None else listing.below(path)
        return sorted(self._files.below(path)) if known is None else known

    def isdir(self, path: str, listing: Listing | None = None) -> bool:
        inside = self._keys(path, listing)
        return bool(inside) and not (commit.is_unfinished(inside) and self._is_file(path, listing))

    def isfile(self, path: str, listing: Listing | None = None) -> bool:
        return self._is_file(path, listing) and not self.isdir(path, listing)

    def _is_file(self, path: str, listing: Listing | None) -> bool:
        known = None if listing is None else listing.holds_file(path)
        if known is not None:
            return known
        with suppress(FileNotFoundError):
            self._files.info(path)
            return True
        return False

    def exists(self, path: str, listing: Listing | None = None) -> bool:
        return bool(self._keys(path, listing)) or self._is_file(path, listing)

    def listdir(self, path: str, listing: Listing | None = None) -> list[str]:
        if not (found := self._keys(path, listing)):
            raise not_found(path)
        return list(dict.fromkeys(key.partition("/")[0] for key in found))

    def files_below(self, path: str, listing: Listing | None = None) -> list[str]:
        return self._keys(path, listing)

    def why_too_long(self, path: str) -> str | None:
        size = len(path.partition("://")[2].encode())
        if size <= self.max_key - self.max_inside:
            return None
        return f"{size} bytes, and up to {self.max_inside} for its files, are more than stores allow"

    # Files.

    def size(self, path: str, listing: Listing | None = None) -> int:
        if listing is not None and path in listing.sizes:
            return listing.sizes[path]
        return self._files.info(path).size

    def head(self, path: str, listing: Listing | None = None) -> bytes:
        if listing is not None and path in listing.heads:
            return listing.heads[path]
        found = self.read(path, 0, _HEAD, listing)
        if listing is not None:
            listing.heads[path] = found
        return found

    def total_size(self, path: str, listing: Listing | None = None) -> int:
        if inside := self._files.below(path):
            return sum(info.size for info in inside.values())
        return self.size(path, listing) if self._is_file(path, listing) else 0

    def read(self, path: str, start: int = 0, stop: int | None = None, listing: Listing | None = None) -> bytes:
        if listing is not None and path in listing.contents:
            return listing.contents[path][start:stop]
        return self._files.read(path, start, stop) if stop is None or start < stop else b""

    def open_file(self, path: str) -> Source:
        return _OpenedFile(self._files, path)

    def stored_crc32c(self, path: str) -> None:
        """Return None: what stores tell differs."""

    def version(self, path: str) -> bytes:
        return self._files.info(path).version.encode()

    def watch(self, path: str, listing: Listing | None = None) -> Callable[[], bool]:
        before = self._of_checkpoint(path)
        known = None if listing is None else listing.below(path)
        listed = before.keys() if not known else {name for name in known if not is_upload_marker(name)}
        # Of an empty folder nothing is read.
        return lambda: listed != before.keys() or (bool(before) and self._of_checkpoint(path) != before)

    def _of_checkpoint(self, path: str) -> dict[str, FileInfo]:
        return {name: info for name, info in self._files.below(path).items() if not is_upload_marker(name)}

    def delete(self, path: str) -> None:
        self._files.delete(path)

    def prefetch_sizes(self, paths: Collection[str], listing: Listing) -> None:
        """Do nothing: a listing has the sizes."""

    def prefetch_heads(self, paths: Collection[str], listing: Listing) -> None:
        there = [path for path in paths if listing.holds_file(path) and path not in listing.heads]
        in_parallel(lambda path: self.head(path, listing), there, _AT_ONCE)

    def prefetch_contents(self, paths: Collection[str], listing: Listing) -> None:
        there = [path for path in paths if listing.holds_file(path) and path not in listing.contents]
        listing.contents.update(results_of(lambda path: self.read(path, listing=listing), there))

    # Checkpoints.

    def content_root(self, path: str, listing: Listing | None = None) -> str:  # noqa: ARG002
        """Return the folder itself: a replaced one is incomplete for a while."""
        return path

    def why_unfinished(self, path: str, names: Collection[str]) -> str | None:  # noqa: ARG002
        if not commit.is_unfinished(names):
            return None
        return f"{COMMIT_FILE} is missing: its upload never ended, or it is being removed"

    def holds_nothing(self, path: str, listing: Listing | None = None) -> bool:
        if self.isdir(path, listing):
            return commit.is_unfinished(self.listdir(path, listing))
        return self._is_file(path, listing) and not self.size(path, listing)

    def prepare_directory(self, path: str, listing: Listing | None = None) -> None:
        if self._scheme in READ_ONLY:
            message = f"{path}: {self._scheme}:// is only read; save to a disk or to another store, and upload that"
            raise StorageError(message, path=path)
        if self._scheme not in _warned:
            _warned.add(self._scheme)
            _log.warning(
                "%s: saves to %s:// have no conditional writes and no atomic replacement: let one process write a "
                "checkpoint, and do not overwrite a directory that others read (migration_guide/object_stores.md)",
                path,
                self._scheme,
            )
        self.remove_leftovers(path, list(self._leftovers(path, listing)))

    def leftovers(self, path: str) -> dict[str, bool]:
        return self._leftovers(path, None)

    def _leftovers(self, path: str, listing: Listing | None) -> dict[str, bool]:
        inside: dict[str, list[str]] = {}
        for key in self._keys(path, listing):
            name, _, rest = key.partition("/")
            inside.setdefault(name, []).append(rest)
        return {name: True for name, keys in inside.items() if _is_dead(keys)}

    def remove_leftovers(self, path: str, names: Collection[str]) -> None:
        for name in names:
            keys = sorted(self._files.below(f"{path}/{name}"))
            if _is_dead(keys):
                self._delete_all(f"{path}/{name}", keys)
                self._files.prune(f"{path}/{name}")

    def temporary_path(self, path: str, *, locked: bool = False) -> str:
        return commit.staging_path(path, locked=locked)

    def publish(
        self,
        temporary: str,
        path: str,
        *,
        new: bool = False,
        listing: Listing | None = None,  # noqa: ARG002  (what it shows may be old, and no write has a condition)
        after: AfterCommit | None = None,
        meter: Meter = OFF,
    ) -> None:
        inside, is_file = self._files.below(path), self._is_file(path, None)
        is_there = is_file and self.size(path) > 0
        if new and (is_there or (bool(inside) and not commit.is_unfinished(inside))):
            raise _taken(path)
        with translated(path, "written"):
            self._replace(temporary, path, inside, meter, is_file=is_file, new=new)
        if after is not None:
            after.listing = self.listing(after.folder)
        atomic.delete(temporary)

    def _replace(
        self, temporary: str, path: str, inside: Iterable[str], meter: Meter, *, is_file: bool, new: bool
    ) -> None:
        is_folder, both = presence.isdir(temporary), self._files.holds_both
        if not both:  # what has the name goes first
            self._remove_folder(path, [] if is_folder else inside)
            self._delete_file(path, is_file and is_folder)
        if is_folder:
            self._publish_folder(temporary, path, inside, meter)
            self._delete_file(path, is_file and both)
        else:
            self._publish_file(temporary, path, new=new and not is_file)
            self._remove_folder(path, inside if both else [])
        self._remove_arrays_beside(path)

    def _delete_file(self, path: str, is_there: bool) -> None:
        if is_there:
            self._files.delete(path)

    def _publish_file(self, temporary: str, path: str, *, new: bool) -> None:
        try:
            self._files.put(temporary, path, new=new)
        except FileExistsError as error:
            raise _taken(path) from error

    def _publish_folder(self, temporary: str, path: str, inside: Iterable[str], meter: Meter) -> None:
        names = [name for name in files_below(temporary) if name != COMMIT_FILE]
        marker = self._begin(path)
        self._delete_committed(path, [name for name in inside if name not in names])

        def put(name: str) -> None:
            file = os.path.join(temporary, name)
            self._files.put(file, f"{path}/{name}", new=False)
            meter.add(os.path.getsize(file), name)

        in_parallel(put, names, _AT_ONCE)
        self._write(f"{path}/{COMMIT_FILE}", f"All files of this checkpoint were written before this one.\n{path}\n")
        self._files.delete(f"{path}/{marker}")

    def _begin(self, path: str) -> str:
        """Write the marker of a running change of a folder; return its name."""
        marker = f"{BEGUN}.{int(time.time())}.{uuid.uuid4().hex}"
        self._write(f"{path}/{marker}", "")
        return marker

    def _write(self, path: str, text: str) -> None:
        staged = commit.staging_path(path)
        try:
            with translated(staged, "written"), open(staged, "w", encoding="utf-8") as file:
                file.write(text)
            self._files.put(staged, path, new=False)
        finally:
            atomic.delete(staged)

    def _remove_folder(self, path: str, keys: Iterable[str]) -> None:
        if keys := list(keys):
            marker = self._begin(path)
            self._delete_committed(path, keys)
            self._files.delete(f"{path}/{marker}")
        self._files.prune(path)

    def _delete_committed(self, path: str, keys: Iterable[str]) -> None:
        """Delete files of a folder, the commit first: from then on it is incomplete."""
        keys = list(keys)
        if COMMIT_FILE in keys:
            self._files.delete(f"{path}/{COMMIT_FILE}")
        self._delete_all(path, [key for key in keys if key != COMMIT_FILE])

    def _delete_all(self, path: str, keys: Collection[str]) -> None:
        """Delete files, the markers last: while one is there, the folder is incomplete."""
        rest = [key for key in keys if not is_upload_marker(key)]
        in_parallel(lambda key: self._files.delete(f"{path}/{key}"), rest, _AT_ONCE)
        for key in set(keys).difference(rest):
            self._files.delete(f"{path}/{key}")

    def discard_one(self, path: str, listing: Listing | None) -> None:  # noqa: ARG002
        with translated(path, "removed"):
            self._files.delete(path)
            self._remove_folder(path, self._files.below(path))
            self._remove_arrays_beside(path)

    def _remove_arrays_beside(self, path: str) -> None:
        arrays = path + ARRAYS_POSTFIX
        self._remove_folder(arrays, commit.arrays_among(self._keys(arrays, None)))

    # Saves by several processes.

    def begin_upload(self, path: str, *, in_gda_folder: bool) -> Upload:  # noqa: ARG002
        message = (
            f"{path}: several processes cannot save one checkpoint to {self._scheme}://, which has no conditional "
            "writes; save to a shared disk, s3:// or gs://, and copy that"
        )
        raise StorageError(message, path=path)

    def join_upload(self, fields: dict[str, str]) -> Upload:
        raise AssertionError(fields)

    # TensorStore.

    def kvstore(self, path: str) -> dict[str, Any]:
        """Return the spec of a local copy, which is made now."""
        with translated(path, "read"):
            return {"driver": "file", "path": mirror.copy_of(self._files, path.rstrip("/")) + "/"}

    def context(self) -> None:
        """Return None, for TensorStore's default context."""

    def wait(self, path: str, future: Any, nbytes: int = 0) -> Any:  # noqa: ARG002
        with translated(path):
            return future.result()

    def retry(self, path: str, operation: str, request: Callable[[], Any], nbytes: int = 0) -> Any:  # noqa: ARG002
        try:
            return request().result()
        except TENSORSTORE_ERRORS as error:
            raise storage_error(path, error, operation) from error


class _OpenedFile(Source):
    """A file whose version is compared after each read."""

    def __init__(self, files: Files, path: str):
        self._files, self.path = files, path
        self._version = files.info(path)
        self.size = self._version.size
        self.head = self.read(0, HEAD_BYTES)

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        found = self._files.read(self.path, start, stop)
        if len(found) != stop - start or self._files.info(self.path) != self._version:
            raise StorageError(
                f"{self.path} was replaced or removed since it was opened; read it again", path=self.path
            )
        return found


def _is_dead(keys: Collection[str]) -> bool:
    """Return whether a folder with these keys is an upload without a commit whose writers count as dead."""
    names = {key.partition("/")[0] for key in keys}
    return commit.is_unfinished(names) and all(is_expired(name) for name in names if is_upload_marker(name))


def _taken(path: str) -> ConcurrentWriteError:
    return ConcurrentWriteError(
        f"{path}: another process wrote this checkpoint, and it stays; pass overwrite=True to replace it", path=path
    )
