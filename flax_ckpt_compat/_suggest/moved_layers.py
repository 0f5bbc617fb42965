"""Judge whether renamed layers may be different layers: by names, by other layers of the same shape, by numbers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flax_ckpt_compat._core.module_names import numbered
from flax_ckpt_compat._core.tree import Path, show_path
from flax_ckpt_compat._suggest.leaf_features import Look, bare
from flax_ckpt_compat._suggest.names import (
    BY_FLAX,
    akin,
    is_named_anew,
    may_be_one,
    natural,
    unnumbered,
    words,
)
from flax_ckpt_compat._suggest.torch_layouts import is_symmetric, is_torch_name

# Of how many layers of one shape all pairs are compared; of more, those that are near each other in natural order.
_PAIRWISE, _WINDOW, _COMPARISONS = 20, 8, 8000
# Number of others that may fit a layer and yet be told from it by their places.
_MAX_FITTING = 64
# Number of leaves of a subtree that no other one resembles by chance.
_MANY = 12
Leaves = frozenset[tuple[str, Look]]  # names and looks
Layers = dict[Path, Leaves]


class Moved(NamedTuple):
    """A renamed layer, or a renamed single leaf."""

    old: Path
    new: Path
    leaves: Leaves  # of a single leaf the look alone

    @property
    def is_leaf(self) -> bool:
        """Return whether this is a single leaf."""
        return any(name == "" for name, _ in self.leaves)


def judges(
    pairs: dict[Path, Path],
    stored: dict[Path, Look],
    goal: dict[Path, Look],
    idle: dict[Path, Look],
    fresh: dict[Path, Look],
) -> tuple[Iterator[str], ...]:
    """Return iterators of doubts about the sources (target path → stored path) of all leaves except optimizers'."""
    layers: dict[tuple[Path, Path], set[tuple[str, Look]]] = {}
    for new, old in pairs.items():
        ours, theirs = bare(new), bare(old)
        ends = (theirs[:-1], ours[:-1]) if ours[-1] == theirs[-1] else (theirs, ours)
        layers.setdefault(ends, set()).add((ours[-1] if len(ends[0]) < len(theirs) else "", stored[old]))
    found = [Moved(old, new, frozenset(leaves)) for (old, new), leaves in layers.items()]
    moved = sorted((one for one in found if one.old != one.new), key=lambda one: not one.is_leaf)
    unused, kept = _layers(idle), _layers(fresh)
    return (
        *(_names(moved), _swappable(moved), _replaceable(moved, unused, kept), _numbers(found, moved, unused, kept)),
        *(_transposed(moved), _crossed(moved)),
        *(
            _grown({new: goal[new] for new in pairs}, kept),
            _grown({old: stored[old] for old in pairs.values()}, unused),
        ),
    )


def _layers(looks: dict[Path, Look]) -> Layers:
    found: dict[Path, set[tuple[str, Look]]] = {}
    for path, seen in looks.items():
        found.setdefault(bare(path)[:-1], set()).add((bare(path)[-1], seen))
    return {path: frozenset(leaves) for path, leaves in found.items()}


def _names(moved: Sequence[Moved]) -> Iterator[str]:
    """Yield a doubt for layers whose names differ in meaning, and for single ones with too little in common."""
    groups: dict[tuple[Path, Path], list[Moved]] = {}
    for one in moved:
        old, new = core(_inside(one.old), _inside(one.new))
        groups.setdefault((unnumbered(old), unnumbered(new)), []).append(one)
    for (old, new), members in groups.items():
        changes = {core(_inside(one.old), _inside(one.new)): one for one in reversed(members)}
        in_row = _is_shifted(list(changes))
        # A name is evidence against a partner where there could be others, and not for a model as a whole.
        is_whole = sum(len(one.leaves) for one in members) >= _MANY and all(not one.is_leaf for one in members)
        for change, one in changes.items():
            if is_whole and is_named_anew(*change):
                continue
            if not may_be_one(*change, leaf=one.is_leaf, in_row=in_row):
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


def _is_shifted(changes: Sequence[tuple[Path, Path]]) -> bool:
    """Return whether a row of several layers is numbered from 0 instead of 1, or from 1 instead of 0."""
    ends = [(numbered(old[-1]), numbered(new[-1])) for old, new in changes if old and new]
    numbers = {(one[1], other[1]) for one, other in ends if one and other}
    firsts = [min(side) for side in zip(*numbers, strict=True)]
    return len(numbers) > 1 and sorted(firsts) == [0, 1] and len({new - old for old, new in numbers}) == 1


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


def _swappable(moved: Sequence[Moved]) -> Iterator[str]:
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
                if not told_apart(one[:2], two[:2]):
                    yield f"nothing says which of {show_path(one.old)} and {show_path(two.old)} goes where"


def told_apart(one: tuple[Path, Path], other: tuple[Path, Path], *, nested: bool = False) -> bool:
    """Return whether names pair two old paths with two new ones; if ``nested``, they only must not object."""
    if one[0] == other[0] or one[1] == other[1]:
        return True
    votes = []
    for step in (1, -1):
        olds, news = (_parting(left[::step], right[::step]) for left, right in zip(one, other, strict=True))
        votes += [_by_number(olds, news), _by_word(olds, news)]
    return -1 not in votes and (1 in votes or (nested and not any(votes)))


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


