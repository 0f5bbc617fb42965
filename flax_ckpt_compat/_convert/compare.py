"""Compare a written checkpoint with its source, bit by bit, or with the checksums of what was read of it.

The checksums are computed while arrays are written, so that the source is not read again."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from flax_ckpt_compat._convert import item_copies, output_writers, stored_trees
from flax_ckpt_compat._convert.output_trees import Output, array_nbytes
from flax_ckpt_compat._core import array_boxes, checksums, memory
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.equality import same_bits
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.fold_names import one_line
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.thread_pools import Pool, Task, in_parallel
from flax_ckpt_compat._core.tree import Branch, KeyData, Path, StoredArray, show_path

Name = tuple[str, Path]  # item and key path
# Returns the number of bytes of a part, and whether they are equal.
_Check = Callable[[], tuple[int, bool]]
_NONE: Mapping[Name, int] = MappingProxyType({})
# Bytes; larger arrays are compared in parts, so many at once.
_PART = 8 << 20
_AT_ONCE = 3
_OTHER_VALUES = "has other values"
# Bytes; smaller arrays are cheap to read again.
_SUMMED_FROM = 256 << 10


class DifferentError(CheckpointError):
    """A result does not hold what its source holds."""


def compare(
    location: Location, to: str, output: Output, progress: Callable[[int], None], crcs: Mapping[Name, int] = _NONE
) -> None:
    """Raise DifferentError unless a checkpoint holds exactly these leaves.

    ``progress`` takes numbers of bytes of arrays that are compared in parts. Arrays of the source with a CRC-32 in
    ``crcs`` are not read again."""
    expected = output.leaves
    with output_writers.reading(location, to, output) as found:
        differences = {name: "is missing" for name in expected if name not in found}
        differences |= {name: "is new" for name in found if name not in expected}
        for item, copy in output.copies.items():
            if why := copy.difference(location / item):
                differences["", (item,)] = why
        for beside, file in output.files.items():
            copied = location / beside
            if not copied.isfile() or item_copies.is_other(file, copied):
                differences["", (beside,)] = "has other bytes"
        if output_writers.has_other_metadata(location, to, output):
            differences["", ("custom metadata",)] = "is other JSON"
        small = stored_trees.Leaves([leaf for leaf in found.values() if isinstance(leaf, LeafHandle)])
        parts: list[tuple[Name, _Check]] = []
        sums: dict[Name, list[_Sum]] = {}
        for name in expected.keys() & found.keys() if differences else found:
            leaf = small.leaf(found[name])
            if why := _difference(expected[name], leaf):
                differences[name] = why
            elif isinstance(leaf, StoredArray):
                if name in crcs and (boxes := _consecutive_boxes(leaf)):
                    sums[name] = [_Sum(leaf, box) for box in boxes]
                    parts += [(name, one.compute) for one in sums[name]]
                elif expected[name].handle is not None and expected[name].nbytes > _PART:
                    handle = expected[name].handle
                    boxes = handle.reader.boxes(handle, _PART)
                    parts += [(name, functools.partial(_compare_part, handle, leaf, box)) for box in boxes]
                elif not same_bits(np.asarray(expected[name]), np.asarray(leaf)):
                    differences[name] = _OTHER_VALUES

        def compare(part: tuple[Name, _Check]) -> None:
            name, check = part
            nbytes, same = check()
            progress(nbytes)
            if not same:
                differences[name] = _OTHER_VALUES

        in_parallel(compare, parts, _AT_ONCE)
        differences |= {name: _OTHER_VALUES for name, found_sums in sums.items() if _joined(found_sums) != crcs[name]}
    if differences:
        shown = one_line(f"{show_path(keys)} {why}" for (_, keys), why in differences.items())
        raise DifferentError(
            f"{location} does not hold what its source holds: {shown}; the source may have been replaced "
            "meanwhile: convert it again, to another place",
            path=location.path,
        )


def _difference(expected: Any, found: Any) -> str | None:
    """Return how two leaves differ, without the values of arrays; or None."""
    if isinstance(expected, StoredArray) and isinstance(found, StoredArray):
        if (expected.shape, expected.dtype) == (found.shape, found.dtype):
            return None
        return f"is {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}"
    if type(expected) is not type(found):
        return f"is of type {type(found).__name__}, expected {type(expected).__name__}"
    if isinstance(expected, KeyData):
        same = same_bits(KeyData(expected.impl, np.asarray(expected.data)), KeyData(found.impl, np.asarray(found.data)))
        return None if same else "is another key"
    if isinstance(expected, Branch):
        return None  # without children, both
    return None if same_bits(expected, found) else f"is {found!r}, expected {expected!r}"


def _compare_part(expected: LeafHandle, found: StoredArray, box: array_boxes.Box) -> tuple[int, bool]:
    one = expected.reader.read([ArraySlice(expected, box)])[0]
    return one.nbytes, same_bits(one, _part_of(found, box))


def _part_of(array: StoredArray, box: array_boxes.Box) -> Any:
    """Return a part of an array of the result, mapped if it can be: nobody else writes to it."""
    return array.handle.reader.read([ArraySlice(array.handle, box)], mapped=True)[0]


def _consecutive_boxes(array: StoredArray) -> list[array_boxes.Box]:
    """Return boxes whose bytes, one after another, are those of an array in C order; none if its chunks make others."""
    boxes = list(array.handle.reader.boxes(array.handle, _PART))
    sizes = [math.prod(array_boxes.shape_of(box)) for box in boxes]
    starts = [array_boxes.offset(array.shape, box) for box in boxes]
    return boxes if starts == list(itertools.accumulate(sizes, initial=0))[:-1] else []


@dataclasses.dataclass(slots=True)
class _Sum:
    """The CRC-32 of a part of an array of the result."""

    array: StoredArray
    box: array_boxes.Box
    crc: int = 0
    nbytes: int = 0

    def compute(self) -> tuple[int, bool]:
        data = memory.as_bytes(np.ascontiguousarray(_part_of(self.array, self.box)))
        self.crc, self.nbytes = checksums.crc32(data), len(data)
        return self.nbytes, True


def _joined(sums: Sequence[_Sum]) -> int:
    """Return the CRC-32 of all parts, one after another."""
    return functools.reduce(lambda crc, part: checksums.combine(crc, part.crc, part.nbytes), sums, 0)


@contextmanager
def checksums_of_reads(output: Output, progress: Callable[[int], None]) -> Iterator[dict[Name, int]]:
    """Yield the CRC-32s of the arrays that are read in a ``with`` block, computed on another thread, once it has ended.

    They are those of all bytes of an array in C order, by item and key path; small arrays have none. The size of each
    array that is read is reported to ``progress``."""
    crcs: dict[Name, int] = {}
    pool, pending = Pool(1), list[tuple[Name, Task]]()

    def finish() -> None:
        while pending:
            name, computed = pending.pop()
            crcs[name] = computed.result()

    def read_whole(name: Name, read: Callable[[], Any], nbytes: int) -> Any:
        finish()  # so that nothing holds the array before
        value = read()
        if type(value) is np.ndarray and value.nbytes >= _SUMMED_FROM and value.flags.c_contiguous and name not in crcs:
            pending.append((name, pool.submit(checksums.crc32, memory.as_bytes(value))))
        progress(nbytes)
        return value

    def read_part(read: Callable[[Any], Any], box: tuple[slice, ...]) -> Any:
        value = read(box)
        progress(value.nbytes)
        return value

    for name, leaf in output.leaves.items():
        array = leaf.data if isinstance(leaf, KeyData) else leaf
        if isinstance(array, StoredArray):
            array.read = functools.partial(read_whole, name, array.read, array_nbytes(leaf))
            if array.read_part is not None:
                array.read_part = functools.partial(read_part, array.read_part)
    try:
        yield crcs
    finally:
        finish()
