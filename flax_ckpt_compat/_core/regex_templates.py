"""Compile templates of ``re.Match.expand``, which would parse them again for every match."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

# Private-use characters, one of which marks the place of a group.
_PRIVATE = range(0xE000, 0xF8FF)
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")


@functools.lru_cache(maxsize=256)
def compile_template(pattern: re.Pattern[str], template: str) -> Callable[[re.Match[str]], str]:
    """Return a function that expands a template with a match's groups, as ``re.Match.expand`` does.

    Raise re.error or IndexError for a stray backslash, or a group that the pattern lacks."""
    # Expand a match whose groups are marks, so that Python's own parser finds the places of the groups.
    empty = _stand_in(pattern, [""] * (pattern.groups + 1)).expand(template)
    mark = next(char for char in map(chr, _PRIVATE) if char not in empty)
    marks = [f"{mark}{number}{mark}" for number in range(pattern.groups + 1)]
    filled = _stand_in(pattern, marks).expand(template).replace("".join(marks), marks[0])
    pieces = filled.split(mark)
    literals, groups = pieces[::2], [int(number) for number in pieces[1::2]]

    def fill(match: re.Match[str]) -> str:
        words = [literals[0]]
        for group, literal in zip(groups, literals[1:], strict=True):
            words += (match[group] or "", literal)
        return "".join(words)

    return fill


def _stand_in(pattern: re.Pattern[str], texts: list[str]) -> re.Match[str]:
    """Return a match whose groups, by number and name, are ``texts[1:]``; ``texts[0]`` precedes them."""
    names = {number: name for name, number in pattern.groupindex.items()}
    groups = [f"(?P<{names[n]}>{texts[n]})" if n in names else f"({texts[n]})" for n in range(1, pattern.groups + 1)]
    match = re.match(texts[0] + "".join(groups), "".join(texts))
    assert match is not None
    return match


def literal(text: str) -> str:
    """Return a regular expression that matches a text only; unlike ``re.escape``, with a backslash only if needed."""
    return _SPECIAL.sub(r"\\\g<0>", text)
