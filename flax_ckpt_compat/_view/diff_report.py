"""Define the result of `diff`, and report it: its leaves folded by numbered layers, the number of each kind last."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from flax_ckpt_compat._core.fold_names import Row, fold_with_members
from flax_ckpt_compat._core.text_formatting import count_of_leaves, printable
from flax_ckpt_compat._view.array_values import Values
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
