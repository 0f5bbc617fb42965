"""Read what ``jax.experimental.array_serialization.pytree_serialization`` saves.

``pytreedef.json`` has the tree, as a flatbuffer in Base64, and the leaves in its order: a description of an array, or
null for None. ``array_store`` is an OCDBT database of zarr arrays, each named by the number of its leaf. Of nodes of
registered classes only the children are known, so they become tuples; the class itself is not looked for.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from flax_ckpt_compat._core import orbax_layout
from flax_ckpt_compat._core.backend import Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, PathLengths
from flax_ckpt_compat._discovery.formats import open_arrays
from flax_ckpt_compat._discovery.layouts.layout import ReadOnlyLayout, damaged
from flax_ckpt_compat._discovery.orbax_trees import names_in

_TREE, _ARRAYS = "pytreedef.json", "array_store"
_STRUCTURE, _LEAVES = "__jax_pytreedef_repr", "__jax_leaf_ids"
_FIRST_BYTES, _MAX_BYTES, _MAX_DEPTH = 256, 256 * 2**20, 500
# Kinds of nodes, and fields of their tables (jax 0.10, serialization.fbs).
_LEAF, _NONE, _TUPLE, _LIST, _DICT, _CUSTOM = range(6)
_KIND, _CHILDREN, _NAMES = range(3)
_CONTAINERS = {_TUPLE: Container.TUPLE, _LIST: Container.LIST, _DICT: Container.DICT, _CUSTOM: Container.TUPLE}
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, StopIteration, struct.error, RecursionError)


def _open(location: Location) -> Reader:
    file = location / _TREE
    reader = open_arrays(location / _ARRAYS, "/")
    try:
        content = json.loads(file.read(0, _MAX_BYTES))
        arrays = reader.tree.children if isinstance(reader.tree, Branch) else {}
        structure = base64.b64decode(content[_STRUCTURE], validate=True)
        reader.tree = _Structure(structure, _leaves(content[_LEAVES], arrays)).tree()
    except _DAMAGE as error:
        reader.close()
        raise damaged(file, f"it does not decode ({error!r:.200})") from error
    return reader


def _leaves(described: Sequence[str | None], arrays: Mapping[str, Any]) -> Iterator[Callable[[Path], Node]]:
    """Yield functions that return the leaf at a key path, in the order of the leaves."""
    for number, what in enumerate(described):
        if what in (None, "null"):
            yield lambda _: None
            continue
        handle = arrays[str(number)]
        yield lambda path, handle=handle: dataclasses.replace(handle, path=path, stored_name=handle.name)  # type: ignore[misc]


class _Structure:
    """A flatbuffer of nodes; none of its numbers is trusted."""

    def __init__(self, data: bytes, leaves: Iterator[Callable[[Path], Node]]):
        self._data, self._leaves = data, leaves
        self._left = len(data) // 4  # nodes that such a buffer can have
        self._lengths = PathLengths(len(data))

    def tree(self) -> Node:
        """Return the tree; raise one of `_DAMAGE`."""
        tree = self._node(self._offset(0), ())
        if next(self._leaves, None) is not None:
            raise ValueError("more leaves than the tree has")
        return tree

    def _offset(self, at: int) -> int:
        """Return where an offset leads, which is relative to itself."""
        return at + int(struct.unpack_from("<I", self._data, at)[0])

    def _field(self, table: int, number: int) -> int | None:
        """Return where a field of a table is, or None if it has its default."""
        fields = table - struct.unpack_from("<i", self._data, table)[0]
        if fields < 0 or struct.unpack_from("<H", self._data, fields)[0] < 6 + 2 * number:
            return None
        offset = struct.unpack_from("<H", self._data, fields + 4 + 2 * number)[0]
        return table + offset if offset else None

    def _vector(self, table: int, number: int) -> list[int]:
        """Return where the elements of a field lead."""
        if (field := self._field(table, number)) is None:
            return []
        start = self._offset(field)
        (count,) = struct.unpack_from("<I", self._data, start)
        if count > self._left:
            raise ValueError(f"{count} children")
        return [self._offset(start + 4 + 4 * index) for index in range(count)]

    def _node(self, table: int, path: Path) -> Node:
        self._left -= 1
        if self._left < 0 or len(path) > _MAX_DEPTH:
            raise ValueError("more nodes, or levels, than it can have")
        field = self._field(table, _KIND)
        kind = _LEAF if field is None else self._data[field]
        if kind == _LEAF:
            return next(self._leaves)(path)
        if kind == _NONE:
            return None
        children = self._vector(table, _CHILDREN)
        names = [str(index) for index in range(len(children))]
        if kind == _DICT:
            names = [self._text(at) for at in self._vector(table, _NAMES)]
        self._lengths.add(path, len(children))
        nodes = zip(names, children, strict=True)
        return Branch({name: self._node(child, (*path, name)) for name, child in nodes}, _CONTAINERS[kind])

    def _text(self, at: int) -> str:
        (length,) = struct.unpack_from("<I", self._data, at)
        if len(found := self._data[at + 4 : at + 4 + length]) < length:
            raise ValueError("the end of a name is missing")
        return found.decode()


def _arrays(path: Location, names: Set[str]) -> Mapping[str, Location]:
    if path.name == _ARRAYS:  # the database itself names no leaf
        path = path.parent
        names = names_in(path)
    if not names >= {_TREE, _ARRAYS} or orbax_layout.MANIFEST not in names_in(path / _ARRAYS):
        return {}
    head = (path / _TREE).read(0, _FIRST_BYTES) if (path / _TREE).isfile() else b""
    return {"": path} if _STRUCTURE.encode() in head else {}


LAYOUT = ReadOnlyLayout("jax pytree", _open, in_folder=_arrays, reads_msgpack=False)
