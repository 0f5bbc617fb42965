"""Propose rules for arrays that have their names and lie otherwise: axes of length 1, transposed, heads apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.text_formatting import literal
from flax_ckpt_compat._core.tree import Path, joined, show_path
from flax_ckpt_compat._suggest.leaf_features import bare, is_torch_name, leaves_at, turned
from flax_ckpt_compat._suggest.names import unnumbered
from flax_ckpt_compat._suggest.pairing import Pairing, State
from flax_ckpt_compat._suggest.stacked_layers import ProposedRule

# Names in a pattern, and shapes that need a rule each: more are no evidence.
_MAX_NAMES, _MAX_SHAPES = 12, 16
Shape = tuple[int, ...]


class Stored(NamedTuple):
    """A stored array at its place in the target."""

    path: Path
    was: Path  # before the rules so far
    shape: Shape
    wanted: Shape


def laid_out(pairing: Pairing, state: State) -> State:
    """Return the state after steps for the arrays that have as many values as the target's, in another layout."""
    arrays = [
        Stored(path, leaf.path, leaf.shape, pairing.goal[path][0])
        for path, leaf in leaves_at(state.tree)
        if isinstance(leaf, LeafHandle) and leaf.kind is LeafKind.ARRAY and path in pairing.goal
    ]
    groups: dict[tuple[str, Shape], list[Stored]] = {}
    for one in arrays:
        if one.shape != one.wanted and math.prod(one.shape) == math.prod(one.wanted) and (change := _change(one)):
            groups.setdefault(change, []).append(one)
    for (kind, argument), group in groups.items() if len(groups) <= _MAX_SHAPES else ():
        step = _step(kind, argument, group, arrays)
        after = pairing.tried(state, [step]) if step else None
        state = after if after is not None and after.matched > state.matched else state
    return state


def _change(one: Stored) -> tuple[str, Shape] | None:
    """Return what became of an array, and the argument of the rule for it."""
    if _squeezed(one.shape) == _squeezed(one.wanted):
        # The length of the only axis that counts is that of the array.
        is_vector = len(_squeezed(one.wanted)) == 1
        return "squeezed", tuple(-1 if is_vector and size != 1 else size for size in one.wanted)
    for order in turned(one.shape, one.wanted):
        return "transposed", order
    if _is_split(one.shape, one.wanted) or _is_split(one.wanted, one.shape):
        return "heads", one.wanted
    return None


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _is_split(whole: Shape, parts: Shape) -> bool:
    """Return whether one axis of a shape is two in another one, and the others stay."""
    return len(parts) == len(whole) + 1 and any(
        (*parts[:axis], parts[axis] * parts[axis + 1], *parts[axis + 2 :]) == whole for axis in range(len(whole))
    )


def _step(kind: str, argument: Shape, group: list[Stored], arrays: Iterable[Stored]) -> ProposedRule | None:
    """Return the step for a group of arrays."""
    one, names = group[0], {(bare(one.was)[-1], bare(one.path)[-1]) for one in group}
    if kind == "transposed" and all(is_torch_name(*pair) for pair in names):  # square ones go with the others
        square = [one for one in arrays if one.shape == one.wanted and argument in turned(one.shape, one.wanted)]
        group = [*group, *(one for one in square if (bare(one.was)[-1], bare(one.path)[-1]) in names)]
    if not (pattern := pattern_of(group, arrays)):
        return None
    if kind == "squeezed":
        return ProposedRule(rules.reshape(pattern, argument), "axes of length 1 come or go, and all values stay")
    if kind == "heads":
        doubt = f"{show_path(one.path)} has as many values, whose order in the new axes the shapes do not tell"
        return ProposedRule(rules.reshape(pattern, argument), f"stored {one.shape}", doubt)
    doubt = f"{show_path(one.path)} has the stored shape transposed, and may be another layer or size"
    reason = f"transposed: stored {one.shape}, target {one.wanted}"
    return ProposedRule(rules.transpose(pattern, argument), reason, doubt)


def pattern_of(group: Iterable[Stored], arrays: Iterable[Stored]) -> str:
    """Return a pattern that matches these arrays, in parameters and moments, and no others; empty if that is long."""
    wanted = {one.path for one in group}
    others = [one.path for one in arrays if one.path not in wanted]
    for count, is_row in itertools.product(range(1, max(map(len, wanted)) + 1), (True, False)):
        named = {path: unnumbered(path[-count:]) if is_row else path[-count:] for path in (*wanted, *others)}
        ends, exact = {named[path] for path in wanted}, {path[-count:] for path in wanted}
        if ends.isdisjoint(named[path] for path in others):
            if len(ends) < len(exact):
                texts = [literal(joined(end)).replace("#", r"\d+") for end in ends]
            else:
                texts = [literal(joined(end)) for end in exact]
            return "|".join(sorted(texts)) if len(texts) <= _MAX_NAMES else ""
    return ""
