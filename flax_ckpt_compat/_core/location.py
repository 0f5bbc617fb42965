"""Define `Location`: where something is, as every part of the library hands it down; made once, at the door.

A location knows its storage, and perhaps a `Listing`, from which its look-ups are answered. It is equal to another one
of the same path. ``location / name`` is below it and keeps the listing, so one listing serves all of a call.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from flax_ckpt_compat._core.errors import ArgumentError, StorageError
from flax_ckpt_compat._core.local import removal
from flax_ckpt_compat._core.local.storage import LocalStorage
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Listing, Source, Storage
from flax_ckpt_compat._core.storage_errors import translated

if TYPE_CHECKING:
    from flax_ckpt_compat._core.object_store.remote_storage import RemoteStorage

_MANGLED = re.compile(r"(s3|gs|az|hf|file):/(?!/)")
_FILE_URL = re.compile(r"file://(localhost(?=/))?", re.IGNORECASE)
LOCAL = LocalStorage()
_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate["Location", _Rest], _Result]


def _looks(doing: str = "") -> Callable[[_Method[_Rest, _Result]], _Method[_Rest, _Result]]:
    """Let a method raise StorageError for what its storage raises; ``doing`` completes "could not be …"."""

    def decorate(method: _Method[_Rest, _Result]) -> _Method[_Rest, _Result]:
        @functools.wraps(method)
        def look(self: Location, /, *args: _Rest.args, **kwargs: _Rest.kwargs) -> _Result:
            with translated(self.path, doing):
                return method(self, *args, **kwargs)

        return look

    return decorate


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """A path and its storage, with what one listing knows of it; a file, a folder, or nothing may be there.

    Its look-ups raise StorageError; where nothing is there, a `MissingPathError`. To look again, after others may have
    changed something, ask `unlisted`.
    """

    path: str  # absolute local path, or normalized URL
    storage: Storage = dataclasses.field(compare=False, repr=False)
    listing: Listing | None = dataclasses.field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """Return the path."""
        return self.path

    def __truediv__(self, name: str) -> Location:
        """Return the location below this one with a name, or relative path."""
        if not name:
            return self
        return Location(
            self.path + name if self.path[-1:] == "/" else f"{self.path}/{name}", self.storage, self.listing
        )

    @property
    def name(self) -> str:
        """Return the last name of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """Return the folder that this is in; the root of a file system is its own."""
        return self.at(os.path.dirname(self.path))

    @property
    def is_remote(self) -> bool:
        """Return whether each look-up without a listing is a request; see `Storage`."""
        return self.storage.is_remote

    def at(self, path: str) -> Location:
        """Return the location of another path of the same storage, with the same listing."""
        return Location(path, self.storage, self.listing)

    def sibling(self, suffix: str) -> Location:
        """Return the location beside this one whose name is this one's and a suffix."""
        return self.at(self.path + suffix)

    # Listings.

    def listed(self) -> Location:
        """Return this location with a listing that covers it: the one it has, or a new one."""
        if self.listing is not None and self.listing.covers(self.path):
            return self
        return self if (found := self.storage.listing(self.path)) is None else self.with_listing(found)

    def unlisted(self) -> Location:
        """Return this location without a listing: it asks its storage again."""
        return self if self.listing is None else Location(self.path, self.storage)

    def with_listing(self, listing: Listing | None) -> Location:
        """Return this location with a listing that was just made; None is none."""
        return Location(self.path, self.storage, listing)

    # Look-ups; see the methods of `Storage`.

    @_looks()
    def isdir(self) -> bool:
        """Return whether this is a folder."""
        return self.storage.isdir(self.path, self.listing)

    @_looks()
    def isfile(self) -> bool:
        """Return whether this is a regular file, or an object."""
        return self.storage.isfile(self.path, self.listing)

    @_looks()
    def exists(self) -> bool:
        """Return whether something is here, be it a link that leads nowhere."""
        return self.storage.exists(self.path, self.listing)

    @_looks("listed")
    def listdir(self) -> list[str]:
        """List the names in this folder; raise MissingPathError if it is none."""
        return self.storage.listdir(self.path, self.listing)

    @_looks("listed")
    def files_below(self) -> list[str]:
        """Return the paths of all files below this folder, relative to it."""
        return self.storage.files_below(self.path, self.listing)

    @_looks("read")
    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Read this file from ``start`` to ``stop``; fewer bytes if it ends before."""
        return self.storage.read(self.path, start, stop, self.listing)

    @_looks("read")
    def size(self) -> int:
        """Return the bytes of this file."""
        return self.storage.size(self.path, self.listing)

    @_looks("read")
    def head(self) -> bytes:
        """Return the first bytes of this file, none of an empty one."""
        return self.storage.head(self.path, self.listing)

    @_looks("listed")
    def total_size(self) -> int:
        """Return the bytes of this file, or of all files below this folder; 0 if nothing is here."""
        return self.storage.total_size(self.path, self.listing)

    @_looks()
    def holds_nothing(self) -> bool:
        """Return whether nothing is lost by replacing this."""
        return self.storage.holds_nothing(self.path, self.listing)

    @_looks()
    def why_unfinished(self, names: Collection[str]) -> str | None:
        """Return why this folder, which has these names, is incomplete by the rules of its storage, or None."""
        return self.storage.why_unfinished(self.path, names)

    @_looks()
    def why_too_long(self) -> str | None:
        """Return why no checkpoint can have a path of this length, or None if one can."""
        return self.storage.why_too_long(self.path)

    def can_hold_checkpoint(self) -> bool:
        """Return whether a checkpoint can have this path: a store's bucket cannot be one."""
        return self.storage.can_hold(self.path)

    @_looks()
    def resolve(self) -> str:
        """Return the path without symbolic links, by which two spellings of one folder are the same."""
        return self.storage.resolve(self.path)

    def identity(self) -> tuple[int, int, int] | None:
        """Return what tells whether this was replaced, on a disk; None elsewhere, and if nothing is here."""
        return self.storage.identity(self.path)

    @_looks("read")
    def version(self) -> bytes:
        """Return bytes that change when this file is replaced."""
        return self.storage.version(self.path)

    def watch(self) -> Callable[[], bool]:
        """Return a function that returns whether the checkpoint here was replaced since its listing, or since now."""
        return self.storage.watch(self.path, self.listing)

    @_looks("read")
    def open_file(self) -> Source:
        """Open one version of this file, to read parts of it."""
        return self.storage.open_file(self.path)

    def prefetch_heads(self, names: Iterable[str]) -> None:
        """Ask at once for the first bytes of the files of these names in this folder, where a listing can keep them."""
        if self.listing is not None:
            self.storage.prefetch_heads([(self / name).path for name in names], self.listing)

    def prefetch_contents(self, names: Iterable[str]) -> None:
        """Read many small files below this folder at once, where a listing can keep them."""
        if self.listing is not None:
            self.storage.prefetch_contents([(self / name).path for name in names], self.listing)

    def forget_contents(self) -> None:
        """Let go of what `prefetch_contents` has read: later reads are of what is there then."""
        if self.listing is not None:
            self.listing.contents.clear()

    # Changes.

    def prepare_directory(self) -> None:
        """Create this folder of checkpoints, and remove what dead writers left in it."""
        self.storage.prepare_directory(self.path, self.listing)

    @contextmanager
    def temporary(self) -> Iterator[str]:
        """Yield a local path for a checkpoint that `publish` publishes within the context; a failure removes it.

        Whoever creates it locks it, so that others can tell whether this process is alive."""
        found = self.storage.temporary_path(self.path)
        try:
            yield found
        except BaseException:
            removal.remove_temporary(found)
            raise

    def publish(self, temporary: str, *, new: bool = False, meter: Meter = OFF) -> None:
        """Give a finished temporary this path; see `Storage.publish`."""
        self.storage.publish(temporary, self.path, new=new, meter=meter)

    def discard(self, names: Iterable[str]) -> dict[str, StorageError]:
        """Remove checkpoints of these names from this folder durably; return name → failure."""
        failures = self.storage.discard(((self / name).path for name in names), self.listing)
        return {path[len((self / "x").path) - 1 :]: error for path, error in failures.items()}

    # TensorStore.

    def kvstore(self) -> dict[str, Any]:
        """Return TensorStore's spec of this folder."""
        return self.storage.kvstore(self.path)

    def context(self) -> Any:
        """Return the TensorStore context to open it with."""
        return self.storage.context()

    def wait(self, future: Any, nbytes: int = 0) -> Any:
        """Return the result of TensorStore's future about this; see `Storage.wait`."""
        return self.storage.wait(self.path, future, nbytes)


