"""Prepare text for terminals and logs: untrusted names are escaped, sizes and rows formatted.

File names and keys of a tree may hold escape sequences that recolour a terminal, move its cursor or forge lines of a
log. All error messages, log records, plans and command-line output pass through here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence

_UNITS, _THOUSAND = ("B", "kB", "MB", "GB", "TB", "PB"), 1000
_UNPRINTABLE = re.compile(r"[^\n -~]")


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Escape unprintable characters, such as ``\x1b``; with ``one_line`` also line breaks."""
    if text.isprintable():
        return text
    shown = _UNPRINTABLE.sub(_escaped, text)
    return shown.replace("\n", "\\n") if one_line else shown


def format_size(nbytes: float) -> str:
    """Format bytes with three digits and a decimal unit."""
    if nbytes < _THOUSAND:
        return f"{nbytes:.0f} B"
    value, unit = float(nbytes), 0
    while value >= _THOUSAND - 0.5 and unit < len(_UNITS) - 1:
        value, unit = value / _THOUSAND, unit + 1
    decimals = max(0, 3 - len(f"{value:.0f}"))
    return f"{value:.{decimals}f} {_UNITS[unit]}"


def counted(count: int, noun: str) -> str:
    """Return a number of things as text, for a noun whose plural ends in ``s``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def count_of_leaves(count: int) -> str:
    """Return a number of leaves as text."""
    return f"{count} {'leaf' if count == 1 else 'leaves'}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return rows as lines with aligned columns, those in ``right`` to the right, without trailing blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) if n in right else cell.ljust(width) for n, (cell, width) in enumerate(pairs))
        for pairs in (tuple(zip(row, widths, strict=True)) for row in rows)
    )
    return [line.rstrip() for line in lines]


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable():
        return character
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not UTF-8 (PEP 383)
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


class _Printable(logging.Filter):
    """Escape the records of the library's logger, whatever handlers they go to."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  (logging itself reports a record that cannot be formatted)
            return True
        shown = printable(text)
        if shown != text:
            record.msg, record.args = shown, ()
        return True


logging.getLogger("flax_ckpt_compat").addFilter(_Printable())
