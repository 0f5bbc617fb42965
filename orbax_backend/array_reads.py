"""Describe array reads: the box to read, and the chunks that it intersects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._core.tree import Path, show_path

from . import grid
from .grid import Box
from .stored_values import StoredValue
from .uncompressed import Copy
from .zarr import ArrayInfo


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """An array, or a box of it, to read.

    Attributes:
        name: stored name.
        info: metadata of the array.
        path: key path, for messages.
        box: box to read; None for the whole array.
    """

    name: str
    info: ArrayInfo
    path: Path
    box: Box | None = None

    @property
    def keystr(self) -> str:
        """Return the key path as text."""
        return show_path(self.path)

    @property
    def region(self) -> Box:
        """Return the box to read."""
        return grid.full_box(self.info.shape) if self.box is None else self.box

    @property
    def is_one_raw_chunk(self) -> bool:
        """Return whether it is exactly the bytes of one chunk, as almost all arrays are."""
        return self.box is None and self.info.is_one_raw_chunk

    def cells(self) -> Iterator[tuple[grid.Shape, Box]]:
        """Yield index and box of every chunk that it intersects."""
        if self.is_one_raw_chunk:
            return iter([((0,) * len(self.info.shape), grid.full_box(self.info.shape))])
        return grid.cells(self.region, self.info.chunks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the box to read."""
        return self.info.shape if self.box is None else grid.shape_of(self.box)


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayRead:
    """A job with the memory for its result.

    Attributes:
        job: the job.
        array: memory for the result.
        chunks: stored value and box of each chunk that the job intersects.
        complete: whether all chunks are stored.
    """

    job: Job
    array: np.ndarray[Any, Any]
    chunks: list[tuple[StoredValue, Box]]
    complete: bool

    def copy(self, chunk: Box) -> Copy:
        """Return the copy of a chunk's elements into the array."""
        part = grid.overlap(chunk, self.job.region)
        return Copy(grid.relative_to(part, chunk), self.array, grid.relative_to(part, self.job.region))


def by_chunk(group: list[ArrayRead]) -> dict[tuple[int, ...], tuple[Any, list[Copy]]]:
    """Return start of each chunk → its stored value and the copies of all reads."""
    wanted: dict[tuple[int, ...], tuple[Any, list[Copy]]] = {}
    for read in group:
        for value, chunk in read.chunks:
            start = tuple(side.start for side in chunk)
            wanted.setdefault(start, (value, []))[1].append(read.copy(chunk))
    return wanted


def show(job: Job) -> str:
    """Format dtype and shape for messages."""
    return f"{job.info.dtype.name}{list(job.shape)}"
