"""Reach local paths, with the functions of `os`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic, presence, syncing, temporaries
from flax_ckpt_compat._core.local.presence import open_regular
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Location, Source

_SMALL_READ = 64 * 2**10  # bytes
_MAX_NAME, _MAX_PATH = 255, 4096  # bytes that Linux takes
# ESTALE: on NFS, another machine removed it.
_ABSENT = {*presence.CANNOT_BE_THERE, errno.ESTALE}


class LocalLocation(Location):
    """A path of the local file system, network file systems among it."""

    __slots__ = ()
    is_remote = False

    def isdir(self) -> bool:
        return presence.isdir(self.path)

    def isfile(self) -> bool:
        return presence.isfile(self.path)

    def exists(self) -> bool:
        return presence.lexists(self.path)

    def listdir(self) -> list[str]:
        path = self.path
        try:
            return os.listdir(path)
        except ValueError as error:
            raise FileNotFoundError(errno.ENOENT, f"no directory can have this name ({error})", path) from error
        except OSError as error:
            # `lexists` raises if it is the mount that is stale.
            if error.errno not in _ABSENT or (error.errno == errno.ESTALE and presence.lexists(path)):
                raise
            raise FileNotFoundError(errno.ENOENT, error.strerror, path) from error

    def files_below(self) -> list[str]:
        return presence.files_below(self.path)

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        with open(open_regular(self.path), "rb") as file:
            file.seek(start)
            if stop is not None:  # Python allocates all bytes that are asked for
                stop = min(stop, max(os.fstat(file.fileno()).st_size, start + _SMALL_READ))
            return file.read(-1 if stop is None else stop - start)

    def open_file(self) -> Source:
        from flax_ckpt_compat._core.local.local_file import LocalFile  # here, because listings do without numpy

        return LocalFile(self.path)

    def size(self) -> int:
        return os.path.getsize(self.path)

    def total_size(self) -> int:
        total = 0
        for name in self.files_below() if presence.isdir(self.path) else [""]:
            with suppress(OSError):  # removed meanwhile, a link that leads nowhere, or one that may not be seen
                total += os.stat((self / name).path).st_size
        return total

    def identity(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        # A new directory often takes the number of one that was removed just before.
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def watch(self) -> Callable[[], bool]:
        before = self.identity()

        def is_replaced() -> bool:
            now = self.identity()
            return now != before and None not in (now, before) and presence.isdir(self.path)

        return is_replaced

    def resolve(self) -> str:
        return os.path.realpath(self.path)

    def why_too_long(self) -> str | None:
        sizes = [len(name.encode(errors="replace")) for name in (self.path, *self.path.split(os.sep))]
        size, longest = sizes[0], max(sizes[1:])
        if size < _MAX_PATH and longest <= _MAX_NAME:
            return None
        return f"{size} bytes, with a name of {longest}, are more than the file system allows"

    # Checkpoints.

    def holds_nothing(self) -> bool:
        return atomic.is_empty(self.path)

    def prepare_directory(self) -> None:
        syncing.make_directory(self.path)
        atomic.remove_stale(self.path)

    def restore_set_aside(self, names: Collection[str]) -> list[str]:
        return atomic.restore_set_aside(self.path, names)

    def temporary_path(self) -> str:
        return temporaries.temporary_path(self.path)

    def publish(self, temporary: str, *, new: bool = False, meter: Meter = OFF) -> None:  # noqa: ARG002
        atomic.publish(temporary, self.path, new=new)  # a rename, of which a meter counts nothing

    def discard(self, names: Iterable[str]) -> dict[str, StorageError]:
        return atomic.discard(self.path, names)
