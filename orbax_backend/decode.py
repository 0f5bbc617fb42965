"""Decode stored arrays to leaves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind
from flax_ckpt_compat._core.dtypes import dtype_from_name
from flax_ckpt_compat._core.tree import KeyData

from . import grid
from .array_reads import Job
from .encode import NP_ARRAY, SCALAR
from .grid import Box
from .stored_names import key_prefix
from .stored_values import Index
from .structure import UNKNOWN
from .type_annotations import LeafType
from .zarr import ArrayInfo

_SCALAR_KINDS = {"b": LeafKind.BOOL, "i": LeafKind.INT, "u": LeafKind.INT, "c": LeafKind.COMPLEX}
_FROM_SCALAR = {LeafKind.INT: int, LeafKind.FLOAT: float, LeafKind.BOOL: bool, LeafKind.COMPLEX: complex}
_TEXTS = {"str": np.str_, "bytes": np.bytes_}  # numpy's text scalars, which a numpy array would cut at zeros


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes the stored array of a leaf.

    Attributes:
        kind: type of the leaf.
        shape, dtype: those of the leaf; they differ from the stored ones for dtypes that zarr lacks.
        text: ``str`` or ``bytes`` for a numpy text scalar.
        impl: implementation of a PRNG key.
    """

    kind: LeafKind
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    text: str | None = None
    impl: str | None = None

    @property
    def nbytes(self) -> int:
        """Return the size of the leaf in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def decode(self, array: np.ndarray[Any, Any]) -> Any:
        """Return the leaf.

        Raises:
            ValueError: the bytes are not UTF-8.
        """
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
        typed = array if array.dtype == self.dtype else self._retyped(array)
        return typed[()] if self.kind is LeafKind.NUMPY_SCALAR else typed

    def _retyped(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # The array may be a box of the leaf only.
        shape = array.shape if len(self.shape) == array.ndim else array.shape[:-1]
        if array.size == 0:
            return np.empty(shape, self.dtype)
        return array.reshape(-1).view(self.dtype).reshape(shape)


def make_decoder(value_type: str, info: ArrayInfo, annotation: LeafType, key_impl: str | None) -> Decoder:
    """Return the decoder of a leaf.

    Args:
        value_type: Orbax's name of its type.
        info: its stored array.
        annotation: our type annotation; empty where Orbax's format says enough.
        key_impl: PRNG implementation from ``array_metadatas``.

    Raises:
        ValueError: the annotation and the stored array contradict each other.
    """
    impl = annotation.impl or key_impl
    if impl is not None:
        return Decoder(LeafKind.PRNG_KEY, info.shape, info.dtype, impl=impl)
    if annotation.dtype in _TEXTS or annotation.kind in (LeafKind.BYTES, LeafKind.STR):
        return _text_decoder(info, annotation)
    shape, dtype = _annotated_type(info, annotation.dtype) if annotation.dtype else (info.shape, info.dtype)
    kind = annotation.kind or _kind(value_type, info)
    if annotation.kind is LeafKind.PRNG_KEY:
        raise ValueError("the type annotation of a PRNG key names no implementation")
    if kind is not LeafKind.ARRAY and shape != ():
        raise ValueError(f"the type annotation says {kind.value}, but {dtype.name}{list(shape)} is stored")
    if annotation.kind in _FROM_SCALAR and kind is not _SCALAR_KINDS.get(dtype.kind, LeafKind.FLOAT):
        raise ValueError(f"the type annotation says {kind.value}, but {dtype.name} is stored")
    return Decoder(kind, shape, dtype)


def _text_decoder(info: ArrayInfo, annotation: LeafType) -> Decoder:
    if len(info.shape) != 1 or info.dtype != np.uint8:
        raise ValueError(f"the type annotation says text or bytes, but {info.dtype.name}{list(info.shape)} is stored")
    return Decoder(annotation.kind or LeafKind.NUMPY_SCALAR, info.shape, info.dtype, text=annotation.dtype)


def _annotated_type(info: ArrayInfo, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a leaf that is stored with others."""
    dtype = dtype_from_name(name)
    if dtype.itemsize == info.dtype.itemsize and dtype.kind not in "US":
        return info.shape, dtype
    if info.dtype == np.uint8 and info.shape and info.shape[-1] == dtype.itemsize:
        return info.shape[:-1], dtype
    raise ValueError(f"the type annotation says {dtype.name}, but {info.dtype.name}{list(info.shape)} is stored")


