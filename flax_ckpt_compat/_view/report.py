"""A result as commands show it: a title, lines and tables, a verdict; the value for JSON, and the exit code.

A result that users hold, such as a `Diff`, prints as the text of its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Printable text."""

    text: str
    style: str | None = None  # on a terminal: a colour, or bold
    hang: int = 0  # blanks before what continues it, where a terminal is narrower
    is_note: bool = False  # for standard error
    rich: Callable[[int], Iterable[Any]] | None = None  # what rich shows instead, by the terminal's width


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A result, ready to be shown.

    Attributes:
        lines: from the title to the summary; made as they are needed.
        value: returns what JSON holds.
        problems: lines for standard error, beside JSON too.
        found: what the command looks for is there, which makes exit code 1.
    """

    lines: Iterable[Line]
    value: Callable[[], Any]
    problems: Sequence[Line] = ()
    found: bool = False

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines)
