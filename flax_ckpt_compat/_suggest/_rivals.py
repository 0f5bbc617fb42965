"""Whether another leaf of the same shape might as well be the right one, for parameters and all but optimizers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from flax_ckpt_compat._core.tree import Path, show_path
from flax_ckpt_compat._suggest import _kept_judge, _numbers
from flax_ckpt_compat._suggest._akin import akin, natural, tells_apart
from flax_ckpt_compat._suggest._looks import Look, bare
from flax_ckpt_compat._suggest._meaning import may_be_one
from flax_ckpt_compat._suggest._numbers import Moved, Print
from flax_ckpt_compat._suggest._outcome import Outcome

_PAIRWISE = 60
_WINDOW = 8


def doubts(outcome: Outcome) -> list[str]:
    """Return the doubts about the sources of parameters, statistics and other leaves."""
    moved = _moved(outcome)
    idle = _layers({path: seen for path, seen in outcome.unused.items() if not outcome.had.is_optimizer(path)})
    fresh = _layers({path: seen for path, seen in outcome.kept.items() if not outcome.has.is_optimizer(path)})
    found = list(_weak(moved))
    found += _other_names(moved)
    found += _unlike(moved, [*idle, *fresh])
    found += _left_behind(moved, fresh)
    found += _swappable(moved)
    found += _replaceable(moved, idle, fresh)
    found += _numbers.doubts(moved, idle, fresh, outcome)
    found += _kept_judge.doubts(outcome)
    return found


def _moved(outcome: Outcome) -> list[Moved]:
    layers: dict[tuple[Path, Path], dict[str, Look]] = {}
    single: list[Moved] = []
    for new, old in outcome.pairs.items():
        if outcome.has.spot(new).field or bare(new) == bare(old):
            continue
        ours, theirs = bare(new), bare(old)
        seen = outcome.stored[old]
        if ours[-1] == theirs[-1]:
            layers.setdefault((theirs[:-1], ours[:-1]), {})[ours[-1]] = seen
        else:
            single.append(Moved(theirs, ours, frozenset({("", seen)})))
    return single + [Moved(old, new, frozenset(own.items())) for (old, new), own in layers.items()]


def _layers(leaves: dict[Path, Look]) -> dict[Path, dict[str, Look]]:
    found: dict[Path, dict[str, Look]] = {}
    for path, seen in leaves.items():
        path = bare(path)
        if path:
            found.setdefault(path[:-1], {})[path[-1]] = seen
    return found


def _weak(moved: Sequence[Moved]) -> Iterator[str]:
    """Single leaves for which shape and name say too little."""
    sure = {(one.old[-1], one.new[-1]) for one in moved if _is_leaf(one) and not _square(one) and _rank(one) > 1}
    for one in moved:
        if not _is_leaf(one):
            continue
        if _rank(one) <= 1 or (_square(one) and (one.old[-1], one.new[-1]) not in sure):
            yield f"only its shape says that {show_path(one.new)} is {show_path(one.old)}"


def _unlike(moved: Sequence[Moved], others: Sequence[Path]) -> Iterator[str]:
    """Single layers of unlike names for whose being the same too little speaks: one may have gone, another come."""
    changes: dict[tuple[Path, Path], list[Moved]] = {}
    for one in moved:
        old, new = core(_inside(one.old), _inside(one.new))
        changes.setdefault((_unnumbered(old), _unnumbered(new)), []).append(one)
    for (old, new), members in changes.items():
        if _is_leaf(members[0]) or len({_inside(one.old) for one in members}) > 1:
            continue
        if not old or not new:
            # One layer that went into or out of another, which has more that is new, or of which the rest is gone.
            alike = not any(_beside(members[0], path) for path in others)
        else:
            alike = akin("_".join(old), "_".join(new)) or _distinctive(members[0])
            alike = alike and _as_deep(members[0], old, new)
        if not alike:
            yield f"only their shapes say that {show_path(members[0].new)} is {show_path(members[0].old)}"
            return


def _other_names(moved: Sequence[Moved]) -> Iterator[str]:
    """Layers of which the old and the new name say different things, whatever the shapes are."""
    seen: set[tuple[Path, Path]] = set()
    for one in moved:
        change = core(_inside(one.old), _inside(one.new))
        if change not in seen and not may_be_one(*change, leaf=_is_leaf(one)):
            yield f"{show_path(one.new)} would come from {show_path(one.old)}, a name that says something else"
            return
        seen.add(change)


def _beside(one: Moved, path: Path) -> bool:
    return path[: len(one.new) - 1] == one.new[:-1] or path[: len(one.old) - 1] == one.old[:-1]


def _as_deep(one: Moved, old: Path, new: Path) -> bool:
    """Return whether a layer moves to a path as deep as its old one."""
    whole = core(one.old, one.new)
    return len(old) == len(new) or len(whole[0]) == len(whole[1])


def _inside(path: Path) -> Path:
    """Return a key path without linen's collection, which NNX lacks."""
    return path[1:] if path[:1] in (("params",), ("batch_stats",)) else path


def _unnumbered(path: Path) -> Path:
    return tuple(re.sub(r"\d+", "#", name) for name in path)


def _distinctive(one: Moved) -> bool:
    """Return whether a layer has a matrix that is not square; square ones are too common to tell."""
    return any(shape[-1] != shape[-2] for _, (shape, _) in one.print if len(shape) > 1)


