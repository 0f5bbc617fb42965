"""Define `Client`, the few requests that stores are sent, through the asynchronous clients of fsspec.

A URL is ``scheme://bucket/key``. Requests retry by themselves, run on the event loop of fsspec, and may be sent from
several threads at once.
"""

from __future__ import annotations

import abc
import asyncio
import importlib
import os
import posixpath
import queue
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar

from flax_ckpt_compat._core.errors import StorageError, is_of_handler
from flax_ckpt_compat._core.object_store.request_errors import ConflictError, has_expired, translate
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Stat

SCHEMES = ("s3", "gs", "az")
ABSENT = ""  # the version of an object that is not there
CONNECT_SECONDS, ANSWER_SECONDS = 10, 30  # without a byte, before a request is tried again
_URL = re.compile(r"([A-Za-z][A-Za-z0-9.+-]*)://([^/]*)(.*)", re.DOTALL)
_REFUSED = re.compile("[\0-\x1f\x7f\ud800-\udfff]")


def split(url: str) -> tuple[str, str, str]:
    """Split a URL into scheme, bucket and key; the key may be empty, and is not normalized."""
    match = _URL.fullmatch(url)
    scheme = match[1].lower() if match else ""
    if match is None or scheme not in SCHEMES:
        known = "s3://, gs://, az:// and hf:// URLs, those of path classes registered with epath, and local paths"
        raise StorageError(f"{url}: the scheme {scheme + '://'!r} is unknown; {known} can be used", path=url)
    if not match[2]:
        raise StorageError(f"{url} names no bucket; write {scheme}://bucket/folder", path=url)
    return scheme, match[2], match[3].removeprefix("/")


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
        package, extra: what has fsspec's client, and our extra that installs it.
        variables: names of the environment variables that choose the store and the credentials.
        needs_commit_file: a folder without ``commit_success.txt`` is incomplete, as for real Orbax.
    """

    package: ClassVar[str]
    extra: ClassVar[str]
    variables: ClassVar[tuple[str, ...]]
    needs_commit_file: ClassVar[bool]

    def __init__(self) -> None:
        """Connect on first use."""
        self._connected: tuple[Any, Any] = (None, None)

    # Requests.

    def list(self, url: str) -> dict[str, Stat]:
        """Return all objects below a folder by their names relative to it, in order."""
        key = split(url)[2]
        prefix = f"{key}/" if key else ""
        found = self._run(url, "listed", lambda store, bucket, _: self._list(store, bucket, prefix))
        names = {name[len(prefix) :]: stat for name, stat in found.items()}
        # Consoles and tools create an empty object for a folder. Keys with . or .. would reach other objects.
        return {name: names[name] for name in sorted(names) if name and name[-1] != "/" and not _has_dots(name)}

    def stat(self, url: str) -> Stat:
        """Return size and version of an object."""
        found: Stat = self._run(url, "found", self._stat)
        return found

    def find(self, url: str) -> Stat | None:
        """Return size and version of an object, or None."""
        with suppress(FileNotFoundError):
            return self.stat(url) if split(url)[2] else None
        return None

    def read(self, url: str, start: int = 0, stop: int | None = None, version: str | None = None) -> bytes:
        """Read an object, or a part of it, in this version; fewer bytes if it ends before ``stop``."""
        if stop is not None and stop <= start:
            return b""
        return self._read_there(url, start, stop, version)[0]

    def open(self, url: str, nbytes: int) -> tuple[bytes, Stat]:
        """Return the first bytes of an object, with the size and version that it has."""
        data, found = self._read_there(url, 0, nbytes, None)
        return data, self.stat(url) if found is None else found

    def _read_there(self, url: str, start: int, stop: int | None, version: str | None) -> tuple[bytes, Stat | None]:
        found: tuple[bytes, Stat | None] = self._run(
            url, "read", lambda store, bucket, key: self._read(store, bucket, key, start, stop, version)
        )
        return found

    def put(self, url: str, data: bytes, version: str | None = None) -> str:
        """Write an object that has this version, `ABSENT` or any; return its new one."""
        try:
            return self._put_once(url, data, version)
        except ConflictError:
            # A try whose answer was lost has written it.
            found = None if version is None else self.find(url)
            if found is not None and found.size == len(data) and self.read(url, version=found.version) == data:
                return found.version
            raise

    def put_file(self, url: str, path: str, version: str | None = None, meter: Meter = OFF) -> str:
        """Write an object from a local file; see `put`."""
        with open(path, "rb") as file:
            found = self.put(url, file.read(), version)
        meter.add(os.path.getsize(path), url)
        return found

    def delete(self, url: str, version: str | None = None) -> bool:
        """Delete an object if it has this version; return whether it was there, as far as the store tells."""
        try:
            self._run(url, "deleted", lambda store, bucket, key: self._delete(store, bucket, key, version))
        except (FileNotFoundError, ConflictError):
            return False
        return True

    def unfinished(self, url: str) -> dict[str, float]:  # noqa: ARG002  (most stores have none)
        """Return names below a folder with parts of an upload that has not ended → when it began."""
        return {}

    def abort_unfinished(self, url: str) -> None:  # noqa: B027  (most stores have none)
        """Delete the parts of all unfinished uploads of an object."""

    def _put_once(self, url: str, data: bytes, version: str | None) -> str:
        found: str = self._run(url, "written", lambda store, bucket, key: self._put(store, bucket, key, data, version))
        return found

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
        """Return a part of an object, and what the answer tells of all of it; no bytes and None beyond its end."""

    @abc.abstractmethod
    async def _put(self, store: Any, bucket: str, key: str, data: bytes, version: str | None) -> str: ...

    @abc.abstractmethod
    async def _delete(self, store: Any, bucket: str, key: str, version: str | None) -> None: ...

    # The loop.

    def _run(self, url: str, doing: str, request: Callable[[Any, str, str], Coroutine[Any, Any, Any]]) -> Any:
        scheme, bucket, key = split(url)
        for is_last in (False, True):
            try:
                store = self._store(url)
                return _run(store.loop, lambda store=store: request(store, bucket, key))  # type: ignore[misc]
            except StorageError:
                raise
            except Exception as error:
                if is_of_handler(error):
                    raise
                # Another program may have renewed the credentials in their file.
                if is_last or not has_expired(error):
                    raise translate(error, scheme, url, bucket, doing) from error
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
