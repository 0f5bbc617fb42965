"""Boxes of arrays: the chunks that they intersect."""

from __future__ import annotations

from flax_ckpt_compat._core import array_boxes


def test_an_empty_box_intersects_no_chunk() -> None:
    """Wherever it lies in one, and however long it is on other axes."""
    for start in (0, 4, 5):
        assert list(array_boxes.cells((slice(start, start),), (4,))) == []
        assert list(array_boxes.cells((slice(0, 8), slice(start, start)), (4, 4))) == []
    assert [cell for cell, _ in array_boxes.cells((slice(3, 5),), (4,))] == [(0,), (1,)]
