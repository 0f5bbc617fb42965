"""Define `Client`, the few requests that stores are sent.

A URL is ``scheme://bucket/key``. Requests may be sent from several threads at once.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import io
import os
import re
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeVar

from flax_ckpt_compat._core.byte_reads import Source
from flax_ckpt_compat._core.errors import StorageError, is_of_handler, not_found
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Stat, split_url

ABSENT = ""  # the version of an object that is not there
EXPIRES_AFTER = 24 * 3600  # s; then a writer without a commit counts as dead
PART_BYTES = 32 * 2**20  # of a large object, sent by one connection
_Answer = TypeVar("_Answer")


class ConflictError(StorageError):
    """An object does not have the version that a request was to read, replace or delete."""


def replaced(url: str) -> ConflictError:
    """Return the error for an object that no longer has the version that was found."""
    message = f"{url} was replaced or removed since it was opened; open it again"
    return ConflictError(message, path=url, errno=errno.ESTALE)


def imported(url: str, package: str) -> Any:
    """Import the package that a scheme needs."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        scheme = split_url(url)[0]
        message = f"{url}: {scheme}:// needs the package {package}: pip install {package}, or this package with its"
        raise StorageError(f"{message} extra `{scheme.replace('gs', 'gcs')}`", path=url) from error


class Key(NamedTuple):
    """An object, and the client of fsspec that reaches it."""

    store: Any
    bucket: str
    name: str


class Client:
    """Requests to the stores of one scheme. They go through an asynchronous client of fsspec, or are overridden.

    A missing object is a FileNotFoundError, an object of another version a ConflictError, and any other failure a
    StorageError with a remedy. Clients of fsspec retry by themselves, and run on its loop.

    Attributes:
        needs_commit_file: a folder without ``commit_success.txt`` is incomplete, as for real Orbax.
        shares_names: an object and a folder may have one name.
        access: what an error says of how to give credentials and endpoint.
        package: what has fsspec's client.
        variables: how the names begin of environment variables that choose the store and the credentials.
        connect: returns a new client of fsspec, which no other code shares.
        _list, …: coroutines that take a `Key`, and then what follows. They raise the errors of fsspec's client.
    """

    needs_commit_file: ClassVar[bool] = False
    shares_names: ClassVar[bool] = True
    access: ClassVar[str]
    package: ClassVar[str]
    variables: ClassVar[tuple[str, ...]]
    connect: Callable[[], Any]
    _list: Callable[..., Coroutine[Any, Any, dict[str, Stat]]]  # prefix; by names
    _stat: Callable[..., Coroutine[Any, Any, Stat]]
    _read: Callable[..., Coroutine[Any, Any, bytes]]  # start, stop, version
    _put: Callable[..., Coroutine[Any, Any, str]]  # file, version
    _delete: Callable[..., Coroutine[Any, Any, object]]  # version

    def __init__(self) -> None:
        """Connect on first use."""
        self._connected: tuple[Any, Any] = (None, None)  # what was wanted, and fsspec's client

    def list(self, url: str) -> dict[str, Stat]:
        """Return all objects below a folder by their names relative to it, in order."""
        prefix = split_url(f"{url}/")[2]
        found = self._run(url, "listed", self._list, prefix)
        names = {name[len(prefix) :]: stat for name, stat in sorted(found.items())}
        # Consoles and tools create an empty object for a folder. Keys with . or .. would reach other objects.
        return {
            name: stat
            for name, stat in names.items()
            if name and name[-1] != "/" and {".", ".."}.isdisjoint(name.split("/"))
        }

    def find(self, url: str) -> Stat | None:
        """Return size and version of an object, or None."""
        with suppress(FileNotFoundError):
            return self._run(url, "found", self._stat) if split_url(url)[2] else None
        return None

    def read(self, url: str, start: int = 0, stop: int | None = None, version: str | None = None) -> bytes:
        """Read an object, or a part of it that is not empty, in this version; fewer bytes if it ends before."""
        return self._run(url, "read", self._read, start, stop, version)

    def write(self, url: str, file: BinaryIO, version: str | None, meter: Meter) -> str:
        """Write an object; see `put`."""

        async def put(key: Key) -> str:
            file.seek(0)  # it may be sent again
            return await self._put(key, file, version)

        found = self._run(url, "written", put)
        meter.add(file.seek(0, io.SEEK_END), url)
        return found

    def delete(self, url: str, version: str | None = None) -> bool:
        """Delete an object if it has this version; return whether it was there, as far as the store tells."""
        try:
            self._run(url, "deleted", self._delete, version)
        except (FileNotFoundError, ConflictError):
            return False
        return True

    def open(self, url: str) -> Source:
        """Open one version of an object, to read parts of it."""
        return OpenedObject(self, url)

    def put(self, url: str, data: bytes | os.PathLike[str], version: str | None = None, meter: Meter = OFF) -> str:
        """Write bytes, or a local file, to an object that has this version, `ABSENT` or any; return its new one."""
        with io.BytesIO(data) if isinstance(data, bytes) else open(data, "rb") as file:
            try:
                return self.write(url, file, version, meter)
            except (StorageError, FileNotFoundError) as error:
                # A second try is answered so where the first one succeeded, and its answer was lost.
                is_answer = isinstance(error, (ConflictError, FileNotFoundError)) or version is not None
                with suppress(StorageError, FileNotFoundError):
                    if is_answer and (found := self._version_if_written(url, file)) is not None:
                        return found
                if version and isinstance(error, FileNotFoundError):  # how S3 answers to a condition
                    raise replaced(url) from error
                raise

    def _version_if_written(self, url: str, file: BinaryIO) -> str | None:
        """Return the version of an object with this content: a try whose answer was lost has written it."""
        there, size = OpenedObject(self, url), file.seek(0, io.SEEK_END)
        file.seek(0)
        pieces = (there.read(at, at + PART_BYTES) == file.read(PART_BYTES) for at in range(0, size, PART_BYTES))
        return there.version if there.size == size and all(pieces) else None

    def translated(self, error: Exception, url: str, doing: str) -> Exception:
        """Return our error for a client's; ``doing`` completes "could not be …"."""
        status = _status_of(error)
        if status in _CONFLICTS:
            return replaced(url)
        if re.search(_NO_BUCKET, f"{type(error).__name__}: {error}") or (status == _MISSING and doing == "listed"):
            remedy = f"there is no bucket {split_url(url)[1]!r}, or not at this endpoint: create it, or correct the URL"
            return self.failure(error, url, doing, remedy)
        return not_found(url) if status == _MISSING else self.failure(error, url, doing)

    def failure(self, error: Exception, url: str, doing: str, remedy: str = "") -> StorageError:
        """Return the StorageError for a client's error."""
        reason = str(error).partition("\n")[0][:300] or type(error).__name__
        if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
            reason = "it did not answer in time"
        what = "the credentials, which may be missing or have expired, the endpoint and the network"
        remedy = remedy or f"check {what} ({self.access})" + ", or use a shorter path" * (len(url) > _LONG_URL)
        return StorageError(f"{url} could not be {doing}: {reason}; {remedy}", path=url)

    def prepare(self, url: str) -> None:
        """Refuse saves to a folder of a store that is only read."""

    def stale_parts(self, url: str, abort: Collection[str] = ()) -> Collection[str]:  # noqa: ARG002
        """Return the names in a folder to which dead writers sent parts that are no object yet; delete some."""
        return []

    def _run(
        self, url: str, doing: str, request: Callable[..., Coroutine[Any, Any, _Answer]], *args: Any, **more: Any
    ) -> _Answer:
        """Run a coroutine with the `Key` of a URL, once more where credentials have expired."""
        for is_last in (False, True):
            try:
                key = Key(self._store(url), *split_url(url)[1:])
                future = asyncio.run_coroutine_threadsafe(request(key, *args, **more), key.store.loop)
                try:
                    return future.result()
                finally:
                    future.cancel()  # where this thread is interrupted
            except Exception as error:
                if isinstance(error, StorageError) or is_of_handler(error):
                    raise
                if doing == "read" and _status_of(error) == _OUT_OF_RANGE:
                    return b""  # type: ignore[return-value]
                # Another program may have renewed the credentials in their file. To HEAD, S3 answers 400 and no word.
                has_expired = re.search(_EXPIRED, f"{type(error).__name__}: {error}") or _status_of(error) == _NO_WORD
                if is_last or not has_expired:
                    raise self.translated(error, url, doing) from error
                self._connected = None, None
        raise AssertionError

    def _store(self, url: str) -> Any:
        """Return fsspec's client: another one in a forked process, and for other credentials."""
        wanted = os.getpid(), {name: os.environ.get(name) for name in os.environ if name.startswith(self.variables)}
        key, store = self._connected
        if key != wanted:
            imported(url, self.package)
            store = self.connect()
            self._connected = wanted, store
        return store


