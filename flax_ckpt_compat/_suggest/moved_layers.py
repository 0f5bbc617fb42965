"""Judge whether renamed layers may be different layers: by their names, and by other layers of the same shape."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flax_ckpt_compat._core.steps import numbered
from flax_ckpt_compat._core.tree import Path, show_path
from flax_ckpt_compat._suggest.leaf_features import Look, bare, is_symmetric, is_torch_name
from flax_ckpt_compat._suggest.names import akin, may_be_one, natural, unnumbered, words

# Of how many layers of one shape all pairs are compared; of more, those that are near each other in natural order.
_PAIRWISE, _WINDOW, _COMPARISONS = 20, 8, 8000
Leaves = frozenset[tuple[str, Look]]  # names and looks


class Moved(NamedTuple):
    """A renamed layer, or a renamed single leaf."""

    old: Path
    new: Path
    leaves: Leaves  # of a single leaf the look alone

    @property
    def is_leaf(self) -> bool:
        """Return whether this is a single leaf."""
        return any(name == "" for name, _ in self.leaves)


def judges(pairs: dict[Path, Path], stored: dict[Path, Look]) -> tuple[Iterator[str], ...]:
    """Return iterators of doubts about renamed layers: by names, by others of the same shape, by torch's layout.

    ``pairs`` are the sources (target path → stored path) of all leaves except optimizers'."""
    layers: dict[tuple[Path, Path], set[tuple[str, Look]]] = {}
    for new, old in pairs.items():
        ours, theirs = bare(new), bare(old)
        ends = (theirs[:-1], ours[:-1]) if ours[-1] == theirs[-1] else (theirs, ours)
        layers.setdefault(ends, set()).add((ours[-1] if len(ends[0]) < len(theirs) else "", stored[old]))
    moved = [Moved(old, new, frozenset(leaves)) for (old, new), leaves in layers.items() if old != new]
    moved.sort(key=lambda one: not one.is_leaf)
    return _names(moved), swappable(moved), _transposed(moved), _crossed(moved)


def _names(moved: Sequence[Moved]) -> Iterator[str]:
    """Yield a doubt for layers whose names differ in meaning, and for single ones with too little in common."""
    groups: dict[tuple[Path, Path], list[Moved]] = {}
    for one in moved:
        old, new = core(_inside(one.old), _inside(one.new))
        groups.setdefault((unnumbered(old), unnumbered(new)), []).append(one)
    for (old, new), members in groups.items():
        changes = {core(_inside(one.old), _inside(one.new)): one for one in reversed(members)}
        for change, one in changes.items():
            if not may_be_one(*change, leaf=one.is_leaf):
                yield f"{show_path(one.new)} would come from {show_path(one.old)}, a name that says something else"
        one = members[0]
        if one.is_leaf or not old or not new or len({_inside(other.old) for other in members}) > 1:
            continue
        # Square layers are too common to tell.
        oblong = any(shape[-1] != shape[-2] for _, (shape, _) in one.leaves if len(shape) > 1)
        if not oblong and not akin("_".join(old), "_".join(new)):
            yield f"only their shapes say that {show_path(one.new)} is {show_path(one.old)}"


def _transposed(moved: Sequence[Moved]) -> Iterator[str]:
    """Yield a doubt if a weight becomes a kernel of a shape that torch's transposed one has, too."""
    turned = [one for one in moved if one.is_leaf and is_torch_name(one.old[-1], one.new[-1])]
    # In one model all lie alike, and those whose sides differ tell how.
    if any(not is_symmetric(shape) for one in turned for _, (shape, _) in one.leaves if len(shape) > 1):
        return
    for one in turned:
        if any(is_symmetric(shape) for _, (shape, _) in one.leaves):
            yield f"{show_path(one.old)} has the shape of {show_path(one.new)} transposed or not; torch's weights are"