def _replaceable(moved: Sequence[Moved], idle: Layers, fresh: Layers) -> Iterator[str]:
    """Yield a doubt for a moved layer if an unused stored layer, or one that the target keeps, fits equally well."""
    by_leaf = _by_leaf(idle), _by_leaf(fresh)
    for one in moved:
        for layers, leaves, right, there in (
            (idle, by_leaf[0], one.old, one.new),
            (fresh, by_leaf[1], one.new, one.old),
        ):
            for number, path in enumerate(_fitting(one, layers, leaves)):
                ours, theirs = ((_same_start(end, there), _same_start(end[::-1], there[::-1])) for end in (right, path))
                if ours == theirs or ours[0] < theirs[0] or ours[1] < theirs[1] or number > _MAX_FITTING:
                    yield f"{show_path(path)} fits {show_path(there)} as well as {show_path(right)} does"
                    break


def _by_leaf(layers: Layers) -> dict[tuple[str, Look], list[Path]]:
    """Return the layers that have a leaf of a name and look; below ``""`` the leaves of a look."""
    found: dict[tuple[str, Look], list[Path]] = {}
    for path, leaves in layers.items():
        for name, seen in leaves:
            found.setdefault((name, seen), []).append(path)
            found.setdefault(("", seen), []).append((*path, name))
    return found


def _fitting(one: Moved, layers: Layers, by_leaf: dict[tuple[str, Look], list[Path]]) -> Iterator[Path]:
    names = {name for name, _ in one.leaves}
    for path in dict.fromkeys(itertools.chain.from_iterable(by_leaf.get(leaf, ()) for leaf in one.leaves)):
        # Layers of the same leaves, one of which has the same shape: what surrounds them may have changed the others.
        if one.is_leaf or names <= {name for name, _ in layers[path]}:
            yield path


def _grown(others: dict[Path, Look], layers: Layers) -> Iterator[str]:
    """Yield a doubt if a row of one tree has layers of which the other tree has none, like those that both have."""
    held = {path[:end] for path in others for end in range(len(path) + 1)} if layers else set()
    rows: dict[tuple[Path, str], set[tuple[str, Look]]] = {}
    for path, seen in others.items() if layers else ():
        for place, name in enumerate(path[:-1]):
            if row := numbered(name):
                rows.setdefault((path[:place], row[0]), set()).add((bare(path)[-1], seen))
    for path, leaves in layers.items():
        place = next((place for place in range(len(path)) if path[: place + 1] not in held), len(path))
        row = numbered(path[place]) if place < len(path) else None
        if row and not leaves.isdisjoint(rows.get((path[:place], row[0]), ())):
            yield f"{show_path(path)} may be one that others of its row had, with another number"


Row = tuple[Path, str, Path]  # names before, text before the number, names after


def _numbers(found: Sequence[Moved], moved: Sequence[Moved], idle: Layers, fresh: Layers) -> Iterator[str]:
    """Yield a doubt if layers keep their numbers although their row grows or shrinks: they may have shifted."""
    had: dict[Row, Leaves] = {}
    has: dict[Row, Leaves] = {}
    for old, new, leaves in found:
        for rows, path, other in ((had, old, new), (has, new, old)):
            for key in _rows(path, other, kept=True):
                rows[key] = rows.get(key, frozenset()) | leaves
    gone = [*moved, *(Moved(path, (), leaves) for path, leaves in idle.items())]
    come = [*moved, *(Moved((), path, leaves) for path, leaves in fresh.items())]
    changed = [(had, one.old, one.new, one.leaves) for one in gone]
    changed += [(has, one.new, one.old, one.leaves) for one in come]
    for rows, path, other, leaves in changed:
        # One leaf of the same name and shape is enough: the others may be what the change was about.
        if any(rows.get(key, frozenset()) & leaves for key in _rows(path, other, kept=False)):
            yield f"the numbers of others beside {show_path(path)} may have shifted, as it comes or goes"
    same = (one for one in found if one.new and one.old[-1:] == one.new[-1:] and BY_FLAX.fullmatch(one.new[-1]))
    by_flax = {(one.new[:-1], one.leaves) for one in same}
    for path, leaves in fresh.items():
        if (path[:-1], leaves) in by_flax:
            yield f"{show_path(path)} may be what Flax gave a number before"


def _rows(path: Path, other: Path, *, kept: bool) -> Iterator[Row]:
    """Yield the rows of numbered names in which a layer keeps its number, or changes it."""
    numbers = {(found[1], other[place + 1 :]) for place, name in enumerate(other) if (found := numbered(name))}
    # Below a number, levels may come and go.
    in_order = [found[1] for name in other if (found := numbered(name))]
    places = [place for place, name in enumerate(path) if numbered(name)]
    in_order = in_order if len(in_order) == len(places) else []
    for order, place in enumerate(places):
        stem, number = numbered(path[place]) or ("", 0)
        same = (number, path[place + 1 :]) in numbers or in_order[order : order + 1] == [number]
        if same == kept:
            yield path[:place], stem, path[place + 1 :]