def location_of(path: object, what: str = "path") -> Location:
    """Return the location of a caller's path, text or a path object: absolute, or a normalized URL.

    Raise ArgumentError if it is neither, and StorageError for a URL that no storage takes."""
    return path if isinstance(path, Location) else of_text(as_text(path, what))


def of_text(path: str) -> Location:
    """Return the location of a path's text; see `location_of`."""
    _refuse_mangled(path)
    if is_url(path):
        storage = _storage_of(path.partition("://")[0].lower())
        return Location(storage.normal(path), storage)
    try:
        return Location(os.path.abspath(local(path)), LOCAL)
    except FileNotFoundError as error:  # of the working directory
        message = f"{path}: the working directory, to which this path is relative, was removed; pass an absolute path"
        raise StorageError(message, path=path, errno=error.errno) from error


@functools.lru_cache(maxsize=64)
def _storage_of(scheme: str) -> RemoteStorage:
    """Return the storage of a scheme."""
    # Here, because few programs need them.
    from flax_ckpt_compat._core.epath_store import hub, storage
    from flax_ckpt_compat._core.object_store.client import SCHEMES
    from flax_ckpt_compat._core.object_store.storage import ObjectStorage

    if scheme == "hf":
        return hub.HubStorage()
    # Unknown schemes get ObjectStorage, which raises.
    return storage.EpathStorage(scheme) if scheme not in SCHEMES and storage.is_known(scheme) else ObjectStorage()


