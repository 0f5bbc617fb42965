"""Escape untrusted text, such as names of files and leaves, before it is printed.

File names and keys of a tree may hold escape sequences that recolour a terminal, move its cursor or forge lines of a
log. All error messages, log records, plans and command-line output pass through here.
"""

from __future__ import annotations

import logging
import re

_UNPRINTABLE = re.compile(r"[^\n -~]")


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Escape unprintable characters, such as ``\x1b``; with ``one_line`` also line breaks."""
    if text.isprintable():
        return text
    shown = _UNPRINTABLE.sub(_escaped, text)
    return shown.replace("\n", "\\n") if one_line else shown


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
