"""Write texts of messages: escape untrusted names, format sizes and rows, shorten lists of names.

Names may hold escape sequences of terminals or lines of a log: all messages, records and output pass through here."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

_UNITS, _THOUSAND = ("B", "kB", "MB", "GB", "TB", "PB"), 1000
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")
MAX_SHOWN = 20
_NUMBER = re.compile(r"(\d{1,15})", re.ASCII)  # Python refuses to convert thousands of digits
_MAX_RUNS = 6


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Escape unprintable characters, such as ``\x1b``; with ``one_line`` also line breaks."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or (one == "\n" and not one_line) else _escaped(one) for one in text)


def literal(text: str) -> str:
    """Return a regular expression that matches a text only; unlike ``re.escape``, with a backslash only if needed."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def format_size(nbytes: float) -> str:
    """Format bytes with three digits and a decimal unit."""
    value, unit = float(nbytes), 0
    while value >= _THOUSAND - 0.5 and unit < len(_UNITS) - 1:
        value, unit = value / _THOUSAND, unit + 1
    decimals = max(0, 3 - len(f"{value:.0f}")) if unit else 0
    return f"{value:.{decimals}f} {_UNITS[unit]}"


def counted(count: int, noun: str) -> str:
    """Return a number of things as text: of leaves, or of what has a plural in ``s``."""
    plural = "leaves" if noun == "leaf" else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not UTF-8 (PEP 383)
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of a list."""

    names: tuple[str, ...]  # key paths, such as those of a leaf and its source; the numbers in them may be folded
    detail: tuple[str, ...] = ()  # text that must be equal for rows to be folded into one
    count: int = 1  # number of rows folded into this one, which are the `members`
    members: Sequence[Row] = dataclasses.field(default=(), compare=False)

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
    lines = [printable(f"  {': '.join((*row.names, *row.detail))}{row.note}", one_line=True) for row in found]
    return [*lines, f"  and {more} more{more_is}"] if more else lines


def one_line(names: Iterable[str | Row]) -> str:
    """Join names, or rows with their details, with commas for one line of a log."""
    found, more = shown([name if isinstance(name, Row) else Row((name,)) for name in names])
    parts = [(": ".join((*row.names, *row.detail)), row.count) for row in found]
    several = [f"{one} ({count})" if count > 1 and one.count("{") > 1 else one for one, count in parts]
    text = printable(", ".join(several), one_line=True)
    return f"{text} and {more} more" if more else text


def fold(rows: Iterable[Row]) -> list[Row]:
    """Merge rows that differ only in numbers, in order of first appearance; those that run the other way stay."""
    alike: dict[Any, list[tuple[Row, list[str]]]] = {}  # those of one text between the numbers, with their numbers
    for row in rows:
        parts = list(map(_NUMBER.split, row.names))
        numbers = [number for one in parts for number in one[1::2]]
        alike.setdefault((tuple(tuple(one[::2]) for one in parts), row.detail), []).append((row, numbers))
    found = list[Row]()
    for (texts, detail), group in alike.items():
        members, columns = [row for row, _ in group], list(zip(*(numbers for _, numbers in group), strict=True))
        if _is_parallel(columns, len(texts[0]) - 1):
            sets = map(_set, columns)
            names = tuple([one[0] + "".join([next(sets) + text for text in one[1:]]) for one in texts])
            found.append(Row(names, detail, len(members), members))
        else:
            found += [Row(row.names, detail, members=[row]) for row in members]
    return found


def _is_parallel(columns: Sequence[Sequence[str]], own: int) -> bool:
    """Return whether each column is one of the first ``own``, or a constant away: 0..3 beside 3..0 are not."""
    steps = [[int(number) - int(column[0]) for number in column] for column in columns]
    return all(one in steps[:own] or not any(one) for one in steps[own:])


def _set(numbers: Iterable[str]) -> str:
    """Format a set of numbers as ``7``, ``{0..23}`` or ``{0,2,4}``."""
    ordered = sorted(set(numbers), key=lambda text: (int(text), text))
    if len(ordered) == 1:
        return ordered[0]
    runs = [[text for _, text in run] for _, run in groupby(enumerate(ordered), lambda one: int(one[1]) - one[0])]
    words = [text for run in runs for text in ([f"{run[0]}..{run[-1]}"] if len(run) > 2 else run)]
    if len(words) > _MAX_RUNS:
        words = [*words[: _MAX_RUNS - 2], "…", words[-1]]
    return f"{{{','.join(words)}}}"


def _escape(record: logging.LogRecord) -> bool:
    """Escape a record of the library's logger, whatever handlers it goes to."""
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001  (logging itself reports a record that cannot be formatted)
        return True
    shown = printable(text)
    if shown != text:
        record.msg, record.args = shown, ()
    return True


logging.getLogger("flax_ckpt_compat").addFilter(_escape)
