"""A checkpoint opened: the trees and JSON items in it, each of which is read by its own backend."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.backend import ArraySlice, Format, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import CorruptCheckpointError, UnrecognizedFormatError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path
from flax_ckpt_compat._discovery import detect, file_types
from flax_ckpt_compat._discovery.formats import backend_for

_log = logging.getLogger("flax_ckpt_compat")
_JSON_KINDS = {bool: LeafKind.BOOL, int: LeafKind.INT, float: LeafKind.FLOAT, str: LeafKind.STR}


class Opened:
    """A checkpoint of one tree or several, each of which is opened when it is first asked for.

    Attributes:
        path: of the checkpoint.
        items: name → where it lies; a checkpoint that is one tree has the single item ''.
        trees: those items that are no JSON.
    """

    def __init__(self, path: str):
        self._readers: dict[str, Reader] = {}
        self._open = ExitStack()
        with paths.listing_cache(path):
            found = detect.detect(path)
            self.path, self.items, self.trees = path, found.items, found.trees
            if paths.is_url(path) and len(found.items) == 1:
                self.reader(*found.items)  # now, while what was listed is known
        if found.unknown:
            _log.warning("%s: items of an unknown kind are left out: %s", path, ", ".join(found.unknown))

    @property
    def parts(self) -> Sequence[str]:
        """The items that make up the restored value: all of them, or the only tree."""
        return list(self.trees if len(self.trees) == 1 else self.items)

    @property
    def is_mapping(self) -> bool:
        """Whether the restored value is a mapping of item name → item."""
        return len(self.parts) > 1 or (not self.trees and "" not in self.items)

    def reader(self, item: str) -> Reader:
        """The open item of this name.

        Raises:
            UnrecognizedFormatError, CorruptCheckpointError: it does not decode.
        """
        if item not in self._readers:
            self._readers[item] = self._open.enter_context(closing(open_item(self.items[item])))
        return self._readers[item]

    def close(self) -> None:
        """Closes all items."""
        self._open.close()


def open_item(item: detect.Item) -> Reader:
    """Opens one tree, or one JSON item.

    Raises:
        UnrecognizedFormatError: a file of something else.
        CorruptCheckpointError: it does not decode.
    """
    if item.format is None:
        return JsonReader(item.path)
    try:
        return backend_for(item.format).open(item.path)
    except CorruptCheckpointError:
        look = file_types.looks_like(item.path) if item.format is Format.MSGPACK else None
        if look is None:
            raise
        raise UnrecognizedFormatError(
            f"{item.path} is not a checkpoint: it looks like {look}. Expected a msgpack file of Flax or an Orbax "
            "directory.",
            path=item.path,
        ) from None  # that it does not decode, and advice for a damaged msgpack file, would only mislead


class JsonReader:
    """A JSON item of an Orbax directory, whose values are there since the opening."""

    format = Format.ORBAX

    def __init__(self, path: str):
        self.path = path
        try:
            with atomic.translated(path):
                self.tree: Node = self._node(json.loads(paths.read(path).decode()), ())
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(
                f"{path} is not valid JSON: {error}; restore the file from a copy", path=path
            ) from error

    def _node(self, value: Any, path: Path) -> Node:
        if isinstance(value, Mapping):
            return Branch({name: self._node(child, (*path, name)) for name, child in value.items()})
        if isinstance(value, list):
            children = {str(index): self._node(child, (*path, str(index))) for index, child in enumerate(value)}
            return Branch(children, Container.LIST)
        if value is None:
            return None
        return LeafHandle(path, _JSON_KINDS[type(value)], (), None, 0, "/".join(path), self, value)

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """The values of these handles; there are no arrays, so no parts."""
        return [handle.locator for handle in handles if isinstance(handle, LeafHandle)]

    def sharding_of(self, name: str) -> None:  # noqa: ARG002  (nothing is an array)
        """See `flax_ckpt_compat._core.backend.Reader.sharding_of`."""
        return

    def close(self) -> None:
        """Nothing is open."""


def gives_lists(reader: Any) -> bool:
    """Whether stored lists are restored as lists: Flax stores none, so in these places they are the caller's own."""
    return reader.format is Format.MSGPACK or isinstance(reader, JsonReader)
