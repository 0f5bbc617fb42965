"""The keys of an OCDBT database, from its B-tree, which TensorStore's threads read and decode."""

from __future__ import annotations

import urllib.parse
from typing import Any

import tensorstore as ts

from .places import Extent, refuse_escape
from .sources import directory_spec, new_context, wait


def can_walk() -> bool:
    """Whether TensorStore has the function that dumps a B-tree; not all releases have it."""
    return hasattr(getattr(ts, "ocdbt", None), "dump")


class Walk:
    """A walk over the B-tree of the newest version, one batch of nodes per level; the first is begun at once.

    Decoding thousands of keys takes as long as all that Python does meanwhile with the other files.
    """

    def __init__(self, path: str, spec: dict[str, Any] | None = None) -> None:
        """Begins to read; what goes wrong is raised by `entries`.

        Args:
            path: of the database's directory.
            spec: how TensorStore opens it, where its files are not all in one place.
        """
        self._path = path
        self._seen: set[str] = set()
        self._error: Exception | None = None
        try:
            self._begin(spec or directory_spec(path))
        except Exception as error:  # noqa: BLE001  (kept, not hidden: nobody may ever ask for the entries)
            self._error = error

    def _begin(self, spec: dict[str, Any]) -> None:
        path = self._path
        self._base = wait(path, ts.KvStore.open(spec, context=new_context(path, 0)))
        newest = wait(path, ts.ocdbt.dump(self._base))["versions"][-1]
        self._height = newest["root_height"]
        self._level = self._dump([(newest["root"]["location"], b"")])

    def _dump(self, locations: list[tuple[str, bytes]]) -> list[tuple[Any, bytes]]:
        """A future of each node, and what all keys below it start with."""
        for location, _ in locations:
            if location in self._seen:
                # Forty levels of that would make a tree of 2**40 keys.
                raise ValueError(f"the B-tree node {location} has two parents")
            self._seen.add(location)
            _extent(self._path, location)
        return [(ts.ocdbt.dump(self._base, node=location), prefix) for location, prefix in locations]

    def entries(self) -> dict[bytes, bytes | Extent]:
        """Every key with its value, or where that lies.

        Raises:
            CorruptCheckpointError: something lies outside the directory.
            StorageError: the store refused.
            ValueError, KeyError, IndexError, TypeError, OSError: the database does not decode, as TensorStore or
                Python put it.
        """
        if self._error is not None:
            raise self._error
        entries: dict[bytes, bytes | Extent] = {}
        for height in range(self._height, -1, -1):
            below: list[tuple[str, bytes]] = []
            while self._level:
                future, prefix = self._level.pop()
                node = wait(self._path, future)
                if height:
                    below += _children(node, height, prefix)
                else:
                    self._read_leaf(node, prefix, entries)
            self._level = self._dump(below)
        return entries

    def _read_leaf(self, node: dict[str, Any], prefix: bytes, entries: dict[bytes, bytes | Extent]) -> None:
        for entry in _entries_of(node, 0):
            inline = entry.get("inline_value")
            value = inline if inline is not None else _extent(self._path, entry["indirect_value"])
            entries[prefix + entry["key"]] = value


def _children(node: dict[str, Any], height: int, prefix: bytes) -> list[tuple[str, bytes]]:
    entries = _entries_of(node, height)
    return [(entry["location"], prefix + entry["subtree_common_prefix"]) for entry in entries]


def _entries_of(node: dict[str, Any], height: int) -> list[dict[str, Any]]:
    if node["height"] != height:
        raise ValueError(f"a B-tree node of height {node['height']} where {height} was expected")
    entries: list[dict[str, Any]] = node["entries"]
    return entries


def _extent(path: str, location: str) -> Extent:
    """Parses ``kind:base path:file:offset:length``; base path and file are percent-encoded."""
    _, base, file, offset, length = location.split(":")
    full = urllib.parse.unquote(base) + urllib.parse.unquote(file)
    refuse_escape(full, path)
    return Extent(full, int(offset), int(length))
