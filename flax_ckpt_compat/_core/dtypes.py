"""Convert between numpy dtypes and their stored names."""

from __future__ import annotations

import functools
import re
from typing import Any

import ml_dtypes
import numpy as np

_ML_DTYPES = {
    name: np.dtype(scalar)
    for name in dir(ml_dtypes)
    if isinstance(scalar := getattr(ml_dtypes, name), type) and issubclass(scalar, np.generic)
}
# ``np.dtype.name`` of text and bytes arrays, which ``np.dtype`` does not parse.
_SIZED = re.compile(r"(str|bytes)(\d+)")
# ``np.dtype.name`` of everything else that an array checkpoint may hold, or a typestr with its byte order.
# Not numpy's deprecated alias ``a`` for bytes: it warns, and no file has it.
_PLAIN = re.compile(r"(?![<>|=]?a\d)[<>|=]?([A-Za-z]+|\?)\d*(\[\d*[A-Za-z]+\])?")
# The dtypes of ml_dtypes that TensorStore 0.1.86 accepts in zarr v2 (tried one by one).
ZARR_ML_DTYPES = frozenset([
    "bfloat16", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int2", "int4",
])  # fmt: skip
_WIDE = ["i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ZARR_TYPESTRS = frozenset(["|b1", "|i1", "|u1", *(order + kind for order in "<>" for kind in _WIDE)])


def dtype_from_name(name: str) -> np.dtype[Any]:
    """Parse a dtype from ``np.dtype.name`` or ``np.dtype.str``; raise ValueError for none that can be stored."""
    ml_dtype = _ML_DTYPES.get(name)
    if ml_dtype is not None:
        return ml_dtype
    text = name
    if sized := _SIZED.fullmatch(name):
        bits, (width, kind) = int(sized[2]), (32, "U") if sized[1] == "str" else (8, "S")
        text = "" if bits % width or bits > 2**31 else f"{kind}{bits // width}"
    try:
        dtype = np.dtype(text) if _PLAIN.fullmatch(text) else None
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not is_storable(dtype):
        raise ValueError(f"{name!r} is not a dtype that a checkpoint can hold")
    return dtype


@functools.cache
def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is of real floats, numpy's or ml_dtypes', whose kind is not specific."""
    return "float" in dtype.name


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is of integers, numpy's or ml_dtypes'."""
    return "int" in dtype.name


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Return False for dtypes without a portable meaning: Python objects, records, raw void."""
    return not (dtype.hasobject or dtype.names or (dtype.kind == "V" and dtype.name not in _ML_DTYPES))


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name to store for a dtype; for a foreign byte order the typestr, which Flax reads: names drop it."""
    return dtype.name if dtype.isnative else dtype.str


def zarr_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a dtype in zarr v2 (as TensorStore reads it), or None."""
    if dtype.str in ZARR_TYPESTRS:
        return dtype.str
    return dtype.name if dtype.name in ZARR_ML_DTYPES and dtype.isnative else None
