"""Describe the leaves of a directory as handles, with how each is stored, and build their tree."""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, show_path

from .decode_leaves import KEY_WIDTHS, Described, StoredLeaf, describe_leaf
from .files import corrupt, corrupt_leaf
from .msgpack_file import Kinds
from .open_index import Index
from .tree_structure import UNKNOWN, LeafEntry, Structure
from .type_annotations import ContainerType, LeafType
from .zarr import ArrayInfo, UnsupportedArrayError, parse_array_metadata

_EMPTY = {layout.NONE: None, **layout.EMPTY_CONTAINERS}
# Leaves of other types may be stored in any way, even if there are arrays of their names.
_ARRAY_TYPES = frozenset([layout.JAX_ARRAY, layout.NP_ARRAY, layout.SCALAR, UNKNOWN])
_STORED_TYPES = _ARRAY_TYPES | {layout.STRING}
_UNANNOTATED = LeafType()
_IMPLEMENTATIONS = {2: "threefry2x32", 4: "rbg"}  # of PRNG keys, by the width of their data
_log = logging.getLogger("flax_ckpt_compat")


@dataclasses.dataclass(frozen=True, slots=True)
class Unsupported:
    """The locator of a leaf that this release does not read."""

    what: str  # goes on after "it is"


class LeafDescriptions:
    """The leaves of one open directory."""

    def __init__(self, reader: Reader, structure: Structure, index: Index) -> None:
        """Prepare to describe them; ``reader`` is the one that reads them, and ``index`` has the arrays."""
        self._reader, self._structure, self._index, self._path = reader, structure, index, reader.path
        self._values = {} if structure.aggregate is None else structure.aggregate.values
        self._stored: dict[Any, StoredLeaf] = {}

    def handles(self) -> list[Node]:
        """Return a handle for each entry of the structure, or None or an empty container; warn of what is doubtful."""
        leaves = list(map(self._leaf, self._structure.entries))
        if self._structure.leaf_types is None:
            self._warn_of_lost_keys(leaves)
        self._warn_of_shared_names()
        return leaves

    def _leaf(self, entry: LeafEntry) -> Node:
        path, value_type, skipped = entry.path, entry.value_type, entry.skipped
        # A value in the msgpack file overrides the arrays, as in real Orbax.
        if self._values and (inner := self._values.get(path)) is not None:
            return self._handle(entry, (inner.kind, inner.shape, inner.dtype, inner.nbytes), inner)
        try:
            stored = self._stored_leaf(entry) if value_type in _ARRAY_TYPES and not skipped else None
        except UnsupportedArrayError as error:
            return self._unsupported(entry, str(error))
        if stored is not None:
            return self._handle(entry, stored.described, stored, stored.possible_kinds)
        if value_type in _EMPTY:
            container = _EMPTY[value_type]
            return None if container is None else Branch({}, container)
        if value_type not in _STORED_TYPES:
            return self._unsupported(entry, f"of the type {value_type!r}")
        if skipped:
            what = f"its value should be in the msgpack file {layout.MSGPACK_FILE!r}, which lacks it"
            raise corrupt_leaf(self._path, path, what)
        if value_type == layout.STRING or (value_type == UNKNOWN and self._structure.strings is not None):
            text = self._structure.text(entry)
            return self._handle(entry, (LeafKind.STR, (), None, len(text.encode("utf-8", "surrogatepass"))), text)
        key = layout.key_prefix(entry.name) + layout.ARRAY_METADATA_FILES[self._structure.zarr3]
        raise corrupt_leaf(self._path, entry.path, f"its metadata {key!r} is missing")

    def _handle(
        self, entry: LeafEntry, described: Described, locator: Any, kinds: frozenset[LeafKind] = frozenset()
    ) -> Node:
        return LeafHandle(entry.path, *described, entry.name, self._reader, locator, False, kinds)

    def _stored_leaf(self, entry: LeafEntry) -> StoredLeaf | None:
        """Return how an array is stored, shared by all leaves that are stored alike; None if there is no array."""
        structure, name, value_type = self._structure, entry.name, entry.value_type
        for zarr3 in (structure.zarr3, not structure.zarr3):
            text = self._index.get(layout.key_prefix(name) + layout.ARRAY_METADATA_FILES[zarr3])
            if text is not None:
                break
        else:
            return None
        annotation = None
        if structure.leaf_types is not None:
            annotation = structure.leaf_types.get(name, _UNANNOTATED)
        elif value_type == UNKNOWN and name in structure.shardings:
            value_type = layout.JAX_ARRAY  # since 0.4.0 exactly the jax arrays have a stored sharding
        alike = (text, zarr3, value_type, annotation, structure.key_impls.get(name))
        stored = self._stored.get(alike)
        if stored is None:
            stored = self._stored[alike] = self._describe(entry, value_type, text, zarr3, annotation)
        return stored

    def _describe(
        self, entry: LeafEntry, value_type: str, text: bytes, zarr3: bool, annotation: LeafType | None
    ) -> StoredLeaf:
        try:
            info = parse_array_metadata(text, zarr3)
            return describe_leaf(value_type, info, annotation, self._key_impl(entry, info))
        except ValueError as error:
            key = layout.key_prefix(entry.name) + layout.ARRAY_METADATA_FILES[zarr3]
            raise corrupt_leaf(self._path, entry.path, f"{key!r}: {error}") from error

    def _key_impl(self, entry: LeafEntry, info: ArrayInfo) -> str | None:
        impl = self._structure.key_impls.get(entry.name)
        if impl is not None or not self._structure.is_typed_key:
            return impl
        # The metadata of key items does not name it (orbax-checkpoint 0.5.7 to 0.12.8, measured).
        width = info.shape[-1] if info.shape else 0
        if width not in _IMPLEMENTATIONS:
            raise ValueError(f"expected PRNG key data of width 2 or 4, found {width}")
        impl = _IMPLEMENTATIONS[width]
        if width == 4:
            what = "this PRNG key does not name its implementation: 'rbg' is assumed, which looks as 'unsafe_rbg' does"
            _log.warning(f"{self._path}: {what}; for that one, wrap jax.random.key_data again")
        return impl

    def _warn_of_lost_keys(self, leaves: Sequence[Node]) -> None:
        """Warn of possible PRNG keys that ``array_metadatas``, the only file to tell them from arrays, lacks."""
        doubtful = []
        for entry, leaf in zip(self._structure.entries, leaves, strict=True):
            # Of a release that lists all jax arrays there.
            is_unlisted = entry.write_shape is not None and entry.name not in self._structure.key_impls
            if not (is_unlisted and entry.value_type == layout.JAX_ARRAY and isinstance(leaf, LeafHandle)):
                continue
            if leaf.dtype == "uint32" and leaf.shape and leaf.shape[-1] in KEY_WIDTHS.values():
                leaf.possible_kinds |= {LeafKind.PRNG_KEY}
                doubtful.append(leaf.name)
        if doubtful:
            _log.warning(
                f"{os.path.join(self._path, layout.ARRAY_METADATAS)} does not list the arrays {doubtful[:8]}, and it "
                f"alone tells PRNG keys from arrays; if they were keys, wrap them with jax.random.wrap_key_data"
            )

    def _warn_of_shared_names(self) -> None:
        """Warn of leaves with the same name, of which real Orbax kept one value (measured)."""
        counts = collections.Counter([entry.name for entry in self._structure.entries if not entry.skipped])
        if shared := [name for name, count in counts.items() if count > 1]:
            _log.warning(
                f"{self._path}: several leaves were stored under each of the names {shared[:8]}; only one value of "
                f"each survived, and all of them restore as that one"
            )

    def _unsupported(self, entry: LeafEntry, what: str) -> Node:
        return self._handle(entry, (LeafKind.UNSUPPORTED, (), None, 0), Unsupported(what))


