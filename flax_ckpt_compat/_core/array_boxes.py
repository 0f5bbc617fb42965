"""Compute boxes of arrays: the chunks they intersect, and their contiguous runs of elements."""

from __future__ import annotations

import math
from collections.abc import Iterator

Box = tuple[slice, ...]  # start and stop on every axis, without steps
Shape = tuple[int, ...]


def full_box(shape: Shape) -> Box:
    """Return the box of a whole array."""
    return tuple(slice(0, length) for length in shape)


def normalize_index(index: Box, shape: Shape) -> Box:
    """Return an index without steps as start and stop on every axis; jax omits them for whole axes."""
    return tuple(slice(*side.indices(length)[:2]) for side, length in zip(index, shape, strict=True))


def shape_of(box: Box) -> Shape:
    """Return the shape of a box."""
    return tuple(side.stop - side.start for side in box)


def overlap(one: Box, other: Box) -> Box:
    """Return the intersection of two boxes, which must not be empty."""
    return tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def overlaps(one: Box, other: Box) -> bool:
    """Return whether two boxes intersect."""
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True))


def relative_to(box: Box, outer: Box) -> Box:
    """Return a box relative to the start of another one."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def cells(box: Box, chunks: Shape) -> Iterator[tuple[Shape, Box]]:
    """Yield index and box of every chunk that a box intersects; chunks at the edge reach beyond the array."""
    if not box:
        yield (), ()
    elif 0 not in shape_of(box):
        # Not itertools.product, which materializes every axis: a hostile grid has 2**60 chunks.
        for at in range(box[0].start // chunks[0], -(-box[0].stop // chunks[0])):
            side = slice(at * chunks[0], (at + 1) * chunks[0])
            for index, sides in cells(box[1:], chunks[1:]):
                yield (at, *index), (side, *sides)


def bands(box: Box, shape: Shape, limit: int) -> Iterator[Box]:
    """Split the rows that a box intersects into boxes of at most ``limit`` elements, contiguous in a C-order array."""
    side = _grown((1,) * len(shape), shape, limit)
    # Cut to the box on the first axis on which bands are longer than 1, they stay contiguous; behind it they are whole.
    axis = next((axis for axis, length in enumerate(shape_of(box)) if min(length, side[axis]) > 1), len(shape))
    rows = (*box[: axis + 1], *full_box(shape)[axis + 1 :])
    for _, cell in cells(rows, side):
        yield overlap(cell, rows)


def readable_boxes(shape: Shape, chunks: Shape, limit: int, *, splits_chunks: bool) -> Iterator[Box]:
    """Yield boxes of at most ``limit`` elements that cover an array and share no chunk; longer chunks stay whole.

    With ``splits_chunks``, where parts of a chunk can be read without the rest of it, longer chunks are split too."""
    side = _grown(chunks, shape, limit)
    inside = tuple(map(min, side, shape))  # a chunk at the end may be longer than the array
    if splits_chunks and math.prod(inside) > limit:
        side = _grown((1,) * len(shape), inside, limit)
    for _, cell in cells(full_box(shape), side):
        yield overlap(cell, full_box(shape))


def _grown(unit: Shape, shape: Shape, limit: int) -> Shape:
    """Return the sides of a box of whole units, grown from the last axis on, of at most ``limit`` elements."""
    side = list(unit)
    for axis in reversed(range(len(side))):
        side[axis] *= max(1, min(-(-shape[axis] // side[axis]), limit // math.prod(side)))
        if side[axis] < shape[axis]:
            break
    return tuple(side)


def offset(shape: Shape, box: Box) -> int:
    """Return the offset of a box in a C-order array, in elements."""
    return sum(side.start * step for side, step in zip(box, strides(shape), strict=True))


def strides(shape: Shape) -> list[int]:
    """Return the elements between two indices that are neighbours on an axis, in a C-order array."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
