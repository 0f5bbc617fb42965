"""Describe the leaves of a directory as handles, with how each is stored as an array, and decode them."""

from __future__ import annotations

import collections
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.array_boxes import Box
from flax_ckpt_compat._core.backend import KIND_OF_NUMBER, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.dtypes import dtype_from_name
from flax_ckpt_compat._core.memory import MAX_PACKED_RANK, view_as
from flax_ckpt_compat._core.tree import Branch, KeyData, Node

from . import stored_names
from .files import corrupt_leaf
from .open_index import Index
from .read_plan import BoxLayout
from .tree_structure import UNKNOWN, LeafEntry, Structure
from .type_annotations import LeafType
from .zarr import ArrayInfo, UnsupportedArrayError, parse_array_metadata

_EMPTY = {stored_names.NONE: None, **stored_names.EMPTY_CONTAINERS}
# Leaves of other types may be stored in any way, even if there are arrays of their names.
_ARRAY_TYPES = frozenset([layout.JAX_ARRAY, layout.NP_ARRAY, stored_names.SCALAR, UNKNOWN])
_STORED_TYPES = _ARRAY_TYPES | {stored_names.STRING}
_UNANNOTATED = LeafType()
_IMPLEMENTATIONS = {2: "threefry2x32", 4: "rbg"}  # of PRNG keys, by the width of their data
_SCALAR_KINDS = {"b": LeafKind.BOOL, "i": LeafKind.INT, "u": LeafKind.INT, "c": LeafKind.COMPLEX}
_FROM_SCALAR = {kind: python for python, kind in KIND_OF_NUMBER.items()}
_TEXTS = ("str", "bytes")  # numpy's text scalars, which a numpy array would cut at zeros
# The data of a key of jax's own implementations has so many uint32.
_KEY_WIDTHS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
_MAX_BOXES = 64  # that are kept of a leaf: a process has one for each of its devices
# Arrays up to this size that are inline in the database share memory.
_SMALL_BYTES = 4096
Described = tuple[LeafKind, tuple[int, ...], np.dtype[Any] | None, int]  # kind, shape, dtype and size of a `LeafHandle`
_log = logging.getLogger("flax_ckpt_compat")


class LeafDescriptions:
    """The leaves of one open directory."""

    def __init__(self, reader: Reader, structure: Structure, index: Index) -> None:
        """Prepare to describe them; ``reader`` is the one that reads them, and ``index`` has the arrays."""
        self._reader, self._structure, self._index, self._path = reader, structure, index, reader.path
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
        if (inner := self._structure.values.get(path)) is not None:
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
        if value_type == stored_names.STRING or (value_type == UNKNOWN and self._structure.strings is not None):
            text = self._structure.text(entry)
            return self._handle(entry, (LeafKind.STR, (), None, len(text.encode("utf-8", "surrogatepass"))), text)
        key = stored_names.key_prefix(entry.name) + layout.ARRAY_METADATA_FILES[self._structure.zarr3]
        raise corrupt_leaf(self._path, entry.path, f"its metadata {key!r} is missing")

    def _handle(
        self, entry: LeafEntry, described: Described, locator: Any, kinds: frozenset[LeafKind] = frozenset()
    ) -> Node:
        return LeafHandle(entry.path, *described, entry.name, self._reader, locator, False, kinds)

    def _stored_leaf(self, entry: LeafEntry) -> StoredLeaf | None:
        """Return how an array is stored, shared by all leaves that are stored alike; None if there is no array."""
        structure, name, value_type = self._structure, entry.name, entry.value_type
        for zarr3 in (structure.zarr3, not structure.zarr3):
            text = self._index.get(stored_names.key_prefix(name) + layout.ARRAY_METADATA_FILES[zarr3])
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
            key = stored_names.key_prefix(entry.name) + layout.ARRAY_METADATA_FILES[zarr3]
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
            if leaf.dtype == "uint32" and leaf.shape and leaf.shape[-1] in _KEY_WIDTHS.values():
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
        return self._handle(entry, (LeafKind.UNSUPPORTED, (), None, 0), UnsupportedArrayError(what))


class StoredLeaf:
    """Storage of leaves of one type as arrays; the locator of their handles."""

    def __init__(
        self,
        info: ArrayInfo,
        kind: LeafKind,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        text: str | None = None,
        impl: str | None = None,
        possible_kinds: frozenset[LeafKind] = frozenset(),
    ) -> None:
        # shape, dtype: of the decoded array; they differ from the stored ones for dtypes that zarr lacks.
        # text: ``str`` or ``bytes`` for a numpy text scalar. impl: implementation of a PRNG key.
        # possible_kinds: see `LeafHandle`.
        self.info, self.kind, self.shape, self.dtype = info, kind, shape, dtype
        self.text, self.impl, self.possible_kinds = text, impl, possible_kinds
        has_shape = kind in (LeafKind.ARRAY, LeafKind.PRNG_KEY)
        shown = None if not has_shape and kind is not LeafKind.NUMPY_SCALAR else np.dtype(text or dtype)
        self.described: Described = kind, shape if has_shape else (), shown, math.prod(shape) * dtype.itemsize
        self.is_plain = kind is LeafKind.ARRAY and dtype == info.dtype  # whether the array is the leaf
        # Whether chunks are so small that they may be in the index, and are packed.
        self.has_small_chunks = info.chunk_nbytes <= _SMALL_BYTES and len(info.shape) <= MAX_PACKED_RANK
        self.chunk_nbytes, self.whole = info.chunk_nbytes, BoxLayout(info)
        # By id: quick for boxes that many leaves share, as those of a sharding. Each entry holds its box.
        self._boxes: dict[int, tuple[Box, BoxLayout]] = {}

    def layout_of(self, box: Box) -> BoxLayout:
        """Return the layout of a box; the stored array may have one more axis."""
        known = self._boxes.get(id(box))
        if known is not None:
            return known[1]
        layout = BoxLayout(self.info, (*box, *array_boxes.full_box(self.info.shape[len(box) :])))
        if len(self._boxes) < _MAX_BOXES:
            self._boxes[id(box)] = box, layout
        return layout

    def decode(self, array: np.ndarray[Any, Any]) -> Any:
        """Return the leaf, or a box of it; raise ValueError if its text is not UTF-8."""
        if self.kind is LeafKind.PRNG_KEY:
            return KeyData(str(self.impl), array)
        if self.kind in _FROM_SCALAR:
            return _FROM_SCALAR[self.kind](array[()])
        if self.kind is LeafKind.BYTES:
            return array.tobytes()
        if self.kind is LeafKind.STR:
            return _utf8(array)
        if self.text is not None:
            return np.str_(_utf8(array)) if self.text == "str" else np.bytes_(array.tobytes())
        if array.dtype != self.dtype:
            array = view_as(array, self.dtype, array.shape if len(self.shape) == array.ndim else array.shape[:-1])
        return array[()] if self.kind is LeafKind.NUMPY_SCALAR else array