def resolved(path: str) -> Location:
    """Return the location of a path as the file system resolves it: ``..`` after the name of a link leads elsewhere."""
    return of_text(path) if is_url(path) else Location(os.path.realpath(local(path)), LOCAL)


def as_text(path: object, what: str = "path") -> str:
    """Return a caller's path, or prefix, as text; raise ArgumentError if it is neither text nor a path object."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if isinstance(text, str):
        return text
    remedy = "decode it with os.fsdecode" if isinstance(text, bytes) else "pass a str or a pathlib.Path"
    found, shape = type(path).__name__, getattr(path, "shape", None)
    if path is None or isinstance(path, (bytes, bool, int, float)):
        found += f": {path!r:.100}"
    else:  # perhaps a tree, whose text may be long
        found += f" of shape {shape}" if isinstance(shape, tuple) else ""
        remedy += "; the path comes first, before the tree" if what == "path" else ""
    raise ArgumentError(f"a {what} is text or a path object, found {found}; {remedy}")


def is_url(path: str) -> bool:
    """Return whether a path is the URL of an object store."""
    return "://" in path and not _FILE_URL.match(path)


def normal(path: str) -> str:
    """Normalize the text of a path; relative paths stay relative and ``file://`` is kept."""
    _refuse_mangled(path)
    if is_url(path):
        return of_text(path).path
    plain = local(path)
    return path[: len(path) - len(plain)] + os.path.normpath(plain)


def local(path: str) -> str:
    """Return the local path of a ``file://`` URL, of this machine alone; return any other path unchanged."""
    if not (match := _FILE_URL.match(path)):
        return path
    plain = path[match.end() :]
    if not plain.startswith("/"):
        message = f"{path}: the path in a file URL must start with a slash, as in file:///home/me; pass that, or a path"
        raise StorageError(message, path=path)
    return plain


def _refuse_mangled(path: str) -> None:
    if _MANGLED.match(path):
        message = f"{path}: pathlib made this of a URL; pass the URL as text, or as an etils.epath.Path"
        raise StorageError(message, path=path)
