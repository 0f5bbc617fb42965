"""Define `Location`: where something is, as every part of the library hands it down.

A location is a path of the local file system, network file systems among it. That of a store is a subclass, which
answers each look-up and makes each change in its own way; it may have a `Listing`, from which it answers what that
covers. ``location / name`` is below it and keeps the listing, so one listing serves all of a call. Locations of the
same path are equal.
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from flax_ckpt_compat._core.errors import OutOfMemoryError, StorageError, translated
from flax_ckpt_compat._core.local import atomic, presence, syncing, temporaries
from flax_ckpt_compat._core.progress import OFF, Meter

if TYPE_CHECKING:
    from flax_ckpt_compat._core.byte_reads import Source

SHORT_HEAD = 32  # bytes, enough to tell a msgpack tree from most other files
_SMALL_READ = 64 * 2**10  # bytes
_MAX_NAME, _MAX_PATH = 255, 4096  # bytes that Linux takes
# Methods whose OSErrors become StorageErrors → what completes "could not be …".
_TRANSLATED = {
    **dict.fromkeys(("isdir", "isfile", "exists", "resolve", "why_too_long", "holds_nothing"), ""),
    **dict.fromkeys(("listdir", "files_below"), "listed"),
    **dict.fromkeys(("read", "size", "head", "open_file"), "read"),
}


def split_url(url: str) -> tuple[str, str, str]:
    """Split a URL into scheme, bucket and key; the key may be empty, and is not normalized."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise StorageError(f"{url} names no bucket; write {scheme.lower()}://bucket/folder", path=url)
    return scheme.lower(), bucket, key


class Stat(NamedTuple):
    """Size and version of a file, as its store lists them."""

    size: int  # in bytes
    version: str  # changes when the file is replaced
    crc32c: int | None = None


class Listing:
    """All files below a folder at one moment, and what was read of them since then."""

    __slots__ = ("contents", "files", "heads", "keys", "root")

    def __init__(self, root: str, files: Mapping[str, Stat]):
        """Keep the files below ``root``, by their paths relative to it."""
        self.root, self.files, self.keys = root, files, sorted(files)
        self.heads: dict[str, bytes] = {}  # path of a file → its first bytes
        self.contents: dict[str, bytes] = {}  # path of a small file → what it holds

    def below(self, folder: str) -> dict[str, Stat] | None:
        """Return the files below a folder, relative to it; None if it is not covered."""
        if folder == self.root:
            return dict(self.files)
        if not folder.startswith(f"{self.root}/"):
            return None
        inner = folder[len(self.root) + 1 :] + "/"
        first = bisect.bisect_left(self.keys, inner)
        last = bisect.bisect_left(self.keys, inner[:-1] + "0", first)  # "0" follows "/"
        return {key[len(inner) :]: self.files[key] for key in self.keys[first:last]}

    def file(self, path: str) -> Stat | None:
        """Return what is known of a file; None if it is not there, or in a folder that is not covered."""
        return self.files.get(path[len(self.root) + 1 :]) if path.startswith(f"{self.root}/") else None