def describe_leaf(value_type: str, info: ArrayInfo, annotation: LeafType | None, key_impl: str | None) -> StoredLeaf:
    """Return how a leaf is stored; raise ValueError if its annotation (None: of another writer) contradicts that."""
    possible_kinds = frozenset[LeafKind]()
    if annotation is None:
        kind, possible_kinds = _kinds_of(value_type, info)
        annotation = LeafType(None if kind is LeafKind.ARRAY else kind)
    impl = annotation.impl or key_impl
    if impl is not None:
        width = _KEY_WIDTHS.get(impl, info.shape[-1] if info.shape else 0)
        if info.dtype.str[1:] != "u4" or info.shape[-1:] != (width,):
            raise ValueError(f"it is a PRNG key of {impl!r}, but {info.dtype.name}{list(info.shape)} is stored")
        return StoredLeaf(info, LeafKind.PRNG_KEY, info.shape, info.dtype, None, impl, possible_kinds)
    if annotation.dtype in _TEXTS or annotation.kind in (LeafKind.BYTES, LeafKind.STR):
        if len(info.shape) != 1 or info.dtype != np.uint8:
            found = f"{info.dtype.name}{list(info.shape)}"
            raise ValueError(f"the type annotation says text or bytes, but {found} is stored")
        return StoredLeaf(info, annotation.kind or LeafKind.NUMPY_SCALAR, info.shape, info.dtype, annotation.dtype)
    shape, dtype = _annotated_type(info, annotation.dtype) if annotation.dtype else (info.shape, info.dtype)
    if annotation.kind is LeafKind.PRNG_KEY:
        raise ValueError("the type annotation of a PRNG key names no implementation")
    is_scalar = value_type == stored_names.SCALAR and info.shape == ()
    kind = annotation.kind or (_scalar_kind(info.dtype) if is_scalar else LeafKind.ARRAY)
    if kind is not LeafKind.ARRAY and shape != ():
        raise ValueError(f"the type annotation says {kind.value}, but {dtype.name}{list(shape)} is stored")
    if annotation.kind in _FROM_SCALAR and kind is not _scalar_kind(dtype):
        raise ValueError(f"the type annotation says {kind.value}, but {dtype.name} is stored")
    return StoredLeaf(info, kind, shape, dtype, possible_kinds=possible_kinds)


def _annotated_type(info: ArrayInfo, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a leaf that is stored with others."""
    dtype = dtype_from_name(name)
    if dtype.itemsize == info.dtype.itemsize and dtype.kind not in "US":
        return info.shape, dtype
    if info.dtype == np.uint8 and info.shape and info.shape[-1] == dtype.itemsize:
        return info.shape[:-1], dtype
    raise ValueError(f"the type annotation says {dtype.name}, but {info.dtype.name}{list(info.shape)} is stored")


def _kinds_of(value_type: str, info: ArrayInfo) -> tuple[LeafKind, frozenset[LeafKind]]:
    """Return the kind of a leaf without a type annotation, and the other kinds it may have been.

    Orbax stores Python numbers and numpy scalars alike as 0-d arrays, and until 0.4.2 0-d arrays in the same way.
    Python's numbers are stored with 64 bits, bools with one byte (0.1.8 to 0.12.8, measured).
    """
    if value_type not in (stored_names.SCALAR, layout.NP_ARRAY, UNKNOWN) or info.shape != ():
        return LeafKind.ARRAY, frozenset()
    python = _scalar_kind(info.dtype)
    as_python = info.dtype.kind == "b" or (info.dtype.kind in "iuf" and info.dtype.itemsize == 8)
    scalars = frozenset([python, LeafKind.NUMPY_SCALAR])
    if value_type == stored_names.SCALAR:
        kind = python if as_python else LeafKind.NUMPY_SCALAR
        return kind, scalars - {kind}
    if value_type == layout.NP_ARRAY or not as_python:
        # StandardCheckpointHandler stores numpy scalars as arrays.
        return LeafKind.ARRAY, frozenset([LeafKind.NUMPY_SCALAR])
    return python, frozenset([LeafKind.ARRAY, LeafKind.NUMPY_SCALAR])


def _scalar_kind(dtype: np.dtype[Any]) -> LeafKind:
    return _SCALAR_KINDS.get(dtype.kind, LeafKind.FLOAT)


def _utf8(array: np.ndarray[Any, Any]) -> str:
    return array.tobytes().decode("utf-8", "surrogatepass")
