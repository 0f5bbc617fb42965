"""Compare two checkpoints of any formats, leaf by leaf, in bounded memory: `diff`, and what it reports."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal, SupportsFloat

import numpy as np

from flax_ckpt_compat._core import arguments, backend
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind, read_all
from flax_ckpt_compat._core.errors import ArgumentError, SettingError
from flax_ckpt_compat._core.location import Location, as_text
from flax_ckpt_compat._core.text_formatting import Row, count_of_leaves, fold_with_members, printable
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import KeyData, Path, show_path
from flax_ckpt_compat._discovery import locating, opening, saved_steps
from flax_ckpt_compat._discovery.orbax_directory import Layout
from flax_ckpt_compat._view import metadata
from flax_ckpt_compat._view.array_values import Values
from flax_ckpt_compat._view.report import Line, Report, _Shown, json_number

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
        return Report(_lines(self), functools.partial(_to_json, self), found=not self.same)


def _lines(found: Diff) -> Iterator[Line]:
    """Yield the checkpoints, a line for each difference, or for those of numbered layers, and the counts."""
    for name, path, format in zip("ab", (found.a, found.b), found.formats, strict=True):
        yield Line(printable(f"{name}: {path} ({format})", one_line=True), hang=2)
    by_path = {one.path: one for one in found.differences}
    types_of = {one.path: " → ".join(dict.fromkeys(filter(None, (one.a, one.b)))) for one in found.differences}
    rows = [Row((one.path,), (one.kind, types_of[one.path])) for one in found.differences]
    folded = fold_with_members(rows) if len(rows) > _FOLD_FROM else [(row, [row]) for row in rows]
    for row, members in folded[:_MAX_LINES]:
        kind, types = row.detail
        numbers = _numbers([by_path[member.names[0]].values for member in members])
        text, mark = ": ".join(filter(None, (types, numbers))), _MARKS.get(kind, "~")
        yield Line(printable(f"{mark} {row.names[0]}   {text}{row.note}", one_line=True), _COLORS[mark], hang=4)
    if left := sum(row.count for row, _ in folded[_MAX_LINES:]):
        yield Line(f"… and {left} more leaves: see .differences, or --json", hang=4)
    words = [f"{count_of_leaves(found.identical)} identical"]
    words += [f"{found.tolerated} within the tolerances"] if found.tolerated else []
    for kind, count in Counter(one.kind for one in found.differences).items():
        words.append(f"{count} {kind if kind.startswith('only') else f'of other {kind}'}")
    yield Line(", ".join(words) + ".")


def _numbers(values: Sequence[Values | None]) -> str:
    """Return how values differ: the elements of all, and the largest differences of any."""
    there = [one for one in values if one is not None]
    other, size, nan = (sum(getattr(one, name) for one in there) for name in ("other_values", "size", "only_one_nan"))
    if not other:
        return "the same values, of other bits (-0.0, NaN)" if any(one.other_bits for one in there) else ""
    if size == len(there) == 1 and not nan:  # a scalar, whose values are shown
        return ""
    words = [f"{other} of {size} elements"]
    for name in ("abs", "rel"):
        if known := [most for one in there if (most := getattr(one, f"max_{name}")) is not None]:
            words.append(f"max {name} {max(known):.3g}")
    return ", ".join([*words, f"{nan} NaN in one only"] if nan else words)


def _to_json(found: Diff) -> dict[str, Any]:
    """Return a `Diff` as what JSON holds."""
    differences = [dataclasses.asdict(one) for one in found.differences]
    for one in differences:
        one["values"] = one["values"] and {name: json_number(value) for name, value in one["values"].items()}
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
    return run(a, b, step, prefix, item, rtol, atol, metadata.uncounted)


def run(a: Any, b: Any, step: Any, prefix: str, item: str | None, rtol: Any, atol: Any, begin: metadata.Begin) -> Diff:
    """Compare as `diff`; ``begin`` is that of `metadata`."""
    name = arguments.item_name(item)
    first, second = (saved_steps.checkpoint_dir(as_text(path), as_text(prefix, "prefix")) for path in (a, b))
    tolerance = None if rtol is None and atol is None else (_tolerance("rtol", rtol), _tolerance("atol", atol))
    metadata.wait_for_pending_saves(first)
    metadata.wait_for_pending_saves(second)

    def compare(one: Location, other: Location) -> Diff:
        with locating.unchanged(one), locating.unchanged(other), ExitStack() as files:
            both = [files.enter_context(closing(_opened(each, name))) for each in (one, other)]
            if name is not None and all(opened.contents.layout is not Layout.ITEMS for opened in both):
                raise ArgumentError(f"{one} and {other} are trees without items; leave item={name!r} out")
            return Comparison(metadata.leaves_of(both[0]), metadata.leaves_of(both[1]), tolerance).result(begin)

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
    """The comparison of two open checkpoints; ``tolerance`` is rtol and atol, or None to compare bits."""

    def __init__(self, a: metadata.StoredLeaves, b: metadata.StoredLeaves, tolerance: tuple[float, float] | None):
        self._a, self._b, self._tolerance = a, b, tolerance
        self._found: dict[Path, LeafDifference] = {}
        self._tolerated = set[Path]()
        self._count: metadata.Count

    def result(self, begin: metadata.Begin) -> Diff:
        """Compare; ``begin`` is that of `metadata`."""
        a, b = self._a, self._b
        here: dict[Path, LeafHandle | str] = {**a.leaves, **a.empty}
        there: dict[Path, LeafHandle | str] = {**b.leaves, **b.empty}
        for path in dict.fromkeys([*here, *there]):
            self._compare_types(path, here.get(path), there.get(path))
        common = [path for path in a.leaves if path in b.leaves]
        pairs = [(path, a.leaves[path], b.leaves[path]) for path in common if path not in self._found]
        self._count = begin(lambda: sum(handle.nbytes for _, handle, _ in pairs))
        left = iter(pairs)  # by place: rules may give one leaf to several
        batches = [[next(left) for _ in batch] for batch in backend.batches([one for _, one, _ in pairs], _PART)]
        in_parallel(self._compare_batch, batches, _AT_ONCE)
        found = tuple(self._found[path] for path in dict.fromkeys([*here, *there]) if path in self._found)
        same = sum(path not in self._found for path in common) - len(self._tolerated)
        return Diff(a.path, b.path, (a.format, b.format), same, len(self._tolerated), found)

    def _compare_types(self, path: Path, a: LeafHandle | str | None, b: LeafHandle | str | None) -> None:
        """Note a leaf or empty node that is only in one checkpoint, or cannot be compared by its values."""
        if a is None or b is None:
            kind: Kind = "only in b" if a is None else "only in a"
        elif isinstance(a, LeafHandle) and isinstance(b, LeafHandle):
            if a.shape == b.shape:
                return
            kind = "shape"
        else:
            # The formats do not keep alike what an empty node was.
            same_format = bool(self._a.format) and self._a.format == self._b.format
            if isinstance(a, str) and isinstance(b, str) and (a == b or not same_format):
                return
            kind = "type"
        self._note(path, kind, metadata.describe(a), metadata.describe(b))

    def _note(self, path: Path, kind: Kind, a: str, b: str, values: Values | None = None) -> None:
        self._found[path] = LeafDifference(show_path(path), kind, a, b, values)

    def _compare_batch(self, batch: Sequence[_Pair]) -> None:
        if len(batch) == 1:
            self._compare(batch[0], _parts(*batch[0][1:]))
            return
        ours, theirs = read_all([a for _, a, _ in batch]), read_all([b for _, _, b in batch])
        for pair, one, other in zip(batch, ours, theirs, strict=True):
            self._compare(pair, [(one, other)])

    def _compare(self, pair: _Pair, values: Iterable[tuple[Any, Any]]) -> None:
        """Compare two leaves; ``values`` are those of both, or of their slices."""
        path, a, b = pair
        found, is_other = Values(*(self._tolerance or ())), False
        shown = metadata.describe(a), metadata.describe(b)
        for one, other in values:
            if isinstance(one, str | bytes | KeyData) or isinstance(other, str | bytes | KeyData):
                is_other |= not _same(one, other)
            else:
                found.add(np.asarray(one), np.asarray(other))
            if not a.shape:
                shown = _with_value(shown[0], one), _with_value(shown[1], other)
            self._count(getattr(one, "nbytes", a.nbytes))
        numbers = found if found.other_bits else None
        if not _same_type(a, b):
            self._note(path, "type", *shown, numbers)
        elif is_other or (found.other_bits if self._tolerance is None else found.outside):
            self._note(path, "values", *shown, numbers)
        elif found.other_bits:
            self._tolerated.add(path)


def _parts(a: LeafHandle, b: LeafHandle) -> Iterator[tuple[Any, Any]]:
    """Yield the values of two leaves, or those of slices of two arrays."""
    if a.kind is b.kind is LeafKind.ARRAY and a.nbytes:
        # Chunks that decode only as a whole make fewer boxes.
        boxes = min((list(one.reader.boxes(one, _PART)) for one in (a, b)), key=len)
        yield from ((a.reader.read([ArraySlice(a, box)])[0], b.reader.read([ArraySlice(b, box)])[0]) for box in boxes)
    else:
        yield a.read(), b.read()


def _same(one: Any, other: Any) -> bool:
    """Return whether texts, bytes, or PRNG keys and their data are the same: no key is near another one."""
    if not (isinstance(one, KeyData) or isinstance(other, KeyData)):
        return type(one) is type(other) and bool(one == other)
    (impl, data), (impl_of_other, others) = (
        (key.impl, key.data) if isinstance(key, KeyData) else (None, key) for key in (one, other)
    )
    return (None in (impl, impl_of_other) or impl == impl_of_other) and np.array_equal(data, others)


def _same_type(a: LeafHandle, b: LeafHandle) -> bool:
    """Return whether kinds and dtypes are equal, as far as the formats record them."""
    kinds = ({one.kind} | one.possible_kinds for one in (a, b))
    return bool(set.intersection(*kinds)) and (a.dtype is None or b.dtype is None or a.dtype == b.dtype)


def _with_value(described: str, value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return f"{described} {text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + '…'}"
