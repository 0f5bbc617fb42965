"""Render differences as text, folded by numbered layers, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from flax_ckpt_compat._core.fold_names import Row, fold_with_members
from flax_ckpt_compat._core.text_formatting import count_of_leaves, printable

Diff = Any  # flax_ckpt_compat._view.diff.Diff, which imports this module
_MARKS = {"only in a": "-", "only in b": "+"}
_FOLD_FROM, _MAX_LINES = 12, 60


def title(found: Diff) -> list[str]:
    """Return two lines that name the checkpoints."""
    pairs = zip("ab", (found.a, found.b), found.formats, strict=True)
    return [printable(f"{name}: {path} ({format})", one_line=True) for name, path, format in pairs]


def lines(found: Diff) -> Iterator[str]:
    """Yield a line for each difference, or for those of numbered layers; the first character is -, + or ~."""
    by_path = {one.path: one for one in found.differences}
    rows = [Row((one.path,), (one.kind, _types(one))) for one in found.differences]
    folded = fold_with_members(rows) if len(rows) > _FOLD_FROM else [(row, [row]) for row in rows]
    for row, members in folded[:_MAX_LINES]:
        kind, types = row.detail
        numbers = _numbers([by_path[member.names[0]].values for member in members])
        text = ": ".join(filter(None, (types, numbers)))
        yield printable(f"{_MARKS.get(kind, '~')} {row.names[0]}   {text}{row.note}", one_line=True)
    if left := sum(row.count for row, _ in folded[_MAX_LINES:]):
        yield f"… and {left} more leaves: see .differences, or --json"


def _types(one: Any) -> str:
    return one.a or one.b if one.kind.startswith("only") else one.a if one.a == one.b else f"{one.a} → {one.b}"


def _numbers(values: list[Any]) -> str:
    """Return how values differ: the elements of all, and the largest differences of any."""
    there = [one for one in values if one is not None]
    if not there:
        return ""
    other, size, nan = (sum(getattr(one, name) for one in there) for name in ("other_values", "size", "only_one_nan"))
    if not other:
        return "the same values, of other bits (-0.0, NaN)" if any(one.other_bits for one in there) else ""
    largest = [one for one in there if one.max_abs is not None]
    if size == len(there) and not nan and len(there) == 1:  # a scalar, whose values are shown
        return ""
    words = [f"{other} of {size} elements"]
    if largest:
        words.append(f"max abs {max(one.max_abs for one in largest):.3g}")
        words.append(f"max rel {max(one.max_rel for one in largest):.3g}")
    return ", ".join([*words, f"{nan} NaN in one only"] if nan else words)


def summary(found: Diff) -> str:
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
