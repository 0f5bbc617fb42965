"""Say what speaks against a proposal: stored values that it leaves unused, names that differ, moments that restart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Node, Path, joined, node_at, show_path
from flax_ckpt_compat._suggest import moved_layers
from flax_ckpt_compat._suggest.leaf_features import (
    EMPTY,
    KEPT,
    MOMENTS,
    Look,
    Roles,
    Spot,
    bare,
    fits,
    flatten,
    is_t5x,
    leaves_at,
    look,
)
from flax_ckpt_compat._suggest.names import unnumbered
from flax_ckpt_compat._suggest.stacked_layers import ProposedRule
from flax_ckpt_compat._trees.leaf_sources import handles_of

_COUNTS = frozenset(("count", "gradient_step", "step"))
_MAX_UNUSED = 3


@dataclasses.dataclass
class Outcome:
    """Effect of a proposal."""

    pairs: dict[Path, Path]  # target path → path of the stored leaf it gets, or of the first one it is made of
    kept: dict[Path, Look]  # the target's leaves that stay as they are
    unused: dict[Path, Look]  # the stored leaves that nothing is made of
    stored: dict[Path, Look]
    goal: dict[Path, Look]
    had: Roles  # in the checkpoint
    has: Roles  # in the target


def judged(
    stored: Node, target: Node, tree: Node, steps: Sequence[ProposedRule], lacking: Sequence[Path]
) -> tuple[tuple[ProposedRule, ...], list[str]]:
    """Return the steps that produced ``tree``, with what those leave unused that keep the target's values; and doubts.

    There is a doubt if leaves are ``lacking`` still; if an unused array has the shape of one that was missing; if names
    speak against a pair of layers; or if moments may be those of another optimizer, or begin anew."""
    if lacking:
        return tuple(steps), [f"{len(lacking)} leaves are still missing, such as {show_path(lacking[0])}"]
    outcome = _outcome(stored, target, tree)
    # What stays at its place, too, is a copy, about which the rule has its own doubt.
    moved = {new: old for new, old in outcome.pairs.items() if new == old or outcome.pairs.get(old) != old}
    own = {new: old for new, old in moved.items() if not outcome.has.is_optimizer(new)}
    as_named, looks = _as_named(own, outcome, stored)
    found = dict.fromkeys(step.doubt for step in steps if step.doubt)
    judges = (
        *moved_layers.judges(as_named, looks),
        _unused(outcome),
        _exchanged(outcome),
        _twice(outcome),
        _begun(outcome),
    )
    # One doubt of each kind says enough.
    against = [*found, *chain.from_iterable(islice(judge, 1) for judge in judges)]
    return tuple(_with_unused(step, outcome) if step.keeps else step for step in steps), against


def _unused(outcome: Outcome) -> Iterator[str]:
    """Yield a doubt for unused arrays as large as a leaf that stays initial, or that a moved leaf may stand for."""
    places: dict[Any, Path] = {}
    for path, (shape, kind) in outcome.kept.items():
        if not outcome.has.is_optimizer(path):
            places.setdefault((math.prod(shape), kind), path)
    for new, old in outcome.pairs.items():
        if new != old:
            places.setdefault((_partners(outcome.had, old), outcome.stored[old]), new)
    for path, seen in outcome.unused.items():
        if seen[0]:
            place = places.get((_partners(outcome.had, path), seen))
            if not outcome.had.is_optimizer(path):
                place = places.get((math.prod(seen[0]), seen[1])) or place
            if place is not None:
                yield f"{show_path(path)} is not used, and is as large as {show_path(place)}"


def _partners(roles: Roles, path: Path) -> Any:
    """Return what leaves that may stand for each other share: the last name; of moments the field and the row."""
    spot = roles.spot(path)
    return (spot.field, unnumbered(spot.suffix)) if roles.is_optimizer(path) else bare(path)[-1]


def _with_unused(step: ProposedRule, outcome: Outcome) -> ProposedRule:
    """Return a step that keeps the target's values, with the unused stored values in its reason, likely ones first."""
    kept = [path for path in outcome.kept if any(path[: len(top)] == top for top in step.keeps)]
    is_optimizer = any(map(outcome.has.is_optimizer, kept))
    looks, ends = {outcome.kept[path] for path in kept}, {path[-1] for path in kept}
    idle = [path for path in outcome.unused if outcome.had.is_optimizer(path) == is_optimizer]
    idle.sort(key=lambda path: (outcome.unused[path] not in looks, path[-1] not in ends))
    if not idle:
        return step
    shown = one_line(map(show_path, idle[:_MAX_UNUSED]))
    more = f" and {len(idle) - _MAX_UNUSED} more" if len(idle) > _MAX_UNUSED else ""
    return dataclasses.replace(step, reason=f"{step.reason}; stored and unused: {shown}{more}")


