"""Arrays over a mapping of the file, in place of memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import mapping
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind

from .source import File, Source


def arrays(source: Source, handles: Sequence[LeafHandle]) -> dict[int, Any]:
    """Those arrays that lie in one piece in a local file, by their index among the handles.

    Wherever the keys and headers before it happen to end, there an array begins: most are not aligned.
    """
    if not isinstance(source, File) or source.is_closed:
        return {}
    wanted = [index for index, handle in enumerate(handles) if _is_one_piece(handle)]
    views = mapping.map_regions(source.fileno(), [(handles[index].where, handles[index].nbytes) for index in wanted])
    return {
        index: np.ndarray(handles[index].shape, handles[index].dtype, view)
        for index, view in zip(wanted, views, strict=True)
        if view is not None
    }


def _is_one_piece(handle: LeafHandle) -> bool:
    is_large_array = handle.kind is LeafKind.ARRAY and handle.nbytes >= mapping.LEAST
    return is_large_array and handle.dtype is not None and type(handle.where) is int