def build_tree(structure: Structure, leaves: Sequence[Node]) -> Node:
    """Return the tree of leaves, one per entry; raise if the entries do not form a tree."""
    containers = structure.containers
    if structure.is_single_array:
        return leaves[0]
    if not leaves or (len(leaves) == 1 and not structure.entries[0].path):
        return _annotated(leaves[0] if leaves else Branch({}), containers.get(()))
    # Path of each branch → the branch, and Orbax's key types on the way to its children.
    branches, file = dict[Path, tuple[Branch, Kinds]](), structure.location / layout.TREE_METADATA
    for entry, leaf in zip(structure.entries, leaves, strict=True):
        _put(branches, file, entry.path, entry.kinds, leaf)
    for path, (branch, _) in branches.items():
        if branch.container is Container.LIST:
            expected = [str(index) for index in range(len(branch.children))]
            if branch.children.keys() != set(expected):
                found = f"the sequence {show_path(path)!r} has the indices {sorted(branch.children)[:8]}"
                raise corrupt(file, f"{found}, expected 0 to {len(expected) - 1}")
            branch.children = {index: branch.children[index] for index in expected}
    for path, annotation in containers.items():
        if path in branches:
            _annotated(branches[path][0], annotation)
        elif path and path[:-1] in branches and path[-1] in (children := branches[path[:-1]][0].children):
            children[path[-1]] = _annotated(children[path[-1]], annotation)
    return branches[()][0]


def _put(branches: dict[Path, tuple[Branch, Kinds]], file: Location, path: Path, kinds: Kinds, node: Node) -> None:
    """Put a node into its branch, which is made if it is not there yet."""
    if not path:
        raise corrupt(file, "it lists the whole tree as one leaf and other leaves besides")
    parent, name = path[:-1], path[-1]
    if parent not in branches:
        branch = Branch({}, Container.LIST if kinds[-1] == layout.SEQUENCE_KEY else Container.DICT)
        branches[parent] = branch, kinds
        if parent:
            _put(branches, file, parent, kinds[:-1], branch)
    branch, expected = branches[parent]
    if kinds != expected:
        if kinds[:-1] != expected[:-1]:
            raise corrupt(file, f"the leaf {show_path(path)!r} contradicts the entries before it")
        branch.container = Container.DICT  # children by index and by name, as of `flax.nnx.List`
    if name in branch.children:
        raise corrupt(file, f"the leaf {show_path(path)!r} is listed twice, or as both a leaf and a branch")
    branch.children[name] = node


def _annotated(node: Node, annotation: ContainerType | None) -> Node:
    """Apply an annotation to a branch, or to a node without values."""
    if annotation is None:
        return node
    if node is None and annotation.container is Container.NAMEDTUPLE:
        return Branch({}, Container.NAMEDTUPLE)
    if isinstance(node, Branch):
        if node.container.is_sequence == annotation.container.is_sequence:
            node.container = annotation.container
            node.type_name = annotation.type_name
        node.int_keys = annotation.int_keys & frozenset(node.children)
    return node
