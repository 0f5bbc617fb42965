"""Reach local paths, with the functions of `os`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic, directories, presence, removal, temporaries
from flax_ckpt_compat._core.local.safe_open import open_regular
from flax_ckpt_compat._core.local.temporaries import ABSENT
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Listing, Source, Storage, Upload
from flax_ckpt_compat._core.storage_errors import translated

_BY_EFFECTIVE_IDS = os.access in os.supports_effective_ids
_SMALL_READ = 64 * 2**10  # bytes
_HEAD_BYTES = 32


class LocalStorage(Storage):
    """The local file system, network file systems among it."""

    is_remote = False
    names_processes = sets_aside = True

    def listing(self, path: str) -> None:
        """Return None: see `Storage.listing`."""

    def files_below(self, path: str, listing: Listing | None = None) -> list[str]:  # noqa: ARG002
        return directories.files_below(path)

    def exists(self, path: str, listing: Listing | None = None) -> bool:  # noqa: ARG002
        return presence.lexists(path)

    def size(self, path: str, listing: Listing | None = None) -> int:  # noqa: ARG002
        return os.path.getsize(path)

    def delete(self, path: str) -> None:
        os.unlink(path)

    def restore_set_aside(self, directory: str, names: Collection[str]) -> list[str]:
        return removal.restore_set_aside(directory, names)

    def can_hold(self, path: str) -> bool:  # noqa: ARG002
        return True

    def resolve(self, path: str) -> str:
        return os.path.realpath(path)

    def listdir(self, path: str, listing: Listing | None = None) -> list[str]:  # noqa: ARG002
        try:
            return os.listdir(path)
        except ValueError as error:
            raise FileNotFoundError(errno.ENOENT, f"no directory can have this name ({error})", path) from error
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            # `lexists` raises if it is the mount that is stale.
            if error.errno not in ABSENT or (error.errno == errno.ESTALE and presence.lexists(path)):
                raise
            why = "removed by another machine" if error.errno == errno.ESTALE else error.strerror
            raise FileNotFoundError(errno.ENOENT, why, path) from error

    def isdir(self, path: str, listing: Listing | None = None) -> bool:  # noqa: ARG002
        return stat.S_ISDIR(_mode(path))

    def isfile(self, path: str, listing: Listing | None = None) -> bool:  # noqa: ARG002
        return stat.S_ISREG(_mode(path))

    def why_too_long(self, path: str) -> str | None:
        folder = path
        while not presence.isdir(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        names = path[len(folder) :].split(os.sep)
        for one in (path, *(os.path.join(folder, name) for name in names)):
            try:
                os.lstat(one)
            except (OSError, ValueError) as error:  # a NUL in the path
                if getattr(error, "errno", None) == errno.ENAMETOOLONG:
                    size, longest = len(os.fsencode(path)), max(len(os.fsencode(name)) for name in names)
                    return f"{size} bytes, with a name of {longest}, are more than the file system allows"
        return None

    def head(self, path: str, listing: Listing | None = None) -> bytes:  # noqa: ARG002
        descriptor = open_regular(path)
        try:
            return os.read(descriptor, _HEAD_BYTES)
        finally:
            os.close(descriptor)

    def holds_nothing(self, path: str, listing: Listing | None = None) -> bool:  # noqa: ARG002
        with translated(path):
            return atomic.is_empty(path)

    def identity(self, path: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        # A new directory often takes the number of one that was removed just before.
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def watch(self, path: str, listing: Listing | None = None) -> Callable[[], bool]:  # noqa: ARG002
        before = self.identity(path)

        def is_replaced() -> bool:
            now = self.identity(path)
            return now != before and None not in (now, before) and presence.isdir(path)

        return is_replaced

    def version(self, path: str) -> bytes:
        status = os.stat(path)
        return b"%d %d" % (status.st_size, status.st_mtime_ns)

    def read(
        self,
        path: str,
        start: int = 0,
        stop: int | None = None,
        listing: Listing | None = None,  # noqa: ARG002
    ) -> bytes:
        with open(open_regular(path), "rb") as file:
            file.seek(start)
            size = os.fstat(file.fileno()).st_size
            if stop is not None:  # Python allocates all bytes that are asked for
                stop = min(stop, max(size, start + _SMALL_READ))
            return file.read(-1 if stop is None else stop - start)

    def total_size(self, path: str, listing: Listing | None = None) -> int:  # noqa: ARG002
        files = [path] if not presence.isdir(path) else []
        for folder, _, names in os.walk(path, onerror=_raise_failure):
            files += [os.path.join(folder, name) for name in names]
        total = 0
        for file in files:
            try:
                total += os.stat(file).st_size
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
        return total

    def why_unfinished(self, path: str, names: Collection[str]) -> str | None:  # noqa: ARG002
        return None

    def temporary_path(self, path: str) -> str:
        return temporaries.temporary_path(path)

    def publish(
        self,
        temporary: str,
        path: str,
        *,
        new: bool = False,
        meter: Meter = OFF,  # noqa: ARG002  (a rename takes no time)
    ) -> None:
        atomic.publish(temporary, path, new=new)

    def discard(self, doomed: Iterable[str], listing: Listing | None = None) -> dict[str, StorageError]:  # noqa: ARG002
        return removal.discard(doomed)

    def prepare_directory(self, path: str, listing: Listing | None = None) -> None:  # noqa: ARG002
        directories.make_directory(path)
        removal.remove_stale(path)

    def leftovers(self, path: str) -> dict[str, bool]:
        return dict.fromkeys(removal.stale_names(path, os.listdir(path)), True)

    def remove_leftovers(self, path: str, names: Collection[str]) -> None:
        removal.remove_stale(path, names)

    def prefetch_heads(self, paths: Collection[str], listing: Listing) -> None:
        """Raise: without listings there is nothing to prefetch for."""
        raise AssertionError(paths, listing)

    prefetch_contents = prefetch_heads

    def open_file(self, path: str) -> Source:
        from flax_ckpt_compat._core.local.local_file import LocalFile  # here, because listings do without numpy

        return LocalFile(path)

    def stored_crc32c(self, path: str) -> None:
        """Return None: a disk reports none."""

    def begin_upload(self, path: str, *, in_gda_folder: bool) -> None:
        """Return None: all processes write to one directory."""

    def join_upload(self, fields: dict[str, str]) -> Upload:
        raise AssertionError(fields)

    def wait(self, path: str, future: Any, nbytes: int = 0) -> Any:  # noqa: ARG002
        return future.result()

    def kvstore(self, path: str) -> dict[str, Any]:
        where = os.path.join(os.path.abspath(path), "")
        if why := _why_tensorstore_refuses(where):
            message = f"{path}: {why}; TensorStore, which reads and writes arrays of Orbax's format, takes no such path"
            raise StorageError(
                f"{message}; rename the directory, or save as msgpack", path=path, errno=errno.EILSEQ
            ) from None
        return {"driver": "file", "path": where}

    def context(self) -> None:
        """Return None, for TensorStore's default context."""


def _raise_failure(error: OSError) -> None:
    """Raise the error of a listing, unless the directory was removed meanwhile, or may not be listed."""
    if error.errno not in ABSENT and not isinstance(error, PermissionError):
        raise error


def _why_tensorstore_refuses(path: str) -> str | None:
    """Return why TensorStore refuses a path, or takes it for another: it writes ``a\\b`` to ``a/b``."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "a name in this path is not UTF-8"
    if "\\" in path:
        return "a name in this path has a backslash"
    return "a name in this path ends in .__lock" if ".__lock/" in path else None


def _mode(path: str) -> int:
    """Return the mode of a local path, following links; 0 if it does not exist."""
    try:
        return presence.mode(path)
    except PermissionError:
        # Otherwise only this path is refused, such as the mount point of another user.
        if not os.access(os.path.dirname(path) or os.curdir, os.X_OK, effective_ids=_BY_EFFECTIVE_IDS):
            raise
    return 0
