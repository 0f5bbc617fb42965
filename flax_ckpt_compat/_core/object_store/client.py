"""Define `Client`, the few requests that stores are sent, and `FsspecClient`, which sends them by fsspec.

A URL is ``scheme://bucket/key``. Requests may be sent from several threads at once.
"""

from __future__ import annotations

import abc
import asyncio
import errno
import importlib
import io
import os
import posixpath
import queue
import re
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, BinaryIO, ClassVar

from flax_ckpt_compat._core.errors import StorageError, is_of_handler
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Stat
from flax_ckpt_compat._core.storage_errors import not_found

SCHEMES = ("s3", "gs", "az")
ABSENT = ""  # the version of an object that is not there
CONNECT_SECONDS, ANSWER_SECONDS = 10, 30  # without a byte, before a request is tried again
EXPIRES_AFTER = 24 * 3600  # s; then a writer without a commit counts as dead
PART_BYTES = 32 * 2**20  # of a large object, sent by one connection
_REFUSED = re.compile("[\0-\x1f\x7f\ud800-\udfff]")


class ConflictError(StorageError):
    """An object does not have the version that a request was to read, replace or delete."""


def split(url: str) -> tuple[str, str, str]:
    """Split a URL into scheme, bucket and key; the key may be empty, and is not normalized."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise StorageError(f"{url} names no bucket; write {scheme.lower()}://bucket/folder", path=url)
    return scheme.lower(), bucket, key


def normal(url: str) -> str:
    """Normalize a user's URL: resolve ``.`` and ``..``, and remove redundant slashes."""
    scheme, bucket, key = split(url)
    if found := _REFUSED.search(url):
        message = f"{url!a} has the character {found[0]!a}, with which stores take no name, or change it; leave it out"
        raise StorageError(message, path=url)
    return f"{scheme}://{bucket}{posixpath.normpath('/' + key.lstrip('/'))}".rstrip("/")


class Client(abc.ABC):
    """Requests to the stores of one scheme.

    A missing object is a FileNotFoundError, an object of another version a ConflictError, and any other failure a
    StorageError with a remedy.

    Attributes:
        needs_commit_file: a folder without ``commit_success.txt`` is incomplete, as for real Orbax.
        shares_names: an object and a folder may have one name.
    """

    needs_commit_file: ClassVar[bool] = False
    shares_names: ClassVar[bool] = True

    @abc.abstractmethod
    def list(self, url: str) -> dict[str, Stat]:
        """Return all objects below a folder by their names relative to it, in order."""

    @abc.abstractmethod
    def stat(self, url: str) -> Stat:
        """Return size and version of an object."""

    @abc.abstractmethod
    def read_there(self, url: str, start: int, stop: int | None, version: str | None) -> tuple[bytes, Stat | None]:
        """Read a part of an object, and what the answer tells of all of it; no bytes and None beyond its end."""

    @abc.abstractmethod
    def put_once(self, url: str, data: bytes, version: str | None) -> str:
        """Write an object; see `put`."""

    @abc.abstractmethod
    def delete(self, url: str, version: str | None = None) -> bool:
        """Delete an object if it has this version; return whether it was there, as far as the store tells."""

    def find(self, url: str) -> Stat | None:
        """Return size and version of an object, or None."""
        with suppress(FileNotFoundError):
            return self.stat(url) if split(url)[2] else None
        return None

    def read(self, url: str, start: int = 0, stop: int | None = None, version: str | None = None) -> bytes:
        """Read an object, or a part of it, in this version; fewer bytes if it ends before ``stop``."""
        return b"" if stop is not None and stop <= start else self.read_there(url, start, stop, version)[0]

    def open(self, url: str, nbytes: int) -> tuple[bytes, Stat]:
        """Return the first bytes of an object, with the size and version that it has."""
        data, found = self.read_there(url, 0, nbytes, None)
        return data, self.stat(url) if found is None else found

    def local_copy(self, url: str) -> str | None:  # noqa: ARG002
        """Return the path of a local copy to read instead of an object, where the store's own package makes one."""
        return None

    def put(self, url: str, data: bytes, version: str | None = None) -> str:
        """Write an object that has this version, `ABSENT` or any; return its new one."""
        try:
            return self.put_once(url, data, version)
        except (StorageError, FileNotFoundError) as error:
            with suppress(StorageError, FileNotFoundError):
                if version is not None and (found := self._version_if_written(url, io.BytesIO(data))) is not None:
                    return found
            if version and isinstance(error, FileNotFoundError):
                raise gone(url) from error
            raise

    def put_file(self, url: str, path: str, version: str | None = None, meter: Meter = OFF) -> str:
        """Write an object from a local file; see `put`."""
        with open(path, "rb") as file:
            found = self.put(url, file.read(), version)
        meter.add(os.path.getsize(path), url)
        return found

    def _version_if_written(self, url: str, file: BinaryIO) -> str | None:
        """Return the version of an object with this content: a try whose answer was lost has written it."""
        if (found := self.find(url)) is None:
            return None
        pieces = (self.read(url, at, at + PART_BYTES, found.version) for at in range(0, found.size, PART_BYTES))
        return found.version if all(piece == file.read(len(piece)) for piece in pieces) and not file.read(1) else None

    def prepare(self, url: str) -> None:  # noqa: B027
        """Refuse saves to a folder, or warn of them, where the store cannot do all that they need."""

    def stale_parts(self, url: str, abort: Collection[str] = ()) -> Collection[str]:  # noqa: ARG002
        """Return the names in a folder to which dead writers sent parts that are no object yet; delete those of some.

        Most stores have none."""
        return []


