"""Names like another name, for messages."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Sequence

from flax_ckpt_compat._core.printable import printable

# Comparing names well takes time: of more, only those that share most pairs of letters are looked at.
_MAX_COMPARED = 40


class Names:
    """Names in which several others are looked for."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._by_last: dict[str, list[str]] = {}
        for name in names:
            self._by_last.setdefault(_last(name), []).append(name)
        self._pairs: dict[str, frozenset[str]] = {}

    def nearest(self, wanted: str) -> list[str]:
        """Return at most two names like this one: those with the same last part first, then the most similar text."""
        names = self._by_last.get(_last(wanted)) or self._names
        if len(names) > _MAX_COMPARED:
            pairs = _pairs_of(wanted)
            names = heapq.nlargest(_MAX_COMPARED, names, key=lambda name: self._likeness(name, pairs))
        near = difflib.get_close_matches(wanted, names, n=2, cutoff=0.5)
        return [printable(name, one_line=True) for name in near]

    def _likeness(self, name: str, pairs: frozenset[str]) -> float:
        own = self._pairs.get(name)
        if own is None:
            own = self._pairs[name] = _pairs_of(name)
        return len(own & pairs) / (len(own) + len(pairs) + 1)


def nearest(wanted: str, names: Sequence[str]) -> list[str]:
    """Return at most two names like this one: those with the same last part first, then the most similar text."""
    return Names(names).nearest(wanted)


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _pairs_of(name: str) -> frozenset[str]:
    return frozenset(map(str.__add__, name, name[1:]))
