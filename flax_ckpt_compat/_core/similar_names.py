"""Suggest similar names in messages."""

from __future__ import annotations

import difflib
import heapq
import itertools
from collections.abc import Sequence

from flax_ckpt_compat._core.keyed_cache import Memo
from flax_ckpt_compat._core.text_formatting import printable

# difflib is slow: of more names, compare only those that share the most pairs of letters.
_MAX_COMPARED = 40
# Such as attn and attention; encoder and Dense_0 are less alike.
_AKIN = 0.6


class Names:
    """An index of names, for several searches."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._by_last: dict[str, list[str]] = {}
        for name in names:
            self._by_last.setdefault(_last(name), []).append(name)
        self._pairs = Memo(_pairs_of)

    def nearest(self, wanted: str) -> list[str]:
        """Return at most two names that are akin where they differ; with the same last part if any name has it."""
        names = self._by_last.get(_last(wanted)) or self._names
        if _last(wanted).isdecimal():  # an item of a list is like no other name
            names = [name for name in names if _last(name).isdecimal()]
        if len(names) > _MAX_COMPARED:
            pairs = _pairs_of(wanted)
            names = heapq.nlargest(_MAX_COMPARED, names, key=lambda name: self._similarity(name, pairs))
        matches = difflib.get_close_matches(wanted, names, n=_MAX_COMPARED, cutoff=0.5)
        akin = (printable(name, one_line=True) for name in matches if _are_akin(wanted, name))
        return list(itertools.islice(akin, 2))

    def _similarity(self, name: str, pairs: frozenset[str]) -> float:
        own = self._pairs[name]
        return len(own & pairs) / (len(own) + len(pairs) + 1)


def _are_akin(one: str, other: str) -> bool:
    """Return whether two key paths, or their ends, differ in the first name or else little: misspelt, a level more."""
    ours, theirs = one.split("/"), other.split("/")
    least = min(len(ours), len(theirs))
    if least > 2 and ours[1:] == theirs[1:]:
        return True
    for left, right in ((ours[:], theirs[:]), (ours[-least:], theirs[-least:])):
        for end in (0, -1):
            while left and right and left[end] == right[end]:
                del left[end], right[end]
        first, second = "/".join(left), "/".join(right)
        if not first or not second or difflib.SequenceMatcher(None, first, second).ratio() >= _AKIN:
            return True
    return False


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _pairs_of(name: str) -> frozenset[str]:
    return frozenset(map(str.__add__, name, name[1:]))