class FsspecClient(Client):
    """Requests that go through the asynchronous clients of fsspec. They retry by themselves, and run on its loop.

    Attributes:
        package, extra: what has fsspec's client, and our extra that installs it.
        variables: names of the environment variables that choose the store and the credentials.
    """

    package: ClassVar[str]
    extra: ClassVar[str]
    variables: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        """Connect on first use."""
        self._connected: tuple[Any, Any] = (None, None)

    def list(self, url: str) -> dict[str, Stat]:
        key = split(url)[2]
        prefix = f"{key}/" if key else ""
        found = self._run(url, "listed", lambda store, bucket, _: self._list(store, bucket, prefix))
        names = {name[len(prefix) :]: stat for name, stat in found.items()}
        # Consoles and tools create an empty object for a folder. Keys with . or .. would reach other objects.
        return {name: names[name] for name in sorted(names) if name and name[-1] != "/" and not _has_dots(name)}

    def stat(self, url: str) -> Stat:
        found: Stat = self._run(url, "found", self._stat)
        return found

    def read_there(self, url: str, start: int, stop: int | None, version: str | None) -> tuple[bytes, Stat | None]:
        found: tuple[bytes, Stat | None] = self._run(
            url, "read", lambda store, bucket, key: self._read(store, bucket, key, start, stop, version)
        )
        return found

    def put_once(self, url: str, data: bytes, version: str | None) -> str:
        found: str = self._run(url, "written", lambda store, bucket, key: self._put(store, bucket, key, data, version))
        return found

    def delete(self, url: str, version: str | None = None) -> bool:
        try:
            self._run(url, "deleted", lambda store, bucket, key: self._delete(store, bucket, key, version))
        except (FileNotFoundError, ConflictError):
            return False
        return True

    # What each scheme has of its own: coroutines that raise the errors of its client.

    @abc.abstractmethod
    def connect(self) -> Any:
        """Return a new client of fsspec, which no other code shares."""

    @abc.abstractmethod
    async def _list(self, store: Any, bucket: str, prefix: str) -> dict[str, Stat]:
        """Return all objects whose keys begin with a prefix, by key."""

    @abc.abstractmethod
    async def _stat(self, store: Any, bucket: str, key: str) -> Stat: ...

    @abc.abstractmethod
    async def _read(
        self, store: Any, bucket: str, key: str, start: int, stop: int | None, version: str | None
    ) -> tuple[bytes, Stat | None]:
        """See `read_there`; errors of ranges beyond the end are raised."""

    @abc.abstractmethod
    async def _put(self, store: Any, bucket: str, key: str, data: bytes, version: str | None) -> str: ...

    @abc.abstractmethod
    async def _delete(self, store: Any, bucket: str, key: str, version: str | None) -> None: ...

    # The loop.

    def _run(self, url: str, doing: str, request: Callable[[Any, str, str], Coroutine[Any, Any, Any]]) -> Any:
        _, bucket, key = split(url)
        for is_last in (False, True):
            try:
                store = self._store(url)
                return _run(store.loop, lambda store=store: request(store, bucket, key))  # type: ignore[misc]
            except StorageError:
                raise
            except Exception as error:
                if is_of_handler(error):
                    raise
                if doing == "read" and _status_of(error) == _OUT_OF_RANGE:
                    return b"", None
                # Another program may have renewed the credentials in their file.
                if is_last or not _has_expired(error):
                    raise _translated(error, url, doing) from error
                self._connected = None, None
        raise AssertionError

    def _store(self, url: str) -> Any:
        """Return fsspec's client: another one in a forked process, and for other credentials."""
        wanted = (os.getpid(), *map(os.environ.get, self.variables))
        key, store = self._connected
        if key != wanted:
            try:
                importlib.import_module(self.package)
            except ImportError as error:
                message = f"{url}: {split(url)[0]}:// needs the package {self.package}: pip install {self.package}"
                raise StorageError(f"{message}, or this package with its extra `{self.extra}`", path=url) from error
            store = self.connect()
            self._connected = wanted, store
        return store