def core(old: Path, new: Path) -> tuple[Path, Path]:
    """Return the parts of two key paths between their common beginning and end."""
    start = _same_start(old, new)
    old, new = old[start:], new[start:]
    end = _same_start(old[::-1], new[::-1])
    return old[: len(old) - end], new[: len(new) - end]


def _left_behind(moved: Sequence[Moved], fresh: dict[Path, dict[str, Look]]) -> Iterator[str]:
    """Layers that would go elsewhere although the target has one of their name, which would get nothing."""
    for one in moved:
        if one.new in fresh:
            yield f"{show_path(one.new)} would come from {show_path(one.old)}, parts of which have other shapes"
            return
        if one.old in fresh:
            yield f"{show_path(one.old)} would go to {show_path(one.new)} and leave the one of its own name behind"
            return


def _is_leaf(one: Moved) -> bool:
    return any(name == "" for name, _ in one.print)


def _rank(one: Moved) -> int:
    return max(len(shape) for _, (shape, _) in one.print)


def _square(one: Moved) -> bool:
    shape = next(iter(one.print))[1][0]
    return len(shape) > 1 and shape[-1] == shape[-2]


def _swappable(moved: Sequence[Moved]) -> Iterator[str]:
    """Two moved layers of one shape that nothing tells apart."""
    groups: dict[Print, list[Moved]] = {}
    wholes: dict[tuple[Path, Path], set[tuple[Path, Print]]] = {}
    for one in moved:
        groups.setdefault(one.print, []).append(one)
        change = core(one.old, one.new)
        wholes.setdefault(change, set()).add((_after(one.old, change[0]), one.print))
    for group in groups.values():
        # One of each change: layers inside of one that is renamed go with it.
        of_change = {core(one.old, one.new): one for one in reversed(group)}
        by_old = {"\0".join((*one.old, "\1", *one.new)): one for one in of_change.values()}
        ordered = [by_old[key] for key in natural(by_old)]
        reach = len(ordered) if len(ordered) <= _PAIRWISE else _WINDOW
        for number, one in enumerate(ordered):
            for other in ordered[number + 1 : number + 1 + reach]:
                # Parts of subtrees that differ elsewhere go where those go.
                whole = wholes[core(one.old, one.new)] != wholes[core(other.old, other.new)]
                if not _told_apart(one, other) and not whole:
                    yield f"nothing says which of {show_path(one.old)} and {show_path(other.old)} goes where"
                    return


def _after(path: Path, change: Path) -> Path:
    """Return the names after those that change."""
    for start in range(len(path) - len(change) + 1):
        if path[start : start + len(change)] == change:
            return path[start + len(change) :]
    return path


def _told_apart(one: Moved, other: Moved) -> bool:
    if one.old == other.old or one.new == other.new:
        return True
    first = tells_apart(_parting(one.old, other.old), _parting(one.new, other.new))
    last = tells_apart(_parting(one.old[::-1], other.old[::-1]), _parting(one.new[::-1], other.new[::-1]))
    if False in (first, last):
        return False
    straight = _sum(_shared(one.old, one.new), _shared(other.old, other.new))
    crossed = _sum(_shared(one.old, other.new), _shared(other.old, one.new))
    shares_more = straight != crossed and straight[0] >= crossed[0] and straight[1] >= crossed[1]
    return True in (first, last) or shares_more


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _parting(one: Path, other: Path) -> tuple[str, str]:
    """Return the first names in which two key paths differ."""
    for left, right in zip(one, other, strict=False):
        if left != right:
            return left, right
    short = min(len(one), len(other))
    return (one[short] if len(one) > short else ""), (other[short] if len(other) > short else "")


def _replaceable(
    moved: Sequence[Moved], idle: dict[Path, dict[str, Look]], fresh: dict[Path, dict[str, Look]]
) -> Iterator[str]:
    """Yield a doubt for a moved layer if an unused stored one, or one that the target keeps, fits as well."""
    for one in moved:
        for path in _fitting(one, idle):
            if not _better(one.old, path, one.new):
                yield f"{show_path(path)} fits {show_path(one.new)} as well as {show_path(one.old)} does"
                return
        for path in _fitting(one, fresh):
            if not _better(one.new, path, one.old):
                yield f"{show_path(one.old)} fits {show_path(path)} as well as {show_path(one.new)}"
                return


def _fitting(one: Moved, layers: dict[Path, dict[str, Look]]) -> Iterator[Path]:
    if _is_leaf(one):
        seen = next(iter(one.print))[1]
        yield from ((*path, name) for path, own in layers.items() for name, look in own.items() if look == seen)
        return
    names = {name for name, _ in one.print}
    # Layers of the same leaves, one of which has the same shape: what surrounds them may have changed the others.
    yield from (path for path, own in layers.items() if own.keys() >= names and one.print & own.items())


def _better(right: Path, rival: Path, there: Path) -> bool:
    """Return whether names favor one key path over its rival as the match of a third."""
    ours, theirs = (_shared(right, there), _shared(rival, there))
    return ours != theirs and ours[0] >= theirs[0] and ours[1] >= theirs[1]


def _shared(one: Path, other: Path) -> tuple[int, int]:
    """How many names two key paths share at their beginning and at their end."""
    return _same_start(one, other), _same_start(one[::-1], other[::-1])


def _same_start(one: Path, other: Path) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
