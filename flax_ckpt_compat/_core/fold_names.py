"""Shorten lists of names in errors, logs and plans: fold numbered names, limit the length, count the rest.

``block_0/kernel``, ``block_1/kernel``, … become ``block_{0..23}/kernel``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from flax_ckpt_compat._core.text_formatting import printable

MAX_SHOWN = 20
# Python refuses to convert numbers of thousands of digits.
_NUMBER = re.compile(r"(\d{1,15})", re.ASCII)
_MAX_RUNS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of a list."""

    names: tuple[str, ...]  # key paths, such as those of a leaf and its source; the numbers in them may be folded
    detail: tuple[str, ...] = ()  # text that must be equal for rows to be folded into one
    count: int = 1  # number of rows folded into this one

    @property
    def note(self) -> str:
        """Return the number of leaves of a folded row, as the end of a line."""
        return f"   ({self.count} leaves)" if self.count > 1 else ""


def shown(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Return the rows to show and the number of rows left out; fold only if there are more than `MAX_SHOWN`."""
    if len(rows) <= MAX_SHOWN:
        return list(rows), 0
    folded = fold(rows)
    return folded[:MAX_SHOWN], sum(row.count for row in folded[MAX_SHOWN:])


def listed(rows: Sequence[Row], more_is: str = "") -> list[str]:
    """Return the rows to show with their details, a line each; then the number of rows left out, and where they are."""
    found, more = shown(rows)
    lines = [printable(f"  {row.names[0]}: {row.detail[0]}{row.note}", one_line=True) for row in found]
    return [*lines, f"  and {more} more{more_is}"] if more else lines


def one_line(names: Iterable[str | Row]) -> str:
    """Join names, or rows with their details, with commas for one line of a log."""
    found, more = shown([name if isinstance(name, Row) else Row((name,)) for name in names])
    text = ", ".join(printable(": ".join((*row.names, *row.detail)), one_line=True) for row in found)
    return f"{text} and {more} more" if more else text


def fold(rows: Iterable[Row]) -> list[Row]:
    """Merge rows that differ only in numbers, in order of first appearance."""
    return [folded for folded, _ in _folded(rows)]


def fold_with_members(rows: Iterable[Row]) -> list[tuple[Row, list[Row]]]:
    """Like `fold`; return each row with those that it replaces."""
    return [(folded, members()) for folded, members in _folded(rows)]


def _folded(rows: Iterable[Row]) -> Iterator[tuple[Row, Callable[[], list[Row]]]]:
    groups: dict[Any, list[tuple[Row, list[list[str]]]]] = {}
    for row in rows:
        pieces = [_NUMBER.split(name) for name in row.names]
        key = (tuple(tuple(parts[::2]) for parts in pieces), row.detail)
        groups.setdefault(key, []).append((row, pieces))
    for group in groups.values():
        first, pieces = group[0]
        if len(group) == 1:
            yield first, functools.partial(list, [first])
            continue
        numbers = [tuple(number for parts in pieces for number in parts[1::2]) for _, pieces in group]
        for columns, count in _merged(numbers):
            members = functools.partial(_members, group, numbers, columns)
            yield Row(_filled(pieces, columns), first.detail, count), members


def _members(group: list[tuple[Row, Any]], numbers: list[tuple[str, ...]], columns: Columns) -> list[Row]:
    """Return the rows of a group whose numbers are in a product of sets."""
    pairs = zip(group, numbers, strict=True)
    return [row for (row, _), one in pairs if all(map(operator.contains, columns, one))]


Columns = tuple[frozenset[str], ...]


def _merged(numbers: list[tuple[str, ...]]) -> list[tuple[Columns, int]]:
    """Cover the rows of numbers with products of sets; return each product with its number of rows."""
    # Equal columns, such as those of a leaf's path and its source's, count as one.
    values = list(zip(*numbers, strict=True))
    distinct = list(dict.fromkeys(values))
    place = {column: at for at, column in enumerate(distinct)}
    single = {text: frozenset((text,)) for column in distinct for text in column}
    found = Counter(tuple(map(single.__getitem__, row)) for row in zip(*distinct, strict=True))
    found = found or Counter({(): len(numbers)})
    for at in reversed(range(len(distinct))):
        joined: dict[Columns, list[Columns]] = {}
        for columns in found:
            joined.setdefault((*columns[:at], *columns[at + 1 :]), []).append(columns)
        if len(joined) < len(found):
            found = Counter({_union(same, at): sum(map(found.__getitem__, same)) for same in joined.values()})
    return [(tuple(columns[place[column]] for column in values), count) for columns, count in found.items()]


def _union(same: list[Columns], at: int) -> Columns:
    """Merge columns that differ only at index ``at``."""
    first = same[0]
    return first if len(same) == 1 else (*first[:at], frozenset().union(*(one[at] for one in same)), *first[at + 1 :])


def _filled(pieces: list[list[str]], columns: Columns) -> tuple[str, ...]:
    left = iter(columns)
    return tuple(
        "".join(part if at % 2 == 0 else _set(next(left)) for at, part in enumerate(parts)) for parts in pieces
    )


def _set(numbers: frozenset[str]) -> str:
    """Format a set of numbers as ``7``, ``{0..23}`` or ``{0,2,4}``."""
    if len(numbers) == 1:
        return next(iter(numbers))
    ordered = sorted(numbers, key=lambda text: (int(text), text))
    runs = [[text for _, text in run] for _, run in groupby(enumerate(ordered), lambda one: int(one[1]) - one[0])]
    words = [text for run in runs for text in ([f"{run[0]}..{run[-1]}"] if len(run) > 2 else run)]
    if len(words) > _MAX_RUNS:
        words = [*words[: _MAX_RUNS - 2], "…", words[-1]]
    return f"{{{','.join(words)}}}"
