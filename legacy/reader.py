"""An open msgpack checkpoint."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import Format, LeafHandle, LeafKind, Part
from flax_ckpt_compat._core.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.tree import KeyData, Node

from . import gda, parts
from .parser import parse
from .transfer import SMALL, Small, Span, fetch, fetch_small
from .window import Window


class MsgpackReader:
    """A file of which the structure is known. Keeps its descriptor, so replacing the file changes nothing.

    Arrays below 32 KiB that are read together share blocks of memory of about 256 KiB, each in its own
    aligned part.

    Attributes:
        format: `Format.MSGPACK`.
        path: of the file.
        tree: of `LeafHandle`s and None.
    """

    format = Format.MSGPACK

    def __init__(self, path: str, *, of_orbax: bool = False):
        self.path = path
        self._fd = _open(path)
        self._closer = weakref.finalize(self, os.close, self._fd)
        try:
            self.tree: Node = parse(Window(self._fd, path, _size(self._fd, path)), self, of_orbax=of_orbax)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                raise _storage(path, error) from error
            raise

    def close(self) -> None:
        """Closes the file; values read before stay valid."""
        self._closer()
        self._fd = -1

    def read(self, handles: Sequence[LeafHandle | Part]) -> list[Any]:
        """See `Reader.read`. Only the bytes of these leaves are read."""
        return parts.read(handles, self._read)

    def _read(self, handles: Sequence[LeafHandle]) -> list[Any]:
        values: list[Any] = [None] * len(handles)
        small: list[Small] = []
        spans: list[Span] = []
        folders = gda.Reads()
        for index, handle in enumerate(handles):
            if handle.nbytes < SMALL and handle.dtype is not None and type(handle.where) is int:
                small.append((handle.where, index, handle))
            else:
                values[index] = self._begin(handle, spans, folders)
        self._fetch(small, spans, values)
        folders.finish()
        array = LeafKind.ARRAY
        return [
            value if handle.kind is array else _finish(handle, value)
            for handle, value in zip(handles, values, strict=True)
        ]

    def _fetch(self, small: list[Small], spans: list[Span], values: list[Any]) -> None:
        if self._fd < 0 and (small or spans):
            raise StorageError(f"{self.path}: the checkpoint was closed; open it again", path=self.path)
        try:
            fetch_small(self._fd, self.path, small, values)
            fetch(self._fd, self.path, spans)
        except OSError as error:
            raise _storage(self.path, error) from error

    def _begin(self, handle: LeafHandle, spans: list[Span], folders: gda.Reads) -> Any:
        """Makes room for the value and notes what to read into it; Python values are there already."""
        where = handle.where
        if handle.kind is LeafKind.PRNG_KEY:
            return self._begin(where[1], spans, folders)
        if handle.kind is LeafKind.BYTES:
            array = memory.empty((handle.nbytes,), np.dtype(np.uint8))
        elif handle.dtype is None:
            return where
        elif isinstance(where, gda.FolderArray):
            return folders.begin(where, handle.path)
        else:
            array = memory.empty(handle.shape, handle.dtype)
        rest = memory.as_bytes(array)
        for offset, nbytes in where if isinstance(where, tuple) else ((where, handle.nbytes),):
            spans.append(Span(offset, rest[:nbytes], handle))
            rest = rest[nbytes:]
        return array


def _finish(handle: LeafHandle, value: Any) -> Any:
    kind = handle.kind
    if kind is LeafKind.NUMPY_SCALAR:
        return value[()]
    if kind is LeafKind.PRNG_KEY:
        return KeyData(handle.where[0], value)
    return value.tobytes() if kind is LeafKind.BYTES else value


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{path}: no such checkpoint; list the directory for others", path=path
        ) from error
    except (OSError, ValueError) as error:
        raise _storage(path, error) from error


def _size(fd: int, path: str) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpointError(f"{path}: expected a msgpack file, found something that is no file", path=path)
    if not status.st_size:
        message = f"{path}: expected a msgpack file, found an empty one; its writer never finished, restore another"
        raise CorruptCheckpointError(message, path=path)
    return status.st_size


def _storage(path: str, error: Exception) -> StorageError:
    number = getattr(error, "errno", None)
    return StorageError(f"{path}: reading failed: {error}; check the file system", path=path, errno=number)
