"""Define `Storage`, what the local disk and object stores have in common; `Location` calls it with its path.

Paths are absolute local paths, or normalized URLs. Methods that take a `Listing` answer from it what it covers, and ask
the storage for the rest; a disk has no listings. A missing file is a FileNotFoundError everywhere; other failures are
OSErrors of a disk or StorageErrors. `Location` makes a StorageError of all of them."""

from __future__ import annotations

import abc
import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.progress import OFF, Meter


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

    def covers(self, folder: str) -> bool:
        """Return whether a folder is this one, or below it."""
        return folder == self.root or folder.startswith(f"{self.root}/")

    def below(self, folder: str) -> dict[str, Stat] | None:
        """Return the files below a folder, relative to it; None if it is not covered."""
        if not self.covers(folder):
            return None
        if folder == self.root:
            return dict(self.files)
        inner = folder[len(self.root) + 1 :] + "/"
        first = bisect.bisect_left(self.keys, inner)
        last = bisect.bisect_left(self.keys, inner[:-1] + "0", first)  # "0" follows "/"
        return {key[len(inner) :]: self.files[key] for key in self.keys[first:last]}

    def file(self, path: str) -> Stat | None:
        """Return what is known of a file; None if it is not there, or in a folder that is not covered."""
        return self.files.get(path[len(self.root) + 1 :]) if path.startswith(f"{self.root}/") else None


class Upload(abc.ABC):
    """The files of one save that its processes write below unique names, until process 0 commits them.

    Attributes:
        url: the checkpoint's path.
        folder: the path of the folder that all write below: the checkpoint's, or that of its arrays.
        needs_commit_file: others take the folder for incomplete unless it has ``commit_success.txt``.
    """

    url: str
    folder: str
    needs_commit_file: bool

    @property
    @abc.abstractmethod
    def tag(self) -> str:
        """Return the suffix of the names of directories that no other save uses."""

    @abc.abstractmethod
    def fields(self) -> dict[str, str]:
        """Return what other processes need to join; see `Storage.join_upload`."""

    @abc.abstractmethod
    def written(self) -> list[str]:
        """List what the processes have written so far, relative to the folder."""

    @abc.abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write one file below the folder."""

    @abc.abstractmethod
    def upload_files(self, directory: str, names: Collection[str], last: str, meter: Meter = OFF) -> None:
        """Upload this process's files under the same names; ``last`` tells others that all are complete.

        Raise ConcurrentWriteError if process 0 has aborted the save."""

    @abc.abstractmethod
    def check_active(self, written: Collection[str]) -> None:
        """Raise ConcurrentWriteError, after removing what this process wrote, if process 0 has aborted the save."""

    @abc.abstractmethod
    def delete_harmless(self, name: str) -> None:
        """Delete a file below the folder without which the save is as complete as with it, if that is permitted."""

    @abc.abstractmethod
    def publish(self, staged: str, *, new: bool) -> None:
        """Commit what all processes wrote, with what process 0 has still in ``staged``; see `Storage.publish`."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Remove what a failed save has written, unless it is committed; ignore refusals."""


# What is read with the request that opens a file.
HEAD_BYTES = 64 * 2**10


class Source(abc.ABC):
    """One version of a file, read in ranges by several threads; what replaces it meanwhile is never mixed in.

    Attributes:
        path: its path, or URL.
        size: its bytes.
        head: its first `HEAD_BYTES`, which came with the answer that opened it; all of a small file.
        gap: bytes between two ranges that cost less to read with them than another read costs.
        longest: bytes of the longest read that joins several ranges.
        threads: how many read at once.
    """

    path: str
    size: int
    head: bytes
    # A request to a store takes about as long as reading 1 MiB.
    gap, longest, threads = 64 * 2**10, 16 * 2**20, 16
    is_local = is_closed = False

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """Read from ``start`` to ``stop`` or the end; raise StorageError if this version is no longer there."""

    def fill(self, pieces: Sequence[memoryview], offset: int) -> int:
        """Fill pieces of memory with consecutive bytes, by one read, and return their number; fewer at the end."""
        data, at = memoryview(self.read(offset, offset + sum(map(len, pieces)))), 0
        for piece in pieces:
            part = data[at : at + len(piece)]
            piece[: len(part)] = part
            at += len(part)
        return at

    def close(self) -> None:  # noqa: B027  (stores inherit it)
        """Close it; of a store nothing is open."""

    def is_cached(self, offset: int, length: int) -> bool:  # noqa: ARG002  (others tell by the range)
        """Return whether a range is in memory already."""
        return False


