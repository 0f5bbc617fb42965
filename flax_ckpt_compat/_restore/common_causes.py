"""Find the one cause that explains all shapes and kinds that differ: replicas of a state, raw PRNG keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.regex_templates import literal
from flax_ckpt_compat._core.tree import Node, Path, joined, node_at, topmost
from flax_ckpt_compat._restore import layer_counts
from flax_ckpt_compat._restore.plan import ShapeDifference, TreePlan
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import Derived

_KEYS = (
    "The checkpoint holds raw keys where the target has typed ones: add rules.wrap_key_data({!r}) to the transforms, "
    "or give the target jax.random.key_data(key)."
)
_MAX_TOPS = 6


def explain(plan: TreePlan) -> str:
    """Return the cause of all differences and its remedy, or empty if there is none that explains them all."""
    if plan.target is None or plan.missing:
        return "" if plan.target is None else layer_counts.explain(plan)
    shapes = [*plan.shapes, *_of_numbers(plan)]
    if len(shapes) < len(plan.shapes) + len(plan.kinds):
        return ""
    return of_shapes(shapes, plan.target.node, plan.arrays + len(plan.kinds)) or layer_counts.explain(plan)


def _of_numbers(plan: TreePlan) -> list[ShapeDifference]:
    """Return the shapes of arrays that are stored where the target has numbers, such as a replicated state's step."""
    assert plan.target is not None
    found: list[ShapeDifference] = []
    for one in plan.kinds:
        stored, wanted = node_at(plan.tree, one.path), node_at(plan.target.node, one.path)
        is_array = isinstance(stored, LeafHandle) and stored.kind is LeafKind.ARRAY
        if (is_array or isinstance(stored, Derived)) and stored.shape and isinstance(wanted, int | float | np.generic):
            found.append((one.path, stored.shape, ()))
    return found


def of_shapes(shapes: Sequence[ShapeDifference], target: Node, arrays: int) -> str:
    """Return the cause of shapes that differ, and its remedy; empty if it does not explain all of them.

    ``arrays`` is the number of stored arrays that the target asks for."""
    keys = [one for one in shapes if is_raw_key(one, target)]
    rest = [one for one in shapes if one not in keys]
    # Raw keys that are replicated, too, have the axis of the replicas first.
    copies = [one for one in rest if _is_raw_replica(one, target)]
    if keys and not rest:
        return _KEYS.format(_pattern_of([path for path, _, _ in keys], target))
    plain = [one for one in rest if one not in copies]
    if len(shapes) < arrays or (not plain and not copies):
        return ""
    if not keys and not copies:
        return replicated(plain, arrays)
    lengths = {was[0] for _, was, _ in copies} | {_leading_axis([(was, want)]) for _, was, want in plain}
    if len(lengths) != 1 or None in lengths:
        return ""
    count = lengths.pop()
    tops = "" if not keys else repr("|".join(sorted({literal(path[0]) for path, _, _ in rest})))
    if keys and {path[0] for path, _, _ in keys} & {path[0] for path, _, _ in rest}:
        return ""
    pattern = _pattern_of([path for path, _, _ in (keys or copies)], target)
    where = "but its PRNG keys " if keys else ""
    return (
        f"Every stored array {where}has a leading axis of {count} that the target's lacks, as of a state saved without "
        f"flax.jax_utils.unreplicate, and its PRNG keys are raw where the target has typed ones: add "
        f"rules.unreplicate({tops}), rules.wrap_key_data({pattern!r}) to the transforms."
    )


def _pattern_of(keys: Sequence[Path], target: Node) -> str:
    """Return a pattern for keys and no other leaf of the target: whole paths if they are few, else those above them."""
    wanted = set(keys)
    places = list(topmost(target, wanted)) if len(keys) > _MAX_TOPS else list(keys)
    return "|".join(f"^{literal(joined(path))}" + ("$" if path in wanted else "/.*") for path in places)


def is_raw_key(one: ShapeDifference, target: Node) -> bool:
    """Return whether an array can be the data of the typed key that the target has."""
    path, was, want = one
    return prng_keys.is_prng_key(node_at(target, path)) and _is_raw(was, want)


def _is_raw(was: tuple[int, ...], want: tuple[int, ...]) -> bool:
    """Return whether a stored shape can be that of PRNG key data: one more axis, of length two or four."""
    return len(was) == len(want) + 1 and was[-1] in (2, 4)


def _is_raw_replica(one: ShapeDifference, target: Node) -> bool:
    path, was, want = one
    return prng_keys.is_prng_key(node_at(target, path)) and len(was) == len(want) + 2 and _is_raw(was[1:], want)


def replicated(shapes: Sequence[ShapeDifference], arrays: int) -> str:
    """Return the remedy if all arrays on one side have one more leading axis of the same length, as for pmap."""
    if len(shapes) < arrays:
        return ""
    both = [(was[0], want[0]) for _, was, want in shapes if was and want and was[1:] == want[1:]]
    # Without the axis, a replicated state has numbers such as its step; else this may be the number of layers.
    ranks = {len(was) for _, was, _ in shapes}
    if len(both) == len(shapes) and len(set(both)) == 1 and 1 in ranks and len(ranks) > 1:
        had, has = both[0]
        return (
            f"Every stored array has a leading axis of {had}, the target's of {has}, as from "
            "flax.jax_utils.replicate on another number of devices: add rules.unreplicate() to the transforms, restore "
            "into flax.jax_utils.unreplicate(target), and replicate afterwards."
        )
    if (axis := _leading_axis((want, was) for _, was, want in shapes)) is not None:
        return (
            f"Every array of the target has a leading axis of {axis} that the stored one lacks, as from "
            "flax.jax_utils.replicate: restore into flax.jax_utils.unreplicate(target), and replicate afterwards."
        )
    if (axis := _leading_axis((was, want) for _, was, want in shapes)) is not None:
        return (
            f"Every stored array has a leading axis of {axis} that the target's lacks, as of a state saved "
            "without flax.jax_utils.unreplicate: add rules.unreplicate() to the transforms."
        )
    return ""


def _leading_axis(pairs: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> int | None:
    """Return the length of the leading axis that all first shapes have beside the second ones; None if they differ."""
    lengths = {longer[0] if longer and longer[1:] == shorter else None for longer, shorter in pairs}
    return lengths.pop() if len(lengths) == 1 else None
