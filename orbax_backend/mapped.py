"""Map arrays over data files instead of reading them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.local import mapping

from .array_reads import Job
from .grid import Box
from .stored_values import ByteRange, StoredValue

Located = tuple[list[tuple[StoredValue, Box]], bool]


def arrays(path: str, jobs: Sequence[Job], located: Sequence[Located]) -> dict[int, Any]:
    """Map the arrays that are one raw chunk of a local file; return them by their index in the jobs.

    Args:
        path: directory of the checkpoint.
        jobs: arrays to read.
        located: chunks of each job, and whether all are stored.
    """
    if paths.is_url(path):
        return {}
    files: dict[str, list[tuple[int, ByteRange]]] = {}
    for index, (job, (chunks, _)) in enumerate(zip(jobs, located, strict=True)):
        value = chunks[0][0] if chunks and job.is_one_raw_chunk else None
        if isinstance(value, ByteRange) and value.length >= mapping.MIN_BYTES:
            files.setdefault(value.file, []).append((index, value))
    found: dict[int, Any] = {}
    for file, wanted in files.items():
        views = _map(os.path.join(path, file), [value for _, value in wanted])
        for (index, _), view in zip(wanted, views, strict=False):
            if view is not None:
                found[index] = np.ndarray(jobs[index].shape, jobs[index].info.dtype, view)
    return found


def _map(file: str, extents: list[ByteRange]) -> list[np.ndarray[Any, Any] | None]:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []  # the read that follows reports the error
    try:
        return mapping.map_regions(fd, [(extent.offset, extent.length) for extent in extents])
    finally:
        os.close(fd)
