"""Parts of arrays: rows as arrays of their own further on in the file, anything else cut from the whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from flax_ckpt_compat._core.backend import LeafHandle, Part

from .gda import FolderArray

_ReadHandles = Callable[[Sequence[LeafHandle]], list[Any]]


def read(wanted: Sequence[LeafHandle | Part], read_handles: _ReadHandles) -> list[Any]:
    """The values of handles and parts, in their order; see `Reader.read`.

    Args:
        read_handles: reads whole leaves.
    """
    if Part not in set(map(type, wanted)):
        return read_handles(cast(Sequence[LeafHandle], wanted))
    asked = [one if isinstance(one, LeafHandle) else _rows(one) for one in wanted]
    pairs = list(zip(wanted, asked, strict=True))
    cut = {id(one.handle): one.handle for one, rows in pairs if isinstance(one, Part) and rows is None}
    values = iter(read_handles([*(handle for handle in asked if handle is not None), *cut.values()]))
    found = [None if handle is None else next(values) for handle in asked]
    whole = dict(zip(cut, values, strict=True))
    return [
        one.cut(whole[id(one.handle)]) if isinstance(one, Part) and rows is None else value
        for (one, rows), value in zip(pairs, found, strict=True)
    ]


def _rows(part: Part) -> LeafHandle | None:
    """A handle of the part alone, where its bytes lie in one piece."""
    handle, where = part.handle, part.handle.where
    if isinstance(where, FolderArray):
        return dataclasses.replace(handle, where=dataclasses.replace(where, index=part.index))
    inner = zip(part.index[1:], handle.shape[1:], strict=True)
    if handle.dtype is None or type(where) is not int or any(side != slice(0, length) for side, length in inner):
        return None
    row = math.prod(handle.shape[1:]) * handle.dtype.itemsize
    rows = part.index[0].stop - part.index[0].start
    return dataclasses.replace(
        handle, shape=(rows, *handle.shape[1:]), nbytes=rows * row, where=where + part.index[0].start * row
    )
