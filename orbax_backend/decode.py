"""From a stored array to the leaf that it stands for."""

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
from .encode import NP_ARRAY, SCALAR
from .grid import Box
from .jobs import Job
from .stored_names import key_prefix
from .stored_values import Index
from .structure import UNKNOWN
from .type_annotations import LeafMark
from .zarr import ArrayInfo

_SCALAR_KINDS = {"b": LeafKind.BOOL, "i": LeafKind.INT, "u": LeafKind.INT, "c": LeafKind.COMPLEX}
_FROM_SCALAR = {LeafKind.INT: int, LeafKind.FLOAT: float, LeafKind.BOOL: bool, LeafKind.COMPLEX: complex}
_TEXTS = {"str": np.str_, "bytes": np.bytes_}  # numpy's text scalars, which a numpy array would cut at zeros


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """Makes a leaf of its stored array.

    Attributes:
        kind: the type it comes back as.
        shape, dtype: of the array that the leaf is; both the stored ones but for dtypes that zarr lacks.
        text: ``str`` or ``bytes`` for a numpy text scalar.
        impl: of a PRNG key.
    """

    kind: LeafKind
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    text: str | None = None
    impl: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the leaf in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def decode(self, array: np.ndarray[Any, Any]) -> Any:
        """The leaf.

        Raises:
            ValueError: the bytes are no UTF-8.
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
        # The shape is not that of the leaf where only a box of it was read.
        shape = array.shape if len(self.shape) == array.ndim else array.shape[:-1]
        if array.size == 0:
            return np.empty(shape, self.dtype)
        return array.reshape(-1).view(self.dtype).reshape(shape)


def make_decoder(value_type: str, info: ArrayInfo, mark: LeafMark, key_impl: str | None) -> Decoder:
    """How to decode a leaf.

    Args:
        value_type: Orbax's name of its type.
        info: its stored array.
        mark: ours, empty for what the format itself says.
        key_impl: PRNG implementation, as ``array_metadatas`` has it.

    Raises:
        ValueError: the mark and the stored array contradict each other.
    """
    impl = mark.impl or key_impl
    if impl is not None:
        return Decoder(LeafKind.PRNG_KEY, info.shape, info.dtype, impl=impl)
    if mark.dtype in _TEXTS or mark.kind in (LeafKind.BYTES, LeafKind.STR):
        return _text_decoder(info, mark)
    shape, dtype = _marked_type(info, mark.dtype) if mark.dtype else (info.shape, info.dtype)
    kind = mark.kind or _kind(value_type, info)
    if mark.kind is LeafKind.PRNG_KEY:
        raise ValueError("the type mark of a PRNG key names no implementation")
    if kind is not LeafKind.ARRAY and shape != ():
        raise ValueError(f"the type mark says {kind.value}, but {dtype.name}{list(shape)} is stored")
    if mark.kind in _FROM_SCALAR and kind is not _SCALAR_KINDS.get(dtype.kind, LeafKind.FLOAT):
        raise ValueError(f"the type mark says {kind.value}, but {dtype.name} is stored")
    return Decoder(kind, shape, dtype)


def _text_decoder(info: ArrayInfo, mark: LeafMark) -> Decoder:
    if len(info.shape) != 1 or info.dtype != np.uint8:
        raise ValueError(f"the type mark says text or bytes, but {info.dtype.name}{list(info.shape)} is stored")
    return Decoder(mark.kind or LeafKind.NUMPY_SCALAR, info.shape, info.dtype, text=mark.dtype)


def _marked_type(info: ArrayInfo, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a leaf for which others are stored."""
    dtype = dtype_from_name(name)
    if dtype.itemsize == info.dtype.itemsize and dtype.kind not in "US":
        return info.shape, dtype
    if info.dtype == np.uint8 and info.shape and info.shape[-1] == dtype.itemsize:
        return info.shape[:-1], dtype
    raise ValueError(f"the type mark says {dtype.name}, but {info.dtype.name}{list(info.shape)} is stored")


def kinds_of(value_type: str, info: ArrayInfo) -> tuple[LeafKind, frozenset[LeafKind]]:
    """What a leaf that others wrote comes back as, and what else it may have been.

    Orbax stores Python numbers and numpy scalars alike as 0-d arrays, and until 0.4.2 0-d arrays just so, too.
    Python's numbers have 64 bits there, bools one byte (0.1.8 to 0.12.8, measured).

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


# Small arrays share memory, which goes when the last of them does.
_SMALL = 4096
_TOGETHER = 64


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayLocator:
    """How to read a leaf that is stored as an array; leaves of one type share it.

    Attributes:
        info: the metadata of the array.
        decoder: makes the leaf of the array.
        is_plain: the array is the leaf.
        handle: kind, shape, dtype and size of a leaf, and what else it may have been: see `LeafHandle`.
        inline_key: of `inline_key`.
    """

    info: ArrayInfo
    decoder: Decoder
    is_plain: bool
    handle: tuple[LeafKind, tuple[int, ...], np.dtype[Any] | None, int, frozenset[LeafKind]]
    inline_key: str | None

    def job(self, handle: LeafHandle, index: Box | None) -> Job:
        """What to read for a leaf, or a box of it."""
        if index is not None:
            # A dtype that the format lacks is stored with an axis more.
            index = (*index, *grid.whole(self.info.shape[len(index) :]))
        return Job(handle.name, self.info, handle.path, index)


def inline_key(info: ArrayInfo) -> str | None:
    """The key, below the array's own prefix, of the chunk that is a whole small array; None for all others."""
    is_candidate = info.is_one_raw_chunk and info.nbytes <= _SMALL
    return info.chunk_key((0,) * len(info.shape)) if is_candidate else None


def take_inline(
    index: Index | None, wanted: Sequence[LeafHandle | ArraySlice], values: list[Any]
) -> tuple[list[int], list[tuple[LeafHandle, int]]]:
    """Copies small whole arrays whose bytes the index has.

    Args:
        index: of the checkpoint; None where it has no arrays.
        wanted: what shall be read.
        values: where the arrays go, each at its number in what is wanted.

    Returns:
        The numbers of all else that is wanted; and the leaves that are still to be decoded, with their numbers.
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
    for start in range(0, len(found), _TOGETHER):
        block = found[start : start + _TOGETHER]
        packed = memory.pack([(one.locator.info.shape, one.locator.info.dtype, value) for _, one, value in block])
        for (number, _, _), array in zip(block, packed, strict=True):
            values[number] = array
    return rest, [(one, number) for number, one, _ in found if not one.locator.is_plain]
