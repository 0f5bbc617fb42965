"""Propose rules for arrays that have their names and lie otherwise: axes of length 1, transposed, heads apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.text_formatting import literal
from flax_ckpt_compat._core.tree import Path, joined, show_path
from flax_ckpt_compat._suggest.leaf_features import TORCH_ORDERS, bare, is_torch_name, leaves_at, permuted
from flax_ckpt_compat._suggest.names import unnumbered
from flax_ckpt_compat._suggest.pairing import Pairing, State
from flax_ckpt_compat._suggest.stacked_layers import ProposedRule, merge_groups, split_groups

# Names in a pattern, and shapes that need a rule each: more are no evidence.
_MAX_NAMES, _MAX_SHAPES = 12, 8


@dataclasses.dataclass(frozen=True, slots=True)
class Misshapen:
    """A stored array where the target has another shape."""

    path: Path
    handle: LeafHandle
    wanted: tuple[int, ...]


def laid_out(pairing: Pairing, state: State) -> State:
    """Return the state after steps for the arrays that have as many values as the target's, in another layout."""
    arrays = [
        Misshapen(path, leaf, pairing.goal[path][0])
        for path, leaf in leaves_at(state.tree)
        if isinstance(leaf, LeafHandle) and leaf.kind is LeafKind.ARRAY and path in pairing.goal
    ]
    odd = [one for one in arrays if one.handle.shape != one.wanted]
    odd = [one for one in odd if math.prod(one.handle.shape) == math.prod(one.wanted)]
    grouped = list(_grouped(odd, arrays))
    rest = [one for one in odd if not any(name in one.path for name, _ in grouped)]
    steps = [_without_units(rest, arrays), _transposed(rest, arrays), _heads(rest, arrays)] if odd else []
    for proposed in ([step for _, step in grouped], *steps):
        for step in proposed:
            after = pairing.tried(state, [step])
            if after is not None and after.matched > state.matched:
                state = after
    return state


def _without_units(odd: Iterable[Misshapen], arrays: Sequence[Misshapen]) -> Iterator[ProposedRule]:
    """Yield the steps for axes of length 1 that come or go."""
    groups: dict[tuple[int, ...], list[Misshapen]] = {}
    for one in odd:
        if _squeezed(one.handle.shape) == _squeezed(one.wanted):
            # The length of the only axis that counts is that of the array.
            many = sum(size != 1 for size in one.wanted) == 1
            form = tuple(-1 if many and size != 1 else size for size in one.wanted)
            groups.setdefault(form, []).append(one)
    for form, group in groups.items() if len(groups) <= _MAX_SHAPES else ():
        if pattern := pattern_of(group, arrays):
            yield ProposedRule(rules.reshape(pattern, form), "axes of length 1 come or go, and all values stay")


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _transposed(odd: Iterable[Misshapen], arrays: Sequence[Misshapen]) -> Iterator[ProposedRule]:
    """Yield the steps for kernels whose axes have another order; square ones go with the others of their names."""
    groups: dict[tuple[int, ...], list[Misshapen]] = {}
    for one in odd:
        orders = TORCH_ORDERS.get(len(one.wanted), ()) if len(one.wanted) == len(one.handle.shape) else ()
        order = next((order for order in orders if permuted(one.handle.shape, order) == one.wanted), None)
        if order and _squeezed(one.handle.shape) != _squeezed(one.wanted):
            groups.setdefault(order, []).append(one)
    for order, group in groups.items():
        names = {(bare(one.handle.path)[-1], bare(one.path)[-1]) for one in group}
        square = [
            one
            for one in arrays
            if len(one.wanted) == len(order) and one.handle.shape == one.wanted == permuted(one.wanted, order)
            if (bare(one.handle.path)[-1], bare(one.path)[-1]) in names
        ]
        from_torch = all(is_torch_name(*pair) for pair in names)
        doubt = f"{show_path(group[0].path)} has the stored shape transposed, and may be another layer or size"
        if pattern := pattern_of([*group, *square] if from_torch else group, arrays):
            was, wanted = group[0].handle.shape, group[0].wanted
            yield ProposedRule(rules.transpose(pattern, order), f"transposed: stored {was}, target {wanted}", doubt)


