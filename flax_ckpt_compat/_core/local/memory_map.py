"""Map local files: arrays over a file's bytes, copied on write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

# Bytes below which a copy costs no more than the page faults.
MIN_BYTES = 32 * 2**10

Region = tuple[int, int]


def map_regions(fd: int, regions: Sequence[Region]) -> list[np.ndarray[Any, Any] | None]:
    """Map regions (offset and length) of a file as writable uint8 arrays over one mapping.

    Return None for regions to read instead: empty ones, those beyond the end of the file or overlapping another region,
    and all if the system cannot map the file. Writing to an array changes neither the file nor another region.
    Truncating the file while an array is alive kills the process that touches it. The descriptor may be closed
    afterwards; each mapping has one of its own."""
    size = os.fstat(fd).st_size
    views: list[np.ndarray[Any, Any] | None] = [None] * len(regions)
    chosen, first, last = [], size, 0
    for number in sorted(range(len(regions)), key=regions.__getitem__):
        offset, length = regions[number]
        if length and last <= offset and offset + length <= size:
            chosen.append(number)
            first, last = min(first, offset), offset + length
    try:
        with os.fdopen(fd, "rb", closefd=False) as file:
            whole = np.asarray(np.memmap(file, np.uint8, "c", first, (last - first,))) if chosen else None
    except (OSError, ValueError):
        return views
    for number in chosen:
        offset, length = regions[number]
        assert whole is not None
        views[number] = whole[offset - first : offset - first + length]
    return views
