"""Lay out a treemap: rectangles, as square as possible, with areas in proportion to sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Box = tuple[float, float, float, float]  # left, top, width, height


def squarified(sizes: Sequence[float], box: Box) -> Iterator[Box]:
    """Yield a box for each size, positive and best in descending order; together they fill ``box``."""
    left, top, width, height = box
    area = width * height / sum(sizes) if sizes else 0.0
    areas = [size * area for size in sizes]
    start = 0
    while start < len(areas):
        side = min(width, height)
        end, total = start + 1, areas[start]
        # Another one joins the row as long as that makes the worst of them more like a square.
        while end < len(areas) and _worst(areas[start], areas[end], total + areas[end], side) <= _worst(
            areas[start], areas[end - 1], total, side
        ):
            total += areas[end]
            end += 1
        thickness = total / side if side else 0.0
        at = 0.0
        for one in areas[start:end]:
            length = one / thickness if thickness else 0.0
            across = width < height
            yield (left + at, top, length, thickness) if across else (left, top + at, thickness, length)
            at += length
        if width < height:
            top, height = top + thickness, max(0.0, height - thickness)
        else:
            left, width = left + thickness, max(0.0, width - thickness)
        start = end


def _worst(largest: float, smallest: float, total: float, side: float) -> float:
    """Return the largest ratio of the sides of a row's boxes."""
    if not smallest or not side:
        return float("inf")
    return max(side * side * largest / (total * total), total * total / (side * side * smallest))