def _grouped(odd: Sequence[Misshapen], arrays: Iterable[Misshapen]) -> Iterator[tuple[str, ProposedRule]]:
    """Yield the steps for stacks of layers in groups, or no longer in groups, with the names of the stacks."""
    changes: dict[str, set[tuple[tuple[int, int], bool]]] = {}
    ranks: dict[str, set[int]] = {}
    for one in odd:
        for wide, is_split in ((one.wanted, True), (one.handle.shape, False)):
            other = one.handle.shape if is_split else one.wanted
            if len(wide) == len(other) + 1 and (wide[0] * wide[1], *wide[2:]) == other:
                for name in set(one.path[:-1]):
                    changes.setdefault(name, set()).add((wide[:2], is_split))  # type: ignore[arg-type]
                    ranks.setdefault(name, set()).add(len(wide))
    members = {one.path for one in odd}
    mixed = {name for one in arrays if one.path not in members for name in one.path}
    done = set[str]()
    # The innermost name that all arrays of one stack have in common; arrays of one rank may be split anywhere.
    for one in odd:
        clear = [n for n in one.path[:-1] if len(changes.get(n, ())) == 1 and len(ranks[n]) > 1 and n not in mixed]
        if clear and not done.intersection(clear):
            done.add(clear[-1])
            ((groups, is_split),) = changes[clear[-1]]
            yield clear[-1], (split_groups if is_split else merge_groups)(clear[-1], groups)


def _heads(odd: Iterable[Misshapen], arrays: Sequence[Misshapen]) -> Iterator[ProposedRule]:
    """Yield the steps for an axis that became two, or two that became one, such as heads of attention."""
    groups: dict[tuple[int, ...], list[Misshapen]] = {}
    for one in odd:
        if _is_split(one.handle.shape, one.wanted) or _is_split(one.wanted, one.handle.shape):
            groups.setdefault(one.wanted, []).append(one)
    for shape, group in groups.items() if len(groups) <= _MAX_SHAPES else ():
        if pattern := pattern_of(group, arrays):
            doubt = f"{show_path(group[0].path)} has as many values, whose order in the new axes the shapes do not tell"
            yield ProposedRule(rules.reshape(pattern, shape), f"stored {group[0].handle.shape}", doubt)


def _is_split(whole: tuple[int, ...], parts: tuple[int, ...]) -> bool:
    """Return whether one axis of a shape is two in another one, and the others stay."""
    return len(parts) == len(whole) + 1 and any(
        (*parts[:axis], parts[axis] * parts[axis + 1], *parts[axis + 2 :]) == whole for axis in range(len(whole))
    )


def pattern_of(group: Iterable[Misshapen], arrays: Iterable[Misshapen]) -> str:
    """Return a pattern that matches these arrays, in parameters and moments, and no others; empty if that is long."""
    wanted = {one.path for one in group}
    others = [one.path for one in arrays if one.path not in wanted]
    for count in range(1, max(map(len, wanted)) + 1):
        for as_row in (True, False):
            ends = {(unnumbered(path[-count:]) if as_row else path[-count:]) for path in wanted}
            there = ((unnumbered(path[-count:]) if as_row else path[-count:]) for path in others)
            if ends.isdisjoint(there):
                return _pattern(ends, wanted, count, as_row=as_row) if len(ends) <= _MAX_NAMES else ""
    return ""


def _pattern(ends: set[Path], wanted: set[Path], count: int, *, as_row: bool) -> str:
    if as_row and len({path[-count:] for path in wanted}) > len(ends):
        texts = [literal(joined(end)).replace("#", r"\d+") for end in ends]
    else:
        texts = [literal(joined(end)) for end in {path[-count:] for path in wanted}]
    return "|".join(sorted(texts)) if len(texts) <= _MAX_NAMES else ""
