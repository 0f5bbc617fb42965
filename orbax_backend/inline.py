"""Small arrays, whose bytes lie in the index itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax_ckpt_compat._core import memory

from .jobs import Job
from .names import key_prefix
from .places import Index
from .zarr import ArrayInfo

# Small arrays share memory, which goes when the last of them does.
_SMALL = 4096
_TOGETHER = 64


def take_inline(index: Index, jobs: Sequence[Job], arrays: list[Any]) -> list[int]:
    """Copies small whole arrays whose bytes the index has.

    Args:
        index: of the checkpoint.
        jobs: what is wanted.
        arrays: where the arrays go, each at the number of its job.

    Returns:
        The numbers of all other jobs.
    """
    rest: list[int] = []
    found: list[tuple[int, ArrayInfo, bytes]] = []
    firsts: dict[int, tuple[str, int]] = {}
    for number, job in enumerate(jobs):
        info = job.info
        first, nbytes = firsts.get(id(info)) or firsts.setdefault(id(info), _first_chunk(info))
        is_candidate = 0 <= nbytes <= _SMALL and job.box is None
        value = index.find(key_prefix(job.name) + first) if is_candidate else None
        if type(value) is bytes and len(value) == nbytes:
            found.append((number, info, value))
        else:
            rest.append(number)
    for start in range(0, len(found), _TOGETHER):
        block = found[start : start + _TOGETHER]
        packed = memory.packed([(info.shape, info.dtype, value) for _, info, value in block])
        for (number, _, _), array in zip(block, packed, strict=True):
            arrays[number] = array
    return rest


def _first_chunk(info: ArrayInfo) -> tuple[str, int]:
    """The key of the chunk that is the whole array, and its bytes; -1 bytes where there is none."""
    return (info.chunk_key((0,) * len(info.shape)), info.nbytes) if info.is_one_raw_chunk else ("", -1)
