"""Find the chunks that hold a box of an array, once for all leaves that are stored alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core.array_boxes import Box, Shape

from .zarr import ArrayInfo

# Of more chunks, as a hostile grid of 2**60 has them, each is found when it is needed.
_MAX_KNOWN = 512
_MAX_BOXES = 64  # that are kept: a process has one for each of its devices


class ChunkPart(NamedTuple):
    """The part of a box that one chunk holds."""

    start: Shape  # start of the chunk in the array
    key: str  # key of the chunk, below the array's prefix
    source: Box  # box in the chunk
    target: Box  # box in the result


class BoxLayout:
    """The chunks that a box of an array, or all of it, intersects."""

    def __init__(self, info: ArrayInfo, box: Box | None = None) -> None:
        self.info, self.box = info, box  # box: None for the whole array
        self.region = array_boxes.full_box(info.shape) if box is None else box
        self.shape = array_boxes.shape_of(self.region)  # like the next, of the result
        self.nbytes = math.prod(self.shape) * info.dtype.itemsize
        # Whether the result is exactly one chunk, as almost all arrays and shards are.
        self.is_chunk = info.cell_of(self.region) is not None
        known = tuple(itertools.islice(self._find(), _MAX_KNOWN + 1))
        self.known = known if len(known) <= _MAX_KNOWN else None  # None if they are too many
        self.only_key = known[0].key if self.is_chunk and known else None  # key of the only chunk, if the result is it

    @property
    def parts(self) -> Iterable[ChunkPart]:
        """Return the part of each chunk."""
        return self._find() if self.known is None else self.known

    def _find(self) -> Iterator[ChunkPart]:
        for cell, chunk in array_boxes.cells(self.region, self.info.chunks):
            inside = array_boxes.overlap(chunk, self.region)
            yield ChunkPart(
                tuple(side.start for side in chunk),
                self.info.chunk_key(cell),
                array_boxes.relative_to(inside, chunk),
                array_boxes.relative_to(inside, self.region),
            )


class LayoutCache:
    """The layouts of boxes of leaves that are stored alike; quick for boxes that many share, as those of a sharding."""

    def __init__(self, info: ArrayInfo) -> None:
        self.whole = BoxLayout(info)
        self._info, self._known = info, dict[int, tuple[Box, BoxLayout]]()

    def of(self, box: Box) -> BoxLayout:
        """Return the layout of a box of the leaf; the stored array may have one more axis."""
        known = self._known.get(id(box))
        if known is not None:
            return known[1]
        layout = BoxLayout(self._info, (*box, *array_boxes.full_box(self._info.shape[len(box) :])))
        if len(self._known) < _MAX_BOXES:
            self._known[id(box)] = box, layout  # holds the box, so that no other has its id
        return layout