def _crossed(moved: Sequence[Moved]) -> Iterator[str]:
    """Yield a doubt if a row gets another name and another order, although its layers have shapes in common."""
    rows: dict[tuple[Path, Path, tuple[str, Look]], dict[int, tuple[int, Moved]]] = {}
    for one in moved:
        old, new = core(one.old, one.new)
        if old and new and (ours := numbered(old[-1])) and (theirs := numbered(new[-1])):
            for leaf in one.leaves:
                key = (unnumbered(one.old), unnumbered(one.new), leaf)
                rows.setdefault(key, {})[ours[1]] = (theirs[1], one)
    for row in rows.values():
        ordered = [row[number] for number in sorted(row)]
        for (before, one), (after, other) in itertools.pairwise(ordered):
            if before > after:
                yield f"{show_path(one.old)} and {show_path(other.old)} would change their order"


def _inside(path: Path) -> Path:
    """Return a key path without linen's collection, which NNX lacks."""
    return path[1:] if path[:1] in (("params",), ("batch_stats",)) else path


def core(old: Path, new: Path) -> tuple[Path, Path]:
    """Return the parts of two key paths between their common beginning and end."""
    start = _same_start(old, new)
    old, new = old[start:], new[start:]
    end = _same_start(old[::-1], new[::-1])
    return old[: len(old) - end], new[: len(new) - end]


def _same_start(one: Path, other: Path) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def swappable(moved: Sequence[Moved]) -> Iterator[str]:
    """Yield a doubt for two moved layers of one shape that cannot be told apart."""
    groups: dict[Leaves, dict[tuple[Path, Path], Moved]] = {}
    for one in moved:
        # One of each change: layers inside of one that is renamed go with it.
        groups.setdefault(one.leaves, {}).setdefault(core(one.old, one.new), one)
    for group in groups.values():
        by_old = {"\0".join((*one.old, "\1", *one.new)): change for change, one in group.items()}
        ordered = [by_old[key] for key in natural(by_old)]
        reach = len(ordered) if len(ordered) <= _PAIRWISE else max(1, min(_WINDOW, _COMPARISONS // len(ordered)))
        for number, change in enumerate(ordered):
            for other in ordered[number + 1 : number + 1 + reach]:
                one, two = group[change], group[other]
                if not _told_apart(one[:2], two[:2]):
                    yield f"nothing says which of {show_path(one.old)} and {show_path(two.old)} goes where"


def _told_apart(one: tuple[Path, Path], other: tuple[Path, Path]) -> bool:
    """Return whether names pair two old paths with two new ones."""
    if one[0] == other[0] or one[1] == other[1]:
        return True
    votes = []
    for step in (1, -1):
        olds, news = (_parting(left[::step], right[::step]) for left, right in zip(one, other, strict=True))
        votes += [_by_number(olds, news), _by_word(olds, news)]
    return -1 not in votes and 1 in votes


def _parting(one: Path, other: Path) -> tuple[str, str]:
    """Return the first names in which two key paths differ."""
    place = _same_start(one, other)
    return "".join(one[place : place + 1]), "".join(other[place : place + 1])


def _by_number(olds: tuple[str, str], news: tuple[str, str]) -> int:
    """Return 1 if the numbers have the same order, -1 if the opposite one, 0 if neither."""
    first, second, third, fourth = ([int(number) for number in re.findall(r"\d+", name)] for name in (*olds, *news))
    if first == second or third == fourth or not (first and second and third and fourth):
        return 0
    if len(set(unnumbered(olds))) == 1 and len(set(unnumbered(news))) == 1:
        return 1 if (first < second) == (third < fourth) else -1
    # Numbers of different rows must at least not contradict.
    return -1 if (first, second) == (fourth, third) else 0


def _by_word(olds: tuple[str, str], news: tuple[str, str]) -> int:
    """Return 1 if the words that differ match in this order, -1 in the opposite one, 0 in neither."""
    if olds == news:
        return 1
    common = (words(olds[0]) & words(olds[1])) | (words(news[0]) & words(news[1]))
    if olds == news[::-1] or any(akin(old, new, common) for old, new in zip(olds, news[::-1], strict=True)):
        return -1
    return int(all(akin(old, new, common) for old, new in zip(olds, news, strict=True)))
