"""Describe and decode leaves that are stored as arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core.array_boxes import Box
from flax_ckpt_compat._core.backend import KIND_OF_NUMBER, LeafKind
from flax_ckpt_compat._core.dtypes import dtype_from_name
from flax_ckpt_compat._core.memory import MAX_PACKED_RANK, view_as
from flax_ckpt_compat._core.orbax_layout import NP_ARRAY, SCALAR
from flax_ckpt_compat._core.tree import KeyData

from .read_plan import BoxLayout
from .tree_structure import UNKNOWN
from .type_annotations import LeafType
from .zarr import ArrayInfo

_SCALAR_KINDS = {"b": LeafKind.BOOL, "i": LeafKind.INT, "u": LeafKind.INT, "c": LeafKind.COMPLEX}
_FROM_SCALAR = {kind: python for python, kind in KIND_OF_NUMBER.items()}
_TEXTS = ("str", "bytes")  # numpy's text scalars, which a numpy array would cut at zeros
# The data of a key of jax's own implementations has so many uint32.
KEY_WIDTHS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
_MAX_BOXES = 64  # that are kept of a leaf: a process has one for each of its devices
# Arrays up to this size that are inline in the database share memory.
_SMALL_BYTES = 4096
Described = tuple[LeafKind, tuple[int, ...], np.dtype[Any] | None, int]  # kind, shape, dtype and size of a `LeafHandle`


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
        width = KEY_WIDTHS.get(impl, info.shape[-1] if info.shape else 0)
        if info.dtype.str[1:] != "u4" or info.shape[-1:] != (width,):
            raise ValueError(f"it is a PRNG key of {impl!r}, but {info.dtype.name}{list(info.shape)} is stored")
        return StoredLeaf(info, LeafKind.PRNG_KEY, info.shape, info.dtype, None, impl, possible_kinds)
    if annotation.dtype in _TEXTS or annotation.kind in (LeafKind.BYTES, LeafKind.STR):
        if len(info.shape) != 1 or info.dtype != np.uint8:
            found = f"{info.dtype.name}{list(info.shape)}"
            raise ValueError(f"the type annotation says text or bytes, but {found} is stored")
        return StoredLeaf(info, annotation.kind or LeafKind.NUMPY_SCALAR, info.shape, info.dtype, annotation.dtype)
    shape, dtype = _annotated_type(info, annotation.dtype) if annotation.dtype else (info.shape, info.dtype)
    is_scalar = value_type == SCALAR and info.shape == ()
    kind = annotation.kind or (_scalar_kind(info.dtype) if is_scalar else LeafKind.ARRAY)
    if annotation.kind is LeafKind.PRNG_KEY:
        raise ValueError("the type annotation of a PRNG key names no implementation")
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
    if value_type not in (SCALAR, NP_ARRAY, UNKNOWN) or info.shape != ():
        return LeafKind.ARRAY, frozenset()
    python = _scalar_kind(info.dtype)
    as_python = info.dtype.kind == "b" or (info.dtype.kind in "iuf" and info.dtype.itemsize == 8)
    scalars = frozenset([python, LeafKind.NUMPY_SCALAR])
    if value_type == SCALAR:
        kind = python if as_python else LeafKind.NUMPY_SCALAR
        return kind, scalars - {kind}
    if value_type == NP_ARRAY or not as_python:
        # StandardCheckpointHandler stores numpy scalars as arrays.
        return LeafKind.ARRAY, frozenset([LeafKind.NUMPY_SCALAR])
    return python, frozenset([LeafKind.ARRAY, LeafKind.NUMPY_SCALAR])


def _scalar_kind(dtype: np.dtype[Any]) -> LeafKind:
    return _SCALAR_KINDS.get(dtype.kind, LeafKind.FLOAT)


def _utf8(array: np.ndarray[Any, Any]) -> str:
    return array.tobytes().decode("utf-8", "surrogatepass")