class OpenedObject(Source):
    """One version of an object, read in parts."""

    def __init__(self, client: Client, url: str):
        self.path, self._client = url, client
        if (found := client.find(url)) is None:
            raise not_found(url)
        self.size, self.version, self.crc32c = found

    def read(self, start: int, stop: int) -> bytes:
        if (stop := min(stop, self.size)) <= start:
            return b""
        try:
            found = self._client.read(self.path, start, stop, self.version)
        except FileNotFoundError as error:
            raise replaced(self.path) from error
        if len(found) != stop - start:
            raise StorageError(f"{self.path} could not be read: the answer has fewer bytes", path=self.path)
        return found


_EXPIRED = r"Expired|InvalidToken|TokenRefreshRequired|Invalid Credentials|invalid_grant|RefreshError"
_NO_BUCKET = r"NoSuchBucket|ContainerNotFound|InvalidBucketName|bucket name|InvalidResourceName"
_NO_WORD, _MISSING, _OUT_OF_RANGE, _LONG_URL = 400, 404, 416, 1000
_CONFLICTS = (409, 412)  # another version, or another writer at this moment


def _status_of(error: BaseException) -> int:
    """Return the HTTP status of a client's error; 0 if it is of none."""
    if isinstance(error, FileNotFoundError):
        return _MISSING
    if isinstance(error, FileExistsError):
        return _CONFLICTS[1]
    if re.search("request(ed)? range", str(error), re.IGNORECASE):  # of gcsfs
        return _OUT_OF_RANGE
    answer = getattr(error, "response", None)  # of botocore
    if isinstance(answer, dict):
        return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    found = str(getattr(error, "status_code", None) or getattr(error, "code", None))  # of Azure, of gcsfs
    return int(found) if found.isdigit() else 0
