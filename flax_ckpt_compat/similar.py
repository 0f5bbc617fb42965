"""Names for messages: those that are like a name, and lists that are not too long."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from flax_ckpt_compat._core.printable import printable

MAX_SHOWN = 20
# Comparing names is quadratic in their length: more of them are not looked at.
_MAX_COMPARED = 2000


def nearest(wanted: str, names: Sequence[str]) -> list[str]:
    """At most two names like this one: those with the same last part first, then the most similar text."""
    last = wanted.rpartition("/")[2]
    same_last = [name for name in names if name.rpartition("/")[2] == last]
    near = difflib.get_close_matches(wanted, (same_last or names)[:_MAX_COMPARED], n=2, cutoff=0.5)
    return [printable(name, one_line=True) for name in near]


def shorten(names: Iterable[str]) -> str:
    """Names for one line of a log: all of them up to twenty, then how many more."""
    shown = list(names)
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return ", ".join(printable(name, one_line=True) for name in shown[:MAX_SHOWN]) + more