def kinds_of(value_type: str, info: ArrayInfo) -> tuple[LeafKind, frozenset[LeafKind]]:
    """Return the kind of a leaf without a type annotation, and the other kinds it may have been.

    Orbax stores Python numbers and numpy scalars alike as 0-d arrays, and until 0.4.2 0-d arrays in the same way.
    Python's numbers are stored with 64 bits, bools with one byte (0.1.8 to 0.12.8, measured).

    Args:
        value_type: Orbax's name of its type, or `UNKNOWN`.
        info: its stored array.
    """
    if value_type not in (SCALAR, NP_ARRAY, UNKNOWN) or info.shape != ():
        return LeafKind.ARRAY, frozenset()
    python = _SCALAR_KINDS.get(info.dtype.kind, LeafKind.FLOAT)
    as_python = info.dtype.kind == "b" or (info.dtype.kind in "iuf" and info.dtype.itemsize == 8)
    scalars = frozenset([python, LeafKind.NUMPY_SCALAR])
    if value_type == SCALAR:
        kind = python if as_python else LeafKind.NUMPY_SCALAR
        return kind, scalars - {kind}
    if value_type == NP_ARRAY or not as_python:
        # StandardCheckpointHandler stores numpy scalars as arrays.
        return LeafKind.ARRAY, frozenset([LeafKind.NUMPY_SCALAR])
    return python, frozenset([LeafKind.ARRAY, LeafKind.NUMPY_SCALAR])


def _kind(value_type: str, info: ArrayInfo) -> LeafKind:
    if value_type != SCALAR or info.shape != ():
        return LeafKind.ARRAY
    return _SCALAR_KINDS.get(info.dtype.kind, LeafKind.FLOAT)


def _utf8(array: np.ndarray[Any, Any]) -> str:
    return array.tobytes().decode("utf-8", "surrogatepass")


# Small arrays share memory, which is freed with the last of them.
_SMALL_BYTES = 4096
_LEAVES_PER_BLOCK = 64


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayLocator:
    """The locator of leaves that are stored as arrays of one type.

    Attributes:
        info: metadata of the array.
        decoder: decodes the array.
        is_plain: whether the array is the leaf.
        handle: kind, shape, dtype, size and possible kinds of the `LeafHandle`.
        inline_key: see the function `inline_key`.
    """

    info: ArrayInfo
    decoder: Decoder
    is_plain: bool
    handle: tuple[LeafKind, tuple[int, ...], np.dtype[Any] | None, int, frozenset[LeafKind]]
    inline_key: str | None

    def job(self, handle: LeafHandle, index: Box | None) -> Job:
        """Return the job that reads a leaf, or a box of it."""
        if index is not None:
            # A dtype that zarr lacks is stored with one more axis.
            index = (*index, *grid.full_box(self.info.shape[len(index) :]))
        return Job(handle.name, self.info, handle.path, index)


def inline_key(info: ArrayInfo) -> str | None:
    """Return the chunk key, below the array's prefix, of a small array in one raw chunk; None for other arrays."""
    is_candidate = info.is_one_raw_chunk and info.nbytes <= _SMALL_BYTES
    return info.chunk_key((0,) * len(info.shape)) if is_candidate else None


def take_inline(
    index: Index | None, wanted: Sequence[LeafHandle | ArraySlice], values: list[Any]
) -> tuple[list[int], list[tuple[LeafHandle, int]]]:
    """Copy small whole arrays that are inline in the index.

    Args:
        index: index of the checkpoint; None if it has no arrays.
        wanted: handles and slices to read.
        values: output, one place per handle.

    Returns:
        The numbers of the handles that are left; and the leaves that must still be decoded, with their numbers.
    """
    if index is None:
        return list(range(len(wanted))), []
    rest: list[int] = []
    found: list[tuple[int, LeafHandle, bytes]] = []
    for number, one in enumerate(wanted):
        if isinstance(one, LeafHandle) and isinstance(one.locator, ArrayLocator) and one.locator.inline_key is not None:
            value = index.find(key_prefix(one.name) + one.locator.inline_key)
            if type(value) is bytes and len(value) == one.locator.info.nbytes:
                found.append((number, one, value))
                continue
        rest.append(number)
    for start in range(0, len(found), _LEAVES_PER_BLOCK):
        block = found[start : start + _LEAVES_PER_BLOCK]
        packed = memory.pack([(one.locator.info.shape, one.locator.info.dtype, value) for _, one, value in block])
        for (number, _, _), array in zip(block, packed, strict=True):
            values[number] = array
    return rest, [(one, number) for number, one, _ in found if not one.locator.is_plain]
