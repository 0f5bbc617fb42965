"""Implement the Reader protocol for msgpack checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError, StorageError
from flax_ckpt_compat._core.local import mapping
from flax_ckpt_compat._core.tree import KeyData, Node

from . import gda_read, transfer
from .parse import parse
from .source import open_source, storage_error
from .transfer import SMALL, Small, Span, fetch, fetch_small
from .transfer import arrays as arrays_over_file
from .window import Window


class MsgpackReader:
    """An open msgpack checkpoint. Replacing a local file does not affect reads; replacing an object is an error.

    Arrays below 32 KiB that are read together share blocks of memory of about 256 KiB, each in its own aligned part.

    Attributes:
        format: `Format.MSGPACK`.
        path: path or URL of the file.
        tree: tree of `LeafHandle`s and None.
    """

    format = Format.MSGPACK

    def __init__(self, path: str, *, of_orbax: bool = False):
        self.path = path
        self._source = open_source(path)
        try:
            self.tree: Node = self._parse(of_orbax)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                raise storage_error(path, error) from error
            raise

    def _parse(self, of_orbax: bool) -> Node:
        with memory.pause_gc(enabled=self._source.is_local):
            return parse(Window(self._source), self, of_orbax=of_orbax)

    def close(self) -> None:
        """Close the file; values that were read stay valid."""
        self._source.close()

    def sharding_of(self, name: str) -> None:  # noqa: ARG002  (the format keeps none)
        """Return None: the format stores no sharding. See `Reader.sharding_of`."""
        return

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:
        """Read only the bytes of these leaves; see `Reader.read`."""
        return transfer.read(handles, self._read_mapped if mapped else self._read)

    def _read_mapped(self, handles: Sequence[LeafHandle]) -> list[Any]:
        found = arrays_over_file(self._source, handles)
        others = self._read([handle for index, handle in enumerate(handles) if index not in found])
        return mapping.merge_by_index(found, others)

    def _read(self, handles: Sequence[LeafHandle]) -> list[Any]:
        values: list[Any] = [None] * len(handles)
        small: list[Small] = []
        spans: list[Span] = []
        unfinished: list[int] = []
        folders = gda_read.BatchedReads()
        for index, handle in enumerate(handles):
            if handle.nbytes < SMALL and handle.dtype is not None and type(handle.locator) is int:
                small.append((handle.locator, index, handle))
            else:
                values[index] = self._begin(handle, spans, folders)
            if handle.kind is not LeafKind.ARRAY:
                unfinished.append(index)
        self._fetch(small, spans, values)
        folders.finish()
        for index in unfinished:
            values[index] = _finish(handles[index], values[index])
        return values

    def _fetch(self, small: list[Small], spans: list[Span], values: list[Any]) -> None:
        if self._source.is_closed and (small or spans):
            raise StorageError(f"{self.path}: the checkpoint was closed; open it again", path=self.path)
        try:
            fetch_small(self._source, small, values)
            fetch(self._source, spans)
        except CheckpointError:
            raise
        except OSError as error:
            raise storage_error(self.path, error) from error

    def _begin(self, handle: LeafHandle, spans: list[Span], folders: gda_read.BatchedReads) -> Any:
        """Allocate the value and add the spans to read into it; return Python values as they are."""
        locator = handle.locator
        if handle.kind is LeafKind.PRNG_KEY:
            return self._begin(locator[1], spans, folders)
        if handle.kind is LeafKind.BYTES:
            array = memory.empty((handle.nbytes,), np.dtype(np.uint8))
        elif handle.dtype is None:
            return locator
        elif isinstance(locator, gda_read.FolderArray):
            return folders.begin(locator, handle.path)
        else:
            array = memory.empty(handle.shape, handle.dtype)
        rest = memory.as_bytes(array)
        for offset, nbytes in locator if isinstance(locator, tuple) else ((locator, handle.nbytes),):
            spans.append(Span(offset, rest[:nbytes], handle))
            rest = rest[nbytes:]
        return array


def _finish(handle: LeafHandle, value: Any) -> Any:
    kind = handle.kind
    if kind is LeafKind.NUMPY_SCALAR:
        return value[()]
    if kind is LeafKind.PRNG_KEY:
        return KeyData(handle.locator[0], value)
    return value.tobytes() if kind is LeafKind.BYTES else value
