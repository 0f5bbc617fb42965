"""Encode everything but array data as msgpack bytes."""

from __future__ import annotations

import functools
import struct
import threading
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from flax_ckpt_compat._core import dtypes

from . import format

_FIXEXT = {1: b"\xd4", 2: b"\xd5", 4: b"\xd6", 8: b"\xd7", 16: b"\xd8"}
_LOCAL = threading.local()


def _sized(length: int, codes: tuple[int | None, int, int]) -> bytes:
    """Encode a header with the shortest length field that fits, as msgpack's own packer does."""
    one, two, four = codes
    if one is not None and length < 2**8:
        return struct.pack(">BB", one, length)
    if length < 2**16:
        return struct.pack(">BH", two, length)
    return struct.pack(">BI", four, length)


def map_header(count: int) -> bytes:
    """Encode the header of a map of ``count`` pairs."""
    return bytes((0x80 | count,)) if count < 16 else _sized(count, (None, 0xDE, 0xDF))


def bin_header(length: int) -> bytes:
    """Encode the header of ``length`` raw bytes."""
    return _sized(length, (0xC4, 0xC5, 0xC6))


def ext_header(code: int, length: int) -> bytes:
    """Encode the header of an extension value of ``length`` bytes."""
    return (_FIXEXT.get(length) or _sized(length, (0xC7, 0xC8, 0xC9))) + bytes((code,))


def scalar(value: Any) -> bytes:
    """Encode a native msgpack value: None, bool, int, float, str or bytes."""
    packed: bytes = _packer().pack(value)
    return packed


def complex_value(value: complex) -> bytes:
    """Encode a Python complex, as Flax 0.9.0 and later do."""
    payload: bytes = _packer().pack([value.real, value.imag])
    return ext_header(format.EXT_COMPLEX, len(payload)) + payload


@functools.lru_cache(maxsize=4096)
def array_header(code: int, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> bytes:
    """Encode all bytes of an array or numpy scalar before its data.

    Args:
        code: `format.EXT_ARRAY` or `format.EXT_NUMPY_SCALAR`.
        shape: shape of the array; () for a scalar.
        dtype: its dtype.
        nbytes: size of the data, in bytes.
    """
    pack = msgpack.Packer().pack
    inner = b"\x93" + pack(shape) + pack(dtypes.stored_name(dtype)) + bin_header(nbytes)
    return ext_header(code, len(inner) + nbytes) + bytes(inner)


def _packer() -> Any:
    """Return this thread's packer; packers keep a buffer and are not thread-safe."""
    try:
        return _LOCAL.packer
    except AttributeError:
        # strict: Flax's files hold exact types only; validation refuses subclasses.
        _LOCAL.packer = msgpack.Packer(strict_types=True)
        return _LOCAL.packer
