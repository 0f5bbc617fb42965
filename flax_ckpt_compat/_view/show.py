"""Show what is in one checkpoint: its leaves with types, sizes and shardings, and statistics of their values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import closing
from typing import Any, SupportsFloat

import numpy as np

from flax_ckpt_compat._core import bounded_reads
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import MissingLeavesError
from flax_ckpt_compat._core.keyed_cache import Memo
from flax_ckpt_compat._core.location import Location, as_text
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Path, from_leaves
from flax_ckpt_compat._discovery import locating, opening, saved_steps
from flax_ckpt_compat._trees import depth
from flax_ckpt_compat._view.array_values import Stats, is_numeric
from flax_ckpt_compat._view.stored_leaves import Begin, StoredLeaves, describe, uncounted, wait_for_pending_saves

_AT_ONCE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class ShownLeaf:
    """One leaf, or an empty node."""

    path: Path
    type: str  # ``float32[3,4]``, ``key uint32[2]``, ``int``; of an empty node ``None``, ``{}`` or ``[]``
    kind: str = ""  # name of its `LeafKind`; empty for an empty node
    shape: tuple[int, ...] = ()  # of the array, or of the key data of a PRNG key
    dtype: str | None = None  # of the array, numpy scalar or key data; None for others
    nbytes: int = 0  # size in memory, in bytes; 0 if the format does not store it
    sharding: str | None = None  # saved sharding as Orbax's JSON text, or None
    stats: Stats | None = None  # of its values, if they were asked for and are numbers

    @property
    def dtype_or_kind(self) -> str:
        """Return what totals are counted by: the dtype, the kind of a Python value, or ``prng key``."""
        return self.kind if self.dtype is None or self.kind == LeafKind.PRNG_KEY.value else self.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """Leaves of a checkpoint."""

    path: str  # absolute path, or URL
    format: str  # ``msgpack`` or ``orbax``
    leaves: tuple[ShownLeaf, ...]  # the leaves that were asked for
    empty: tuple[ShownLeaf, ...]  # None and empty containers, likewise
    stored: int  # number of all leaves
    has_stats: bool  # statistics were asked for

    @property
    def nbytes(self) -> int:
        """Return the size of the leaves in memory, in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)


@depth.limited("shown")
def contents(
    path: str | os.PathLike[str],
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    item: str | None = None,
    pattern: str | None = None,
    stats: bool = False,
    begin: Begin = uncounted,
) -> Contents:
    """Return what is in a checkpoint. Arrays are read for statistics alone, in bounded memory.

    Only leaves are returned that the regular expression ``pattern`` matches, in whole names, anywhere in their key
    paths, or from the root if it begins with ``^``. ``begin`` is that of `stored_leaves`."""
    checkpoint_dir = saved_steps.checkpoint_dir(as_text(path), as_text(prefix, "prefix"))
    wait_for_pending_saves(checkpoint_dir)

    def read(found: Location) -> Contents:
        with locating.unchanged(found), closing(opening.Opened(found, verify=True, item=item)) as opened:
            return contents_of(opened, pattern=pattern, stats=stats, begin=begin)

    return locating.read_found(checkpoint_dir, step, read, doing="show")


def contents_of(
    opened: opening.Opened,
    *,
    pattern: str | None = None,
    stats: bool = False,
    begin: Begin = uncounted,
) -> Contents:
    """Return what is in an open checkpoint; the arguments are those of `contents`."""
    stored = StoredLeaves(opened)
    chosen, empty = _chosen(stored, pattern)
    values = _stats(chosen, begin) if stats else {}
    names: Memo[str] = Memo(str)
    leaves = tuple(_shown(path, handle, names, values.get(handle)) for path, handle in chosen.items())
    nodes = tuple(ShownLeaf(path, what) for path, what in empty.items())
    return Contents(stored.path, stored.format, leaves, nodes, len(stored.leaves), stats)


def _chosen(stored: StoredLeaves, pattern: str | None) -> tuple[dict[Path, LeafHandle], dict[Path, str]]:
    """Return the leaves and empty nodes that a pattern matches."""
    if pattern is None:
        return stored.leaves, stored.empty
    from flax_ckpt_compat.rules import _patterns, _rule  # which take a tenth of the start, and few calls filter

    with _rule.named("--filter"):
        compiled = [_patterns.whole_names(pattern)]
    matching = {path for path in (*stored.leaves, *stored.empty) if any(_patterns.matches(compiled, path))}
    if not matching:
        near = _patterns.near_names(pattern, from_leaves(stored.leaves))
        message = f"{stored.path}: no leaf matches {pattern!r}, which must match whole names of key paths; {near}"
        raise MissingLeavesError(message, path=stored.path, missing=(pattern,))
    leaves = {path: handle for path, handle in stored.leaves.items() if path in matching}
    return leaves, {path: what for path, what in stored.empty.items() if path in matching}


def _shown(path: Path, handle: LeafHandle, names: Memo[str], stats: Stats | None) -> ShownLeaf:
    dtype = None if handle.dtype is None else names[handle.dtype]
    return ShownLeaf(
        path, describe(handle), handle.kind.value, handle.shape, dtype, handle.nbytes, handle.sharding, stats
    )


def _stats(chosen: dict[Path, LeafHandle], begin: Begin) -> dict[LeafHandle, Stats]:
    """Read leaves, and return the statistics of those that are numbers."""
    by_reader: dict[Reader, list[LeafHandle]] = {}
    for handle in chosen.values():
        if handle.kind not in (LeafKind.STR, LeafKind.BYTES, LeafKind.PRNG_KEY):
            by_reader.setdefault(handle.reader, []).append(handle)
    found: dict[LeafHandle, Stats] = {}
    count = begin(lambda: sum(handle.nbytes for handles in by_reader.values() for handle in handles))

    def read(batch: Sequence[LeafHandle]) -> None:
        for handle, value in _values(batch):
            array = np.asarray(value)
            if is_numeric(array):
                found.setdefault(handle, Stats()).add(array)
            count(array.nbytes)

    in_parallel(read, [batch for handles in by_reader.values() for batch in bounded_reads.batches(handles)], _AT_ONCE)
    return found


def _values(batch: Sequence[LeafHandle]) -> Any:
    """Yield the leaves of a batch with their values, or the slices of one that is large."""
    reader = batch[0].reader
    if len(batch) > 1:
        yield from zip(batch, reader.read(batch), strict=True)
    else:
        for part in bounded_reads.pieces(batch[0]):
            yield batch[0], reader.read([part])[0]
