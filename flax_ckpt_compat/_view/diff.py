"""Compare two checkpoints of any formats, leaf by leaf, in bounded memory: `diff`, and what it reports."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal, SupportsFloat

import numpy as np

from flax_ckpt_compat._core import arguments, backend
from flax_ckpt_compat._core.array_boxes import Box
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind, read_all
from flax_ckpt_compat._core.errors import ArgumentError, SettingError
from flax_ckpt_compat._core.location import Location, as_text
from flax_ckpt_compat._core.text_formatting import Row, count_of_leaves, fold_with_members, printable
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import KeyData, Path, show_path
from flax_ckpt_compat._discovery import locating, opening, saved_steps
from flax_ckpt_compat._discovery.orbax_directory import Layout
from flax_ckpt_compat._view.array_values import Values
from flax_ckpt_compat._view.metadata import (
    Begin,
    Count,
    StoredLeaves,
    describe,
    leaves_of,
    uncounted,
    wait_for_pending_saves,
)
from flax_ckpt_compat._view.report import Line, Report, _Shown

Kind = Literal["only in a", "only in b", "type", "shape", "values"]
_MARKS = {"only in a": "-", "only in b": "+"}
_COLORS = {"-": "red", "+": "green", "~": "yellow"}
_FOLD_FROM, _MAX_LINES = 12, 60


@dataclasses.dataclass(frozen=True, slots=True)
class LeafDifference:
    """A leaf that differs.

    Attributes:
        path: its key path, joined with ``/``.
        kind: ``only in a``, ``only in b``, ``shape``, ``type`` (another dtype or kind), or ``values``.
        a: what the first checkpoint has: ``float32[3,4]``, ``int 7``, ``str 'adam'``; empty if it has no such leaf.
        b: likewise.
        values: how the values differ; None if the shapes differ or the leaves are not numbers.
    """

    path: str
    kind: Kind
    a: str
    b: str
    values: Values | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Diff(_Shown):
    """Result of `diff`; prints as text.

    Attributes:
        a, b: the two checkpoints, as absolute paths or URLs.
        formats: their formats, ``msgpack`` or ``orbax``.
        identical: number of leaves with equal types, shapes and bits.
        tolerated: number of leaves with equal types and shapes, and values within the tolerances.
        differences: all others.
    """

    a: str
    b: str
    formats: tuple[str, str]
    identical: int
    tolerated: int
    differences: tuple[LeafDifference, ...]

    @property
    def same(self) -> bool:
        """Return whether nothing differs."""
        return not self.differences

    def _report(self) -> Report:
        return report(self)


def report(found: Diff) -> Report:
    """Return what is shown of a `Diff`."""
    return Report(_lines(found), functools.partial(to_json, found), found=not found.same)


def _lines(found: Diff) -> Iterator[Line]:
    for name, path, format in zip("ab", (found.a, found.b), found.formats, strict=True):
        yield Line(printable(f"{name}: {path} ({format})", one_line=True), hang=2)
    yield from lines_of(found.differences)
    yield Line(_summary(found))


def lines_of(differences: Sequence[LeafDifference]) -> Iterator[Line]:
    """Yield a line for each difference, or for those of numbered layers; the first character is -, + or ~."""
    by_path = {one.path: one for one in differences}
    rows = [Row((one.path,), (one.kind, _types(one))) for one in differences]
    folded = fold_with_members(rows) if len(rows) > _FOLD_FROM else [(row, [row]) for row in rows]
    for row, members in folded[:_MAX_LINES]:
        kind, types = row.detail
        numbers = numbers_of([by_path[member.names[0]].values for member in members])
        text, mark = ": ".join(filter(None, (types, numbers))), _MARKS.get(kind, "~")
        yield Line(printable(f"{mark} {row.names[0]}   {text}{row.note}", one_line=True), _COLORS[mark], hang=4)
    if left := sum(row.count for row, _ in folded[_MAX_LINES:]):
        yield Line(f"… and {left} more leaves: see .differences, or --json", hang=4)


def _types(one: LeafDifference) -> str:
    return one.a or one.b if one.kind.startswith("only") else one.a if one.a == one.b else f"{one.a} → {one.b}"


def numbers_of(values: Sequence[Values | None]) -> str:
    """Return how values differ: the elements of all, and the largest differences of any."""
    there = [one for one in values if one is not None]
    if not there:
        return ""
    other, size, nan = (sum(getattr(one, name) for one in there) for name in ("other_values", "size", "only_one_nan"))
    if not other:
        return "the same values, of other bits (-0.0, NaN)" if any(one.other_bits for one in there) else ""
    absolute = [one.max_abs for one in there if one.max_abs is not None]
    relative = [one.max_rel for one in there if one.max_rel is not None]
    if size == len(there) and not nan and len(there) == 1:  # a scalar, whose values are shown
        return ""
    words = [f"{other} of {size} elements"]
    words += [f"max {name} {max(found):.3g}" for name, found in (("abs", absolute), ("rel", relative)) if found]
    return ", ".join([*words, f"{nan} NaN in one only"] if nan else words)


def _summary(found: Diff) -> str:
    """Return the last line: how many leaves are equal, and how many differ in what."""
    kinds = Counter(one.kind for one in found.differences)
    words = [f"{count_of_leaves(found.identical)} identical"]
    words += [f"{found.tolerated} within the tolerances"] if found.tolerated else []
    words += [f"{count} {kind if kind.startswith('only') else f'of other {kind}'}" for kind, count in kinds.items()]
    return ", ".join(words) + "."


def to_json(found: Diff) -> dict[str, Any]:
    """Return a `Diff` as what JSON holds; infinite numbers are texts."""
    differences = [dataclasses.asdict(one) for one in found.differences]
    for one in differences:
        for name, value in (one["values"] or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                one["values"][name] = str(value)
    return {**dataclasses.asdict(found), "same": found.same, "differences": differences}


_Pair = tuple[Path, LeafHandle, LeafHandle]
_AT_ONCE, _PART = 2, 8 << 20  # so many parts of both, in bytes
_MAX_TEXT = 40


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    item: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Diff:
    """Compare the leaves of two checkpoints: which are there, their dtypes, shapes and values.

    Leaves are paired by key path, across formats; a list's items are 0, 1, …. Memory stays bounded: large arrays are
    compared in slices, along their chunks.

    Args:
        a: one checkpoint, or a directory of them.
        b: the other one.
        step: the step in the directories; None takes the latest complete one.
        prefix: literal text before the step in the checkpoints' names.
        item: the item of a checkpoint of several to compare, as one tree; one of a single tree stays as it is.
        rtol: values may differ by ``atol + rtol * |b|``. None for both compares bits: then -0.0 differs from 0.0, and
            NaN from a NaN with other bits. With a tolerance, 0 included, they do not.
        atol: see ``rtol``.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        IncompleteCheckpointError, UnrecognizedFormatError, CorruptCheckpointError: one cannot be opened or read.
        StorageError: the file system or store refused.
        ArgumentError: there is no such item.
        SettingError: a tolerance is not a non-negative number.

    Example:
        >>> a, b = save("a", {"w": np.ones(2)}), save("b", {"w": np.array([1, 1.5])})
        >>> [(leaf.path, leaf.values.max_abs) for leaf in diff(a, b).differences]
        [('w', 0.5)]
    """
    return run(a, b, step, prefix, item, rtol, atol)


def run(
    path_a: str | os.PathLike[str],
    path_b: str | os.PathLike[str],
    step: SupportsFloat | str | None,
    prefix: str,
    item: str | None,
    rtol: float | None,
    atol: float | None,
    begin: Begin = uncounted,
) -> Diff:
    """Compare as `diff`; ``begin`` is that of `metadata`."""
    name = arguments.item_name(item)
    first, second = (saved_steps.checkpoint_dir(as_text(path), as_text(prefix, "prefix")) for path in (path_a, path_b))
    tolerance = None if rtol is None and atol is None else (_tolerance("rtol", rtol), _tolerance("atol", atol))
    wait_for_pending_saves(first)
    wait_for_pending_saves(second)

    def compare(one: Location, other: Location) -> Diff:
        with locating.unchanged(one), locating.unchanged(other), ExitStack() as files:
            both = [files.enter_context(closing(_opened(each, name))) for each in (one, other)]
            if name is not None and all(opened.contents.layout is not Layout.ITEMS for opened in both):
                raise ArgumentError(f"{one} and {other} are trees without items; leave item={name!r} out")
            a, b = map(leaves_of, both)
            return Comparison(a, b, tolerance).result(begin)

    def with_first(one: Location) -> Diff:
        return locating.read_found(second, step, lambda other: compare(one, other), doing="compare")

    return locating.read_found(first, step, with_first, doing="compare")


def _opened(location: Location, item: str | None) -> opening.Opened:
    opened = opening.Opened(location, verify=True)
    if item is None or "" in opened.items:
        return opened
    opened.close()
    return opening.Opened(location, verify=True, item=item)


def _tolerance(name: str, value: Any) -> float:
    try:
        found = 0.0 if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not found >= 0:
        raise SettingError(f"{name} takes a non-negative number, found {value!r:.100}")
    return found


class Comparison:
    """The comparison of two open checkpoints."""

    def __init__(self, a: StoredLeaves, b: StoredLeaves, tolerance: tuple[float, float] | None):
        self._a, self._b, self._tolerance = a, b, tolerance
        self._found: dict[Path, LeafDifference] = {}
        self._tolerated = 0
        self._count: Count

    def result(self, begin: Begin) -> Diff:
        """Compare; ``begin`` is that of `metadata`."""
        a, b = self._a, self._b
        self._compare_structure()
        pairs = [(path, handle, b.leaves[path]) for path, handle in a.leaves.items() if path in b.leaves]
        self._count = begin(lambda: sum(handle.nbytes for _, handle, _ in pairs))
        in_parallel(self._compare_batch, list(_batches(pairs)), _AT_ONCE)
        order = {path: number for number, path in enumerate([*a.leaves, *a.empty, *b.leaves, *b.empty])}
        found = tuple(self._found[path] for path in sorted(self._found, key=order.__getitem__))
        same = sum(path not in self._found for path, _, _ in pairs) - self._tolerated
        return Diff(a.path, b.path, (a.format, b.format), same, self._tolerated, found)

    def _compare_structure(self) -> None:
        a, b = self._a, self._b
        here: dict[Path, Any] = {**a.leaves, **a.empty}
        there: dict[Path, Any] = {**b.leaves, **b.empty}
        # The formats do not keep alike what an empty node was.
        same_format = bool(a.format) and a.format == b.format
        for path, node in here.items():
            other = there.get(path)
            if other is None:
                self._note(path, "only in a", describe(node), "")
            elif (path in a.empty) != (path in b.empty) or (path in a.empty and same_format and node != other):
                self._note(path, "type", describe(node), describe(other))
        for path, node in there.items():
            if path not in here:
                self._note(path, "only in b", "", describe(node))

    def _note(self, path: Path, kind: Kind, a: str, b: str, values: Values | None = None) -> None:
        self._found[path] = LeafDifference(show_path(path), kind, a, b, values)

    def _compare_batch(self, batch: Sequence[_Pair]) -> None:
        if len(batch) == 1:
            self._compare_large(*batch[0])
            return
        firsts, seconds = read_all([a for _, a, _ in batch]), read_all([b for _, _, b in batch])
        for (path, a, b), first, second in zip(batch, firsts, seconds, strict=True):
            self._compare(path, a, b, [(first, second)])
            self._count(a.nbytes)

    def _compare_large(self, path: Path, a: LeafHandle, b: LeafHandle) -> None:
        if a.kind is not LeafKind.ARRAY or b.kind is not LeafKind.ARRAY or a.shape != b.shape or not a.nbytes:
            self._compare(path, a, b, ((read_all([a])[0], read_all([b])[0]) for _ in range(a.shape == b.shape)))
            self._count(a.nbytes)
            return
        # Chunks that decode only as a whole make fewer boxes.
        boxes = min((list(one.reader.boxes(one, _PART)) for one in (a, b)), key=len)
        self._compare(path, a, b, (self._read_both(a, b, box) for box in boxes))

    def _read_both(self, a: LeafHandle, b: LeafHandle, box: Box) -> tuple[Any, Any]:
        first, second = (read_all([ArraySlice(one, box)])[0] for one in (a, b))
        self._count(first.nbytes)
        return first, second

    def _compare(self, path: Path, a: LeafHandle, b: LeafHandle, values: Any) -> None:
        """Compare a leaf; ``values`` are pairs of its values, or of slices."""
        if a.shape != b.shape:
            self._note(path, "shape", describe(a), describe(b))
            return
        found = Values(*(self._tolerance or (0.0, 0.0)))
        shown, is_other = (describe(a), describe(b)), False
        for one, other in values:
            impls = {value.impl for value in (one, other) if isinstance(value, KeyData)}
            one, other = (value.data if isinstance(value, KeyData) else value for value in (one, other))
            if isinstance(one, str | bytes) or isinstance(other, str | bytes):
                is_other |= type(one) is not type(other) or one != other
            else:
                found.add(np.asarray(one), np.asarray(other))
            # Of keys, no number is near another one.
            is_other |= len(impls) > 1 or (bool(impls) and not np.array_equal(one, other))
            if not a.shape:
                shown = _with_value(shown[0], one), _with_value(shown[1], other)
        numbers = found if found.other_bits else None
        if not _same_type(a, b):
            self._note(path, "type", *shown, numbers)
        elif is_other or (found.other_bits if self._tolerance is None else found.outside):
            self._note(path, "values", *shown, numbers)
        elif found.other_bits:
            self._tolerated += 1


def _batches(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Split pairs of leaves into batches to be read at once; a large one is a batch of its own."""
    left = iter(pairs)
    for batch in backend.batches([max(a, b, key=lambda one: one.nbytes) for _, a, b in pairs], _PART):
        yield [next(left) for _ in batch]


def _same_type(a: LeafHandle, b: LeafHandle) -> bool:
    """Return whether kinds and dtypes are equal, as far as the formats record them."""
    kinds = ({one.kind} | one.possible_kinds for one in (a, b))
    return bool(set.intersection(*kinds)) and (a.dtype is None or b.dtype is None or a.dtype == b.dtype)


def _with_value(described: str, value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return f"{described} {text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + '…'}"