def gone(url: str) -> ConflictError:
    """Return the error of a write on a condition to an object that is gone, which S3 says that it cannot find."""
    return ConflictError(f"{url} was removed meanwhile", path=url, errno=errno.ESTALE)


def byte_range(start: int, stop: int | None) -> str:
    """Return the header of a request for a part of an object."""
    return f"bytes={start}-{'' if stop is None else stop - 1}"


def _has_dots(name: str) -> bool:
    return not {".", ".."}.isdisjoint(name.split("/"))


def _run(loop: asyncio.AbstractEventLoop, start: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine on a loop of another thread; an interrupt of this one cancels it.

    The answer comes by a queue without locks of Python, so a signal handler that interrupts this may ask, too."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    tasks: list[asyncio.Task[None]] = []

    async def answer() -> None:
        try:
            answers.put((await start(), None))
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            answers.put((None, error))

    loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(answer())))
    try:
        found, error = answers.get()
    except BaseException:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        raise
    if error is not None:
        raise error
    return found


# Errors of fsspec's clients.

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_ENDPOINT = {
    "s3": "AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "STORAGE_EMULATOR_HOST",
    "az": "AZURE_STORAGE_CONNECTION_STRING",
}
_EXPIRED = r"Expired|InvalidToken|TokenRefreshRequired|Invalid Credentials|invalid_grant|RefreshError"
_NO_BUCKET = r"NoSuchBucket|ContainerNotFound|InvalidBucketName|bucket name|InvalidResourceName"
_NO_CREDENTIALS = (
    r"NoCredentials|PartialCredentials|CredentialRetrieval|DefaultCredentials|ProfileNotFound|Must provide"
)
# What the error is called, or says → what to do. The first that fits counts.
_REMEDIES = {
    _NO_BUCKET: "there is no bucket {bucket!r}, or not at this endpoint: create it, or correct the URL",
    _EXPIRED: "the credentials have expired or are not valid: renew them, or {credentials}",
    f"{_NO_CREDENTIALS}|^HTTP 401": "give credentials: {credentials}",
    "AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocationConstraint": (
        "the bucket {bucket!r} is in another region, or at another endpoint: set {endpoint}"
    ),
    "^HTTP 403": "the credentials do not permit this in the bucket {bucket!r}: {credentials}",
    "^HTTP 400 .*HeadObject": (
        "the credentials may have expired: renew them; or the bucket is in another region: set {endpoint}"
    ),
    "^HTTP (429|503)": "the store is busy, or asks for fewer requests: try again later, or from fewer processes",
    "^HTTP [34]": "the store refused the request: check the URL, the credentials and {endpoint}",
    "": "check the network and {endpoint}, and try again",
}
_NO_WORD, _MISSING, _DENIED, _OUT_OF_RANGE = 400, 404, 403, 416
_CONFLICTS = (409, 412)  # another version, or another writer at this moment


def _status_of(error: BaseException) -> int:
    """Return the HTTP status of a client's error; 0 if it is of none."""
    if isinstance(error, FileNotFoundError):
        return _MISSING
    if isinstance(error, FileExistsError):
        return _CONFLICTS[1]
    if isinstance(error, PermissionError) or "Forbidden" in str(error):
        return _DENIED
    if re.search("request(ed)? range", str(error), re.IGNORECASE):  # of gcsfs
        return _OUT_OF_RANGE
    answer = getattr(error, "response", None)  # of botocore
    if isinstance(answer, dict):
        return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    found = getattr(error, "status_code", None) or getattr(error, "code", None)  # of Azure, of gcsfs
    return int(str(found)) if str(found).isdigit() else 0


def _has_expired(error: Exception) -> bool:
    """Return whether a store says that the credentials have expired; to HEAD, S3 answers 400 without a word."""
    return bool(re.search(_EXPIRED, f"{type(error).__name__}: {error}")) or _status_of(error) == _NO_WORD


def _translated(error: Exception, url: str, doing: str) -> Exception:
    """Return our error for a client's; ``doing`` completes "could not be …"."""
    scheme, bucket, _ = split(url)
    status, name = _status_of(error), type(error).__name__
    if status in _CONFLICTS:
        return ConflictError(f"{url} was replaced or removed meanwhile; open it again", path=url, errno=errno.ESTALE)
    text = f"HTTP {status} {name}: {error}"
    if status == _MISSING and doing == "listed":
        text += " NoSuchBucket"
    elif status == _MISSING and not re.search(_NO_BUCKET, text):
        return not_found(url)
    reason = str(error).partition("\n")[0][:300] or name
    if isinstance(error, TimeoutError) or "Timeout" in name:
        reason = "it did not answer in time"
    remedy = next(remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, text))
    remedy = remedy.format(bucket=bucket, credentials=_CREDENTIALS[scheme], endpoint=_ENDPOINT[scheme])
    return StorageError(f"{url} could not be {doing}: {reason}; {remedy}", path=url)