class Storage(abc.ABC):
    """A place that holds files in folders.

    Attributes:
        is_remote: each look-up is a request, which a `Listing` saves. There are no links, locks or descriptors, and
            other libraries cannot open a path as a file.
        names_processes: names of temporaries tell which process writes them, so that a live writer is noticed.
        sets_aside: what a rename cannot replace is first renamed itself; `restore_set_aside` puts it back.
    """

    is_remote: bool
    names_processes: bool
    sets_aside: bool

    # Names and listings.

    @abc.abstractmethod
    def listing(self, path: str) -> Listing | None:
        """List all below a folder in one go; None on a disk, where look-ups are quick and a list would be old soon."""

    @abc.abstractmethod
    def isdir(self, path: str, listing: Listing | None = None) -> bool:
        """Return whether a path is a folder: on a disk a directory, in a store the beginning of other names."""

    @abc.abstractmethod
    def isfile(self, path: str, listing: Listing | None = None) -> bool:
        """Return whether a path is a regular file, or an object that no committed folder of its name hides."""

    @abc.abstractmethod
    def exists(self, path: str, listing: Listing | None = None) -> bool:
        """Return whether something has this name, be it a link that leads nowhere."""

    @abc.abstractmethod
    def listdir(self, path: str, listing: Listing | None = None) -> list[str]:
        """List the names in a folder; raise FileNotFoundError or NotADirectoryError if there is none."""

    @abc.abstractmethod
    def files_below(self, path: str, listing: Listing | None = None) -> list[str]:
        """Return the paths of all files below a folder, relative to it; none if there is no such folder."""

    @abc.abstractmethod
    def resolve(self, path: str) -> str:
        """Return the path without symbolic links, by which two spellings of one folder are the same."""

    @abc.abstractmethod
    def why_too_long(self, path: str) -> str | None:
        """Return why no checkpoint can have a path of that length, or None if one can."""

    @abc.abstractmethod
    def can_hold(self, path: str) -> bool:
        """Return whether a checkpoint can have this path: a store's bucket cannot be one."""

    # Files.

    @abc.abstractmethod
    def size(self, path: str, listing: Listing | None = None) -> int:
        """Return the bytes of a file."""

    @abc.abstractmethod
    def head(self, path: str, listing: Listing | None = None) -> bytes:
        """Return the first 32 bytes of a file, fewer of a shorter one; one request in a store if it has more."""

    @abc.abstractmethod
    def total_size(self, path: str, listing: Listing | None = None) -> int:
        """Return the bytes of a file, or of all files below a folder; 0 if nothing is there."""

    @abc.abstractmethod
    def read(self, path: str, start: int = 0, stop: int | None = None, listing: Listing | None = None) -> bytes:
        """Read a file from ``start`` to ``stop``; fewer bytes if it ends before."""

    @abc.abstractmethod
    def open_file(self, path: str) -> Source:
        """Open one version of a file, to read parts of it."""

    @abc.abstractmethod
    def stored_crc32c(self, path: str) -> int | None:
        """Return the CRC-32C of a file that the storage reports, or None."""

    @abc.abstractmethod
    def version(self, path: str) -> bytes:
        """Return bytes that change when a file is replaced, equal on all machines that share it."""

    @abc.abstractmethod
    def identity(self, path: str) -> tuple[int, int, int] | None:
        """Return device, inode and time of change; None if nothing is there, and in stores, where folders have none."""

    @abc.abstractmethod
    def watch(self, path: str, listing: Listing | None = None) -> Callable[[], bool]:
        """Return a function that returns whether the checkpoint here was replaced since now, or since the listing."""

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Delete one file."""

    @abc.abstractmethod
    def prefetch_heads(self, paths: Collection[str], listing: Listing) -> None:
        """Ask at once for the first bytes of those of many paths that are files, for `Listing.heads`."""

    @abc.abstractmethod
    def prefetch_contents(self, paths: Collection[str], listing: Listing) -> None:
        """Read many small files at once, for `Listing.contents`."""

    # Checkpoints: how they come and go as a whole.

    @abc.abstractmethod
    def why_unfinished(self, path: str, names: Collection[str]) -> str | None:
        """Return why a folder with these names is incomplete by the rules of the storage, or None."""

    @abc.abstractmethod
    def holds_nothing(self, path: str, listing: Listing | None = None) -> bool:
        """Return whether nothing is lost by replacing a path: an empty file, an empty or unfinished folder."""

    @abc.abstractmethod
    def prepare_directory(self, path: str, listing: Listing | None = None) -> None:
        """Create a folder of checkpoints, and remove what dead writers left in it."""

    @abc.abstractmethod
    def leftovers(self, path: str) -> dict[str, bool]:
        """Return the names in a folder with something that dead writers left → whether all of it goes."""

    @abc.abstractmethod
    def remove_leftovers(self, path: str, names: Collection[str]) -> None:
        """Remove what dead writers left under these names of a folder, unless somebody writes there by now."""

    @abc.abstractmethod
    def temporary_path(self, path: str) -> str:
        """Return a local path to write a checkpoint to before `publish` gives it this one.

        It is created as `temporaries.temporary_path` says."""

    @abc.abstractmethod
    def publish(
        self,
        temporary: str,
        path: str,
        *,
        new: bool = False,
        meter: Meter = OFF,
    ) -> None:
        """Publish a finished temporary under its final name; no reader sees a part of it.

        With ``new`` a checkpoint that has this name by now is not replaced. ``meter`` counts the bytes."""

    @abc.abstractmethod
    def discard(self, doomed: Iterable[str], listing: Listing | None = None) -> dict[str, StorageError]:
        """Remove checkpoints durably; a crash in the middle leaves no part of one. Return path → failure."""

    @abc.abstractmethod
    def restore_set_aside(self, directory: str, names: Collection[str]) -> list[str]:
        """Put back checkpoints among these names that a dead writer had set aside; return their names.

        None are where nothing `sets_aside`."""

    # Saves by several processes.

    @abc.abstractmethod
    def begin_upload(self, path: str, *, in_gda_folder: bool) -> Upload | None:
        """Begin a save by several processes; None where they share a directory, and write to one temporary."""

    @abc.abstractmethod
    def join_upload(self, fields: dict[str, str]) -> Upload:
        """Return the save that process 0 began, by its `Upload.fields`."""

    # TensorStore.

    @abc.abstractmethod
    def kvstore(self, path: str) -> dict[str, Any]:
        """Return TensorStore's spec of a folder."""

    @abc.abstractmethod
    def context(self) -> Any:
        """Return the TensorStore context to open it with; None is its default one."""

    @abc.abstractmethod
    def wait(self, path: str, future: Any, nbytes: int = 0) -> Any:
        """Return the result of TensorStore's future about a path; a store must answer in time for so many bytes."""
