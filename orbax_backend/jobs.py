"""What of which array is to be read, and which chunks that touches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._core.tree import Path, show_path

from . import grid
from .grid import Box
from .key_index import StoredValue
from .uncompressed import Copy
from .zarr import ArrayInfo


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One array to read, or a box of it: its stored name, metadata, and key path for messages."""

    name: str
    info: ArrayInfo
    path: Path
    box: Box | None = None

    @property
    def keystr(self) -> str:
        """The key path as people read it."""
        return show_path(self.path)

    @property
    def region(self) -> Box:
        """What of the array is wanted."""
        return grid.whole(self.info.shape) if self.box is None else self.box

    @property
    def is_one_plain_chunk(self) -> bool:
        """Whether it is exactly the bytes of one chunk, as almost all arrays are."""
        return self.box is None and self.info.is_one_raw_chunk

    def cells(self) -> Iterator[tuple[grid.Shape, Box]]:
        """Index and extent of every chunk that it touches."""
        if self.is_one_plain_chunk:
            return iter([((0,) * len(self.info.shape), grid.whole(self.info.shape))])
        return grid.cells(self.region, self.info.chunks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is wanted."""
        return self.info.shape if self.box is None else grid.shape_of(self.box)


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayRead:
    """A job and the memory for it.

    Attributes:
        chunks: those that it touches: where each is stored, and where it lies in the array.
        complete: none of them is left out on disk.
    """

    job: Job
    array: np.ndarray[Any, Any]
    chunks: list[tuple[StoredValue, Box]]
    complete: bool

    def copy(self, chunk: Box) -> Copy:
        """What belongs from one chunk into the memory."""
        part = grid.overlap(chunk, self.job.region)
        return Copy(grid.within(part, chunk), self.array, grid.within(part, self.job.region))


def by_chunk(group: list[ArrayRead]) -> dict[tuple[int, ...], tuple[Any, list[Copy]]]:
    """Start of every chunk → where it is stored, and what all requests want of it."""
    wanted: dict[tuple[int, ...], tuple[Any, list[Copy]]] = {}
    for request in group:
        for place, chunk in request.chunks:
            start = tuple(side.start for side in chunk)
            wanted.setdefault(start, (place, []))[1].append(request.copy(chunk))
    return wanted


def show(job: Job) -> str:
    """Its dtype and shape, for messages."""
    return f"{job.info.dtype.name}{list(job.shape)}"