def _outcome(stored: Node, target: Node, tree: Node) -> Outcome:
    """Return the source of each leaf after rules have produced ``tree`` from the checkpoint."""
    goal = flatten(target)
    result = Outcome({}, {}, unused(stored, tree, goal), flatten(stored), goal, Roles(stored), Roles(target))
    for path, leaf in leaves_at(tree):
        if goal.get(path, EMPTY) == EMPTY:
            continue
        if look(leaf) == KEPT:
            result.kept[path] = goal[path]
        elif handles := handles_of(leaf):
            result.pairs[path] = handles[0].path
            if len(handles) > 1:  # the row, without the numbers in which two of its layers differ
                names = zip(handles[0].path, handles[1].path, strict=False)
                result.pairs[path] = tuple(one if one == other else unnumbered((one,))[0] for one, other in names)
                if unnumbered(handles[0].path) != unnumbered(handles[1].path):
                    result.pairs[path] = path  # several layers are joined, about which the rule has its own doubt
            result.stored.setdefault(result.pairs[path], look(handles[0]))
    # Likewise a layer that is divided into several, of other names than those of a row.
    parts: dict[Path, set[Path]] = {}
    for new, old in result.pairs.items():
        parts.setdefault(old, set()).add(unnumbered(new))
    divided = {old for old, news in parts.items() if len(news) > 1}
    for new, old in result.pairs.items():
        if old in divided and not result.has.is_optimizer(new) and look(node_at(tree, new)) != result.stored[old]:
            result.pairs[new] = new
            result.stored.setdefault(new, result.stored[old])
    return result


def _as_named(pairs: dict[Path, Path], outcome: Outcome, stored: Node) -> tuple[dict[Path, Path], dict[Path, Look]]:
    """Return the pairs and the stored looks with the names that stored leaves would have in a linen state.

    A name that holds a key path is that path, and T5X's ``target`` holds the parameters."""
    named: dict[Path, Path] = {}
    looks = dict(outcome.stored)
    from_t5x = is_t5x(stored)
    for new, old in pairs.items():
        in_target = from_t5x and old[:1] == ("target",) != new[:1]
        named[new] = ("params", *old[1:]) if in_target else old
        parts = tuple(joined(named[new]).replace("/~/", "/").replace(".", "/").split("/"))
        if len(old) != len(new) and new[:-1] in (parts[:-1], parts[1:-1]) and len(parts) > len(old):
            named[new] = (*new[:-1], parts[-1])
        looks[named[new]] = outcome.stored[old]
    return named, looks


def unused(stored: Node, tree: Node, goal: dict[Path, Look]) -> dict[Path, Look]:
    """Map key paths to looks of the stored leaves that no leaf of the target uses."""
    wanted = (leaf for path, leaf in leaves_at(tree) if path in goal and fits(look(leaf), goal[path]))
    used = {id(handle) for leaf in wanted for handle in handles_of(leaf)}
    return {
        path: look(leaf) for path, leaf in leaves_at(stored) if isinstance(leaf, LeafHandle) and id(leaf) not in used
    }


def _exchanged(outcome: Outcome) -> Iterator[str]:
    """Yield a doubt if whole optimizers got other names, and nothing tells which of two is which."""
    leaves: dict[tuple[Path, Path], set[tuple[str, Look]]] = {}
    for new, old in outcome.pairs.items():
        ends = outcome.had.root_of(old), outcome.has.root_of(new)
        if ends[0] != ends[1] and () not in ends:
            spot = outcome.had.spot(old)
            leaves.setdefault(ends, set()).add((joined((spot.field, *spot.suffix)), outcome.stored[old]))
    return moved_layers.swappable([moved_layers.Moved(*ends, frozenset(held)) for ends, held in leaves.items()])


def _twice(outcome: Outcome) -> Iterator[str]:
    """Yield a doubt if a moment of two optimizers, for one parameter, comes from one that is stored."""
    first: dict[tuple[Path, Spot], Path] = {}
    for new, old in outcome.pairs.items():
        spot = outcome.has.spot(new)
        if spot.field in MOMENTS and (other := first.setdefault((old, spot), new)) != new:
            yield f"{show_path(other)} and {show_path(new)} would both come from {show_path(old)}"


def _begun(outcome: Outcome) -> Iterator[str]:
    """Yield a doubt if a count begins anew although moments are restored, or a moment although its parameter is."""
    restored = {path for path in outcome.pairs if outcome.has.is_optimizer(path)}
    trained = {path[start:] for path in outcome.pairs.keys() - restored for start in range(3)}
    fields = {outcome.has.spot(path).field for path in restored} & MOMENTS
    for path in outcome.kept if restored else ():
        spot = outcome.has.spot(path)
        if spot.field in _COUNTS:
            yield f"{show_path(path)} would begin anew, and so would a schedule that depends on it"
        elif spot.field in fields and spot.suffix in trained:
            yield f"{show_path(path)} would begin anew although its parameter does not"