def _translating(method: Any, doing: str) -> Any:
    @functools.wraps(method)
    def look(self: Location, *args: Any, **kwargs: Any) -> Any:
        with translated(self.path, doing):
            return method(self, *args, **kwargs)

    return look


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """A path and how its storage is reached; a file, a folder, or nothing may be there.

    Its look-ups raise StorageError; where nothing is there, a `MissingPathError`. To look again, after others may have
    changed something, ask `unlisted`.
    """

    path: str  # absolute local path, or normalized URL
    listing: Listing | None = dataclasses.field(default=None, compare=False, repr=False)

    # Each look-up without a listing is a request. There are no links, locks or descriptors, nobody sees whether a
    # writer is alive, and other libraries cannot open a path as a file.
    is_remote: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        for name, doing in _TRANSLATED.items():
            if name in vars(cls):
                setattr(cls, name, _translating(vars(cls)[name], doing))

    def __str__(self) -> str:
        """Return the path."""
        return self.path

    def __truediv__(self, name: str) -> Self:
        """Return the location below this one with a name, or relative path."""
        if not name:
            return self
        return self.at(self.path + name if self.path[-1:] == "/" else f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """Return the last name of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """Return the folder that this is in; the root of a file system is its own."""
        return self.at(os.path.dirname(self.path))

    def at(self, path: str) -> Self:
        """Return the location of another path of the same storage, with the same listing."""
        return type(self)(path, self.listing)

    def sibling(self, suffix: str) -> Self:
        """Return the location beside this one whose name is this one's and a suffix."""
        return self.at(self.path + suffix)

    # Listings, which a disk does without.

    def listed(self) -> Self:
        """Return this location with a listing that covers it, the one it has or a new one."""
        return self

    def unlisted(self) -> Self:
        """Return this location without a listing: it asks its storage again."""
        return self if self.listing is None else type(self)(self.path)

    def with_listing(self, listing: Listing | None) -> Self:
        """Return this location with a listing that was just made; None is none."""
        return type(self)(self.path, listing)

    def prefetch(self, names: Iterable[str], *, heads: bool = False) -> None:
        """Read small files below this folder at once, or the first bytes of files, where a listing can keep them."""

    def forget_contents(self) -> None:
        """Let go of what `prefetch` has read: later reads are of what is there then."""
        if self.listing is not None:
            self.listing.contents.clear()

    # Look-ups.

    def isdir(self) -> bool:
        """Return whether this is a folder: on a disk a directory, in a store the beginning of other names."""
        return presence.isdir(self.path)

    def isfile(self) -> bool:
        """Return whether this is a regular file, or an object that no committed folder of its name hides."""
        return presence.isfile(self.path)

    def exists(self) -> bool:
        """Return whether something has this name, be it a link that leads nowhere."""
        return presence.lexists(self.path)

    def listdir(self) -> list[str]:
        """List the names in this folder; raise MissingPathError if it is none."""
        try:
            return os.listdir(self.path)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            # On NFS it is ESTALE that another machine removed it; so is a stale mount, which `isdir` raises.
            may_lack = {*presence.CANNOT_BE_THERE, errno.ESTALE}
            if getattr(error, "errno", errno.ENOENT) not in may_lack or presence.isdir(self.path):
                raise
            raise FileNotFoundError(errno.ENOENT, getattr(error, "strerror", str(error)), self.path) from error

    def files_below(self) -> list[str]:
        """Return the paths of all files below this folder, relative to it; none if there is no such folder."""
        walked = os.walk(self.path)
        return [os.path.relpath(os.path.join(folder, name), self.path) for folder, _, files in walked for name in files]

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Read this file from ``start`` to ``stop``; fewer bytes if it ends before."""
        with open(presence.open_regular(self.path), "rb") as file:
            file.seek(start)
            if stop is not None:  # Python allocates all bytes that are asked for
                stop = min(stop, max(os.fstat(file.fileno()).st_size, start + _SMALL_READ))
            try:
                return file.read(-1 if stop is None else stop - start)
            except MemoryError as error:
                what = f"{self.path} could not be read: there is no memory for its {self.size()} bytes; free memory, "
                what += "or raise the limit of this process (ulimit -v); a file that was never so large is damaged: "
                what += "restore it from a backup"
                raise OutOfMemoryError(what, path=self.path) from error

    def open_file(self) -> Source:
        """Open one version of this file, to read parts of it."""
        from flax_ckpt_compat._core.local.local_file import LocalFile  # here, because listings do without numpy

        return LocalFile(self.path)

    def head(self) -> bytes:
        """Return the first bytes of this file, fewer of a shorter one; one request in a store if it has more."""
        return self.read(0, SHORT_HEAD)

    def size(self) -> int:
        """Return the bytes of this file."""
        return os.path.getsize(self.path)

    def total_size(self) -> int:
        """Return the bytes of this file, or of all files below this folder; 0 if nothing is here."""
        total = 0
        for name in self.files_below() if self.isdir() else [""]:
            with suppress(StorageError):  # removed meanwhile, a link that leads nowhere, or one that may not be seen
                total += (self / name).size()
        return total

    def identity(self) -> tuple[int, int, int] | None:
        """Return device, inode and time of change; None if nothing is here, and in stores, which have none."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        # A new directory often takes the number of one that was removed just before.
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def watch(self) -> Callable[[], bool]:
        """Return a function that returns whether the checkpoint here was replaced since its listing, or since now."""
        before = self.identity()
        return lambda: (now := self.identity()) != before and None not in (now, before) and self.isdir()

    def resolve(self) -> str:
        """Return the path without symbolic links, by which two spellings of one folder are the same."""
        return os.path.realpath(self.path)

    def why_too_long(self) -> str | None:
        """Return why no file can have a path of this length, or None if one can, or its store decides."""
        size, *names = (len(name.encode(errors="replace")) for name in (self.path, *self.path.split(os.sep)))
        if size < _MAX_PATH and max(names) <= _MAX_NAME:
            return None
        return f"{size} bytes, with a name of {max(names)}, are more than the file system allows"

    # Checkpoints: how they come and go as a whole.

    def why_unfinished(self, names: Collection[str]) -> str | None:  # noqa: ARG002
        """Return why this folder, which has these names, is incomplete by the rules of its storage, or None."""
        return None

    def holds_nothing(self) -> bool:
        """Return whether nothing is lost by replacing this: an empty file, an empty or unfinished folder."""
        return atomic.is_empty(self.path)

    def prepare_directory(self) -> None:
        """Create this folder of checkpoints, and remove what dead writers left in it."""
        syncing.make_directory(self.path)
        atomic.remove_stale(self.path)

    def leftovers(self, *, remove: Collection[str] = ()) -> dict[str, bool]:  # noqa: ARG002
        """Return the names in this folder of a store with something that dead writers left → whether all of it goes.

        Under names to ``remove``, it is removed, unless somebody writes there by now."""
        return {}

    def restore_set_aside(self, names: Collection[str]) -> list[str]:
        """Put back checkpoints among these names that a dead writer had set aside; return their names."""
        return atomic.restore_set_aside(self.path, names)

    def temporary_path(self) -> str:
        """Return a local path, for `temporaries`, to write a checkpoint to before `publish` gives it this one."""
        return temporaries.temporary_path(self.path)

    @contextmanager
    def temporary(self) -> Iterator[str]:
        """Yield a `temporary_path` for a checkpoint that is published within the context; a failure removes it."""
        found = self.temporary_path()
        try:
            yield found
        except BaseException:
            atomic.remove_temporary(found)
            raise

    def publish(self, temporary: str, *, new: bool = False, meter: Meter = OFF) -> None:  # noqa: ARG002
        """Give a finished temporary this path, with ``new`` unless a checkpoint has it; no reader sees a part of it."""
        atomic.publish(temporary, self.path, new=new)

    def discard(self, names: Iterable[str]) -> dict[str, StorageError]:
        """Remove checkpoints of these names from this folder, durably and each as a whole; return name → failure."""
        return atomic.discard(self.path, names)


Location.__init_subclass__()
