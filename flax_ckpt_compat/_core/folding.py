"""Lists of names for messages: rows of numbered names folded, never too many of them, the rest counted.

``block_0/kernel``, ``block_1/kernel``, … become ``block_{0..23}/kernel``. Errors, logs and plans list leaves with this.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from flax_ckpt_compat._core.printable import printable

MAX_SHOWN = 20
# Python converts no number of thousands of digits.
_NUMBER = re.compile(r"(\d{1,15})", re.ASCII)
_MAX_RUNS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of a list.

    Attributes:
        names: key paths, such as that of a leaf and that of its source; the numbers in them may be folded.
        detail: what has to be equal for rows to be folded into one.
        count: how many rows it stands for.
    """

    names: tuple[str, ...]
    detail: tuple[str, ...] = ()
    count: int = 1

    @property
    def note(self) -> str:
        """Return how many leaves a folded row stands for, as the end of a line."""
        return f"   ({self.count} leaves)" if self.count > 1 else ""


def shown(rows: Sequence[Row], limit: int = MAX_SHOWN) -> tuple[list[Row], int]:
    """Return the rows to show and how many of the given ones they leave out; folded only if they are too many."""
    if len(rows) <= limit:
        return list(rows), 0
    folded = fold(rows)
    return folded[:limit], sum(row.count for row in folded[limit:])


def one_line(names: Iterable[str | Row]) -> str:
    """Return names, or rows with what is said of them, for one line of a log, separated by commas."""
    found, more = shown([name if isinstance(name, Row) else Row((name,)) for name in names])
    told = ", ".join(printable(": ".join((*row.names, *row.detail)), one_line=True) for row in found)
    return f"{told} and {more} more" if more else told


def fold(rows: Iterable[Row]) -> list[Row]:
    """Return fewer rows: those that differ only in numbers become one, in the order in which each came first."""
    alike: dict[Any, list[tuple[Row, list[list[str]]]]] = {}
    for row in rows:
        pieces = [_NUMBER.split(name) for name in row.names]
        key = (tuple(tuple(parts[::2]) for parts in pieces), row.detail)
        alike.setdefault(key, []).append((row, pieces))
    folded = []
    for group in alike.values():
        first, pieces = group[0]
        if len(group) == 1:
            folded.append(first)
            continue
        numbers = [tuple(number for parts in pieces for number in parts[1::2]) for _, pieces in group]
        folded += [Row(_filled(pieces, columns), first.detail, count) for columns, count in _merged(numbers)]
    return folded


Columns = tuple[frozenset[str], ...]


def _merged(numbers: list[tuple[str, ...]]) -> list[tuple[Columns, int]]:
    """Return products of sets of numbers, which together are all rows of numbers, and how many rows each has."""
    # Columns that run in step, as those of a leaf's path and its source's, are one.
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
    """Return columns that differ in one place only, as one."""
    first = same[0]
    return first if len(same) == 1 else (*first[:at], frozenset().union(*(one[at] for one in same)), *first[at + 1 :])


def _filled(pieces: list[list[str]], columns: Columns) -> tuple[str, ...]:
    left = iter(columns)
    return tuple(
        "".join(part if at % 2 == 0 else _set(next(left)) for at, part in enumerate(parts)) for parts in pieces
    )


def _set(numbers: frozenset[str]) -> str:
    """Return ``7``, ``{0..23}`` or ``{0,2,4}``."""
    if len(numbers) == 1:
        return next(iter(numbers))
    ordered = sorted(numbers, key=lambda text: (int(text), text))
    runs = [[text for _, text in run] for _, run in groupby(enumerate(ordered), lambda one: int(one[1]) - one[0])]
    words = [text for run in runs for text in ([f"{run[0]}..{run[-1]}"] if len(run) > 2 else run)]
    if len(words) > _MAX_RUNS:
        words = [*words[: _MAX_RUNS - 2], "…", words[-1]]
    return f"{{{','.join(words)}}}"
