"""What ``re.Match.expand`` gives, for a template that is parsed once and not anew for every match."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

# Characters without a meaning, one of which marks where a group goes.
_PRIVATE = range(0xE000, 0xF8FF)


@functools.lru_cache(maxsize=256)
def compile_template(pattern: re.Pattern[str], template: str) -> Callable[[re.Match[str]], str]:
    """A function that fills the groups of a match into a template, as ``re.Match.expand`` does.

    Args:
        pattern: whose matches they are.
        template: text with references to groups, such as ``block_\\1`` or ``\\g<name>``.

    Raises:
        re.error, IndexError: a stray backslash, or a group that the pattern lacks.
    """
    # A match whose groups are marks is filled in, so that Python's own parser says which group goes where.
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
    """A match with the pattern's groups, by number and name, that have these texts; the first comes before them all."""
    names = {number: name for name, number in pattern.groupindex.items()}
    groups = [f"(?P<{names[n]}>{texts[n]})" if n in names else f"({texts[n]})" for n in range(1, pattern.groups + 1)]
    match = re.match(texts[0] + "".join(groups), "".join(texts))
    assert match is not None
    return match
