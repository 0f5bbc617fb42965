"""Suggest similar names in messages."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Sequence

from flax_ckpt_compat._core.escaping import printable

# difflib is slow: of more names, compare only those that share the most pairs of letters.
_MAX_COMPARED = 40


class Names:
    """An index of names, for several searches."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._by_last: dict[str, list[str]] = {}
        for name in names:
            self._by_last.setdefault(_last(name), []).append(name)
        self._pairs: dict[str, frozenset[str]] = {}

    def nearest(self, wanted: str) -> list[str]:
        """Return at most two similar names, among those with the same last part if there are any."""
        names = self._by_last.get(_last(wanted)) or self._names
        if len(names) > _MAX_COMPARED:
            pairs = _pairs_of(wanted)
            names = heapq.nlargest(_MAX_COMPARED, names, key=lambda name: self._similarity(name, pairs))
        matches = difflib.get_close_matches(wanted, names, n=2, cutoff=0.5)
        return [printable(name, one_line=True) for name in matches]

    def _similarity(self, name: str, pairs: frozenset[str]) -> float:
        own = self._pairs.get(name)
        if own is None:
            own = self._pairs[name] = _pairs_of(name)
        return len(own & pairs) / (len(own) + len(pairs) + 1)


def nearest(wanted: str, names: Sequence[str]) -> list[str]:
    """Return at most two similar names; see `Names.nearest`."""
    return Names(names).nearest(wanted)


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _pairs_of(name: str) -> frozenset[str]:
    return frozenset(map(str.__add__, name, name[1:]))
