"""A result as commands and notebooks show it: lines and tables, the value for JSON, and the exit code.

Text is the same everywhere. Terminals, notebooks and pages of HTML get it from rich, in colours. Functions import rich
and the like themselves: most programs show nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from flax_ckpt_compat._core.errors import SettingError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_DOCTYPE = "<!doctype html>"
_WIDTH = 120  # of HTML, in characters
_SHORT = 20  # characters; columns that need no more are not folded
_PRE = '<pre style="overflow-x: auto; line-height: normal; white-space: pre">{code}</pre>'


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Printable text."""

    text: str
    style: str | None = None  # in rich's words: a colour, or bold
    hang: int | None = 0  # blanks before what continues it, where a terminal is narrower; None: code, not wrapped
    is_note: bool = False  # for standard error

    def __str__(self) -> str:
        return self.text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        text = self.text if self.hang is None else wrapped(self.text, options.max_width, " " * self.hang)
        yield Text(text, self.style or "", no_wrap=True, overflow="ignore")


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Printable cells below headings. Where a terminal is narrower, cells are folded and none is cut."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()  # columns of numbers
    styles: Sequence[str | None] = ()  # of the rows, in rich's words
    indent: int = 0  # blanks before each row
    spare: Collection[int] = ()  # columns that are left out where there is no room for all

    def __str__(self) -> str:
        lines = _aligned([self.headings, *self.rows], self.right)
        return "\n".join(f"{'':{self.indent}}{line}" for line in lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import padding, table, text

        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        is_narrow = self.indent + sum(widths) + 2 * len(widths) > options.max_width + 2
        columns = [n for n in range(len(widths)) if not (is_narrow and n in self.spare)]
        # Without room for all short columns, they are folded as well: rich would cut them.
        fits = self.indent + sum(min(widths[n], _SHORT) + 2 for n in columns) <= options.max_width + 2
        shown = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
        for n in columns:
            justify: Literal["left", "right"] = "right" if n in self.right else "left"
            shown.add_column(self.headings[n], justify=justify, no_wrap=widths[n] <= _SHORT and fits, overflow="fold")
        for row, style in zip(self.rows, self.styles or [None] * len(self.rows), strict=True):
            shown.add_row(*(text.Text(row[n]) for n in columns), style=style)
        yield padding.Padding(shown, (0, 0, 0, self.indent), expand=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A result, ready to be shown.

    Attributes:
        lines: from the title to the summary; made as they are needed.
        value: returns what JSON holds.
        problems: lines for standard error, beside JSON too.
        found: what the command looks for is there, which makes exit code 1.
    """

    lines: Iterable[Line | Table]
    value: Callable[[], Any]
    problems: list[Line] = dataclasses.field(default_factory=list)
    found: bool = False

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines


class _Shown:
    """A result that users hold: it prints as the text of its report, and notebooks show the same in colours.

    Private by name although other modules derive from it: to users, such a base is no part of their classes."""

    __slots__ = ()

    def _report(self) -> Report:
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self._report())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._report()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:  # noqa: ARG002
        return {"text/plain": str(self._report()), "text/html": html(self._report())}


def for_json(value: Any) -> Any:
    """Return a result as JSON holds it: classes as public fields and properties, dtypes, NaN and infinities as text."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, one in vars(type(value)).items() if isinstance(one, property)]
        return {name: for_json(getattr(value, name)) for name in names if not name.startswith("_")}
    if isinstance(value, dict):
        return {name: for_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return list(map(for_json, value))
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if value is None or is_number else str(value)


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Return lines no longer than ``width``, unless a word is; ``indent`` is before what continues a line."""
    import textwrap

    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    # The wrapper takes the blanks before a long word away, such as those before a path.
    return "\n".join("\n".join(wrapper.wrap(line)) if " " in line.strip() else line for line in text.splitlines())


def html(report: Report) -> str:
    """Return what a terminal shows of a report as HTML; names from the checkpoint are escaped."""
    import io

    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=_WIDTH, highlight=False, color_system="truecolor")
    console.print(report, crop=False)
    return console.export_html(inline_styles=True, code_format=_PRE)


def write_page(file: str, title: str, parts: Iterable[str]) -> None:
    """Write HTML to a local file, as a page that needs no server; replace no file that is not such a page."""
    from html import escape

    try:
        with open(file, "a+", encoding="utf-8") as stream:
            stream.seek(0)
            if stream.read(len(_DOCTYPE)) not in ("", _DOCTYPE):
                raise SettingError(f"{file} exists, and is not an HTML page: choose another FILE")
            stream.truncate(0)
            stream.write(f'{_DOCTYPE}\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>')
            stream.write('<meta name="viewport" content="width=device-width"></head><body>')
            stream.writelines([*parts, "</body></html>\n"])
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot write the page to {file}: {error}; choose another FILE") from None


def _aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return rows as lines with aligned columns, those in ``right`` to the right, without trailing blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if n in right else str.ljust for n in range(len(widths))]
    lines = ("  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]
