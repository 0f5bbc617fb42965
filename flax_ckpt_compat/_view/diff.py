"""Compare two checkpoints of any formats, leaf by leaf, in bounded memory: `diff`, and what it reports."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, SupportsFloat

import numpy as np

from flax_ckpt_compat._core import backend
from flax_ckpt_compat._core.backend import LeafHandle, read_all
from flax_ckpt_compat._core.errors import ArgumentError, SettingError
from flax_ckpt_compat._core.text_formatting import Row, counted, fold, printable
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import KeyData, Path, show_path
from flax_ckpt_compat._discovery.contents import Layout
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._restore.call_arguments import item_name
from flax_ckpt_compat._view import metadata
from flax_ckpt_compat._view.array_values import Values
from flax_ckpt_compat._view.report import Line, Report, _Shown, for_json

Kind = Literal["only in a", "only in b", "type", "shape", "values"]
_MARKS = {"only in a": "-", "only in b": "+"}
_COLORS = {"-": "red", "+": "green", "~": "yellow"}
_MAX_LINES = 60
_Pair = tuple[Path, LeafHandle, LeafHandle]
_Tolerance = tuple[float, float] | None  # rtol and atol, or None to compare bits
_AT_ONCE, _PART = 2, 8 << 20  # so many parts of both, in bytes
_MAX_TEXT = 40


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
        return Report(_lines(self), lambda: for_json(self), found=not self.same)


_Outcome = LeafDifference | Literal["identical", "tolerated"]


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
    name = item_name(item)
    tolerance = None if rtol is None and atol is None else (_tolerance("rtol", rtol), _tolerance("atol", atol))
    first, second = (metadata.dir_without_pending_saves(path, prefix) for path in (a, b))

    def compare_two(one: Opened, other: Opened) -> Diff:
        if name is not None and all(opened.contents.layout is not Layout.ITEMS for opened in (one, other)):
            raise ArgumentError(f"{one.path} and {other.path} are trees without items; leave item={name!r} out")
        return compare(metadata.leaves_of(one), metadata.leaves_of(other), tolerance, metadata.BAR.get())

    read = functools.partial(metadata.read_one, step=step, item=name, doing="compare", keeps_trees=True)
    return read(first, lambda one: read(second, functools.partial(compare_two, one)))


def _tolerance(name: str, value: Any) -> float:
    with suppress(TypeError, ValueError, OverflowError):
        if (found := 0.0 if value is None else float(value)) >= 0:
            return found
    raise SettingError(f"{name} takes a non-negative number, found {value!r:.100}")


def compare(a: metadata.StoredLeaves, b: metadata.StoredLeaves, tolerance: _Tolerance, begin: metadata.Begin) -> Diff:
    """Compare the leaves of two open checkpoints; ``begin`` is that of `metadata`."""
    here: dict[Path, LeafHandle | str] = {**a.leaves, **a.empty}
    there: dict[Path, LeafHandle | str] = {**b.leaves, **b.empty}
    found: dict[Path, _Outcome | None] = {}
    pairs: list[_Pair] = []
    # The formats do not keep alike what an empty node was.
    same_format = bool(a.format) and a.format == b.format
    for path in dict.fromkeys([*here, *there]):
        one, other = here.get(path), there.get(path)
        kind = _structure(one, other, same_format=same_format)
        found[path] = None
        if kind is not None:
            found[path] = LeafDifference(show_path(path), kind, metadata.describe(one), metadata.describe(other))
        elif isinstance(one, LeafHandle) and isinstance(other, LeafHandle):
            pairs.append((path, one, other))
    count = begin(lambda: sum(handle.nbytes for _, handle, _ in pairs))
    left = iter(pairs)  # by place: rules may give one leaf to several
    batches = [[next(left) for _ in batch] for batch in backend.batches([one for _, one, _ in pairs], _PART)]
    compared = in_parallel(functools.partial(_compare_batch, tolerance=tolerance, count=count), batches, _AT_ONCE)
    outcomes = list(itertools.chain.from_iterable(compared))
    found.update(zip((path for path, _, _ in pairs), outcomes, strict=True))
    differences = tuple(one for one in found.values() if isinstance(one, LeafDifference))
    formats = a.format, b.format
    return Diff(a.path, b.path, formats, outcomes.count("identical"), outcomes.count("tolerated"), differences)


def _structure(a: LeafHandle | str | None, b: LeafHandle | str | None, *, same_format: bool) -> Kind | None:
    """Return how two leaves, or empty nodes, differ if they cannot be compared by their values."""
    if a is None or b is None:
        return "only in b" if a is None else "only in a"
    if isinstance(a, LeafHandle) and isinstance(b, LeafHandle):
        return None if a.shape == b.shape else "shape"
    return None if isinstance(a, str) and isinstance(b, str) and (a == b or not same_format) else "type"


def _compare_batch(batch: Sequence[_Pair], tolerance: _Tolerance, count: metadata.Count) -> list[_Outcome]:
    """Compare leaves that are read at once, or a large one in slices."""
    if len(batch) == 1:
        return [_compare(batch[0], _parts(*batch[0][1:]), tolerance, count)]
    values = zip(read_all([a for _, a, _ in batch]), read_all([b for _, _, b in batch]), strict=True)
    return [_compare(pair, [both], tolerance, count) for pair, both in zip(batch, values, strict=True)]


def _compare(pair: _Pair, values: Iterable[tuple[Any, Any]], tolerance: _Tolerance, count: metadata.Count) -> _Outcome:
    """Compare two leaves; ``values`` are those of both, or of their slices."""
    path, a, b = pair
    found, is_other, texts = Values(*(tolerance or ())), False, ("", "")
    for one, other in values:
        if isinstance(one, str | bytes | KeyData) or isinstance(other, str | bytes | KeyData):
            is_other |= not _same(one, other)
        else:
            found.add(np.asarray(one), np.asarray(other))
        if not a.shape:
            texts = _text(one), _text(other)
        count(getattr(one, "nbytes", a.nbytes))
    same_type = _same_type(a, b)
    if same_type and not is_other and not (found.other_bits if tolerance is None else found.outside):
        return "tolerated" if found.other_bits else "identical"
    numbers = found if found.other_bits else None
    shown = f"{metadata.describe(a)}{texts[0]}", f"{metadata.describe(b)}{texts[1]}"
    return LeafDifference(show_path(path), "values" if same_type else "type", *shown, numbers)


def _parts(a: LeafHandle, b: LeafHandle) -> Iterator[tuple[Any, Any]]:
    """Yield the values of two leaves, or those of slices of two arrays."""
    # Chunks that decode only as a whole make fewer parts, and what is no array one.
    for part in min((list(one.parts(_PART)) for one in (a, b)), key=len):
        yield a.part(part.index).read(), b.part(part.index).read()


def _same(one: Any, other: Any) -> bool:
    """Return whether texts, bytes, or PRNG keys and their data are the same: no key is near another one."""
    if not (isinstance(one, KeyData) or isinstance(other, KeyData)):
        return type(one) is type(other) and bool(one == other)
    implementations = {key.impl for key in (one, other) if isinstance(key, KeyData)}
    data = [key.data if isinstance(key, KeyData) else key for key in (one, other)]
    return len(implementations) == 1 and np.array_equal(*data)


def _same_type(a: LeafHandle, b: LeafHandle) -> bool:
    """Return whether kinds and dtypes are equal, as far as the formats record them."""
    kinds = ({one.kind} | one.possible_kinds for one in (a, b))
    return bool(set.intersection(*kinds)) and (a.dtype is None or b.dtype is None or a.dtype == b.dtype)


def _text(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return f" {text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + '…'}"


def _lines(found: Diff) -> Iterator[Line]:
    """Yield the checkpoints, a line for each difference, or for those of numbered layers, and the counts."""
    for name, path, format in zip("ab", (found.a, found.b), found.formats, strict=True):
        yield Line(printable(f"{name}: {path} ({format})", one_line=True), hang=2)
    by_path = {one.path: one for one in found.differences}
    types_of = {one.path: " → ".join(dict.fromkeys(filter(None, (one.a, one.b)))) for one in found.differences}
    rows = [Row((one.path,), (one.kind, types_of[one.path])) for one in found.differences]
    folded = fold(rows)
    for row in folded[:_MAX_LINES]:
        kind, types = row.detail
        numbers = _numbers([by_path[member.names[0]].values for member in row.members])
        text, mark = ": ".join(filter(None, (types, numbers))), _MARKS.get(kind, "~")
        yield Line(printable(f"{mark} {row.names[0]}   {text}{row.note}", one_line=True), _COLORS[mark], hang=4)
    if left := sum(row.count for row in folded[_MAX_LINES:]):
        yield Line(f"… and {left} more leaves: see .differences, or --json", hang=4)
    words = [f"{counted(found.identical, 'leaf')} identical"]
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
