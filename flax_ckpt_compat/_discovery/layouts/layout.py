"""Define what readers of other programs' files share: whole arrays, and errors."""

from __future__ import annotations

import abc
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.array_boxes import full_box
from flax_ckpt_compat._core.backend import ArraySlice, Format, LeafHandle, LeafKind, Reader, handle_of
from flax_ckpt_compat._core.errors import CorruptCheckpointError, DepthError
from flax_ckpt_compat._core.location import Location


class WholeReader(Reader):
    """Reader of arrays that are read whole, from which slices are cut; an unsupported one has its error as locator."""

    format = Format.MSGPACK  # by whose rules its leaves are restored
    places_on_device, keeps_lists = False, False

    @abc.abstractmethod
    def read_whole(self, leaves: Sequence[LeafHandle]) -> list[Any]:
        """Read leaves."""

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """Read leaves, and once those that slices are cut from; see `Reader.read`."""
        keys = [number if isinstance(one, LeafHandle) else -id(one.handle) for number, one in enumerate(handles)]
        leaves = dict(zip(keys, map(handle_of, handles), strict=True))
        for leaf in leaves.values():
            if leaf.kind is LeafKind.UNSUPPORTED:
                raise leaf.locator
        values = dict(zip(leaves, self.read_whole(list(leaves.values())), strict=True))
        return [
            one.cut(values[key]) if isinstance(one, ArraySlice) else values[key]
            for key, one in zip(keys, handles, strict=True)
        ]

    def boxes(self, handle: LeafHandle, nbytes: int) -> Iterator[tuple[slice, ...]]:  # noqa: ARG002
        """Yield the whole; see `Reader.boxes`."""
        yield full_box(handle.shape)


def damaged(
    file: Location, what: str, leaf: str | None = None, kind: type[CorruptCheckpointError] = CorruptCheckpointError
) -> CorruptCheckpointError:
    """Return the error for a file of another program that is damaged; ``what`` says how."""
    message = f"{file}: {what}; restore the file from a backup, or download it again"
    return kind(message, path=file.path, leaf=leaf)


def check_depth(file: Location, levels: int) -> None:
    """Raise DepthError for a key path that no restore can follow, before time is spent on its many names."""
    if levels > sys.getrecursionlimit():
        what = f"{file}: a name of {levels} levels is nested too deeply for Python's recursion limit"
        raise DepthError(f"{what}; raise the limit with sys.setrecursionlimit", path=file.path)


def nbytes_of(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the bytes of an array; raise ValueError if numpy has none of this shape."""
    np.empty((1,) * len(shape), np.uint8)
    if min(shape, default=0) < 0 or math.prod(side or 1 for side in shape) * dtype.itemsize > sys.maxsize:
        raise ValueError(f"the shape {tuple(shape)!r:.100}")
    return math.prod(shape) * dtype.itemsize
