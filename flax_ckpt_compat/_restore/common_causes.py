"""Find the one cause of all that differs: replicas of a state, raw PRNG keys, or another number of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.steps import numbered
from flax_ckpt_compat._core.text_formatting import Row, fold, literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, joined, node_at, show_path, topmost
from flax_ckpt_compat._restore.plan import ShapeDifference, TreePlan
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import Derived

_KEYS = (
    "The checkpoint holds raw keys where the target has typed ones: add rules.wrap_key_data({!r}) to the transforms, "
    "or give the target jax.random.key_data(key)."
)
_MAX_TOPS = 6
_MAX_PLACES = 4


def explain(plan: TreePlan) -> str:
    """Return the cause of all differences and its remedy, or empty if there is none that explains them all."""
    if plan.target is None or plan.missing:
        return "" if plan.target is None else of_layers(plan)
    shapes = [*plan.shapes, *_of_numbers(plan)]
    if len(shapes) < len(plan.shapes) + len(plan.kinds):
        return ""
    return of_shapes(shapes, plan.target.node, plan.arrays + len(plan.kinds)) or of_layers(plan)


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
    keys = [path for path, was, want in shapes if is_raw_key((path, was, want), target)]
    if not keys:
        return replicated(shapes, arrays)
    return _KEYS.format(_pattern_of(keys, target)) if len(keys) == len(shapes) else ""


def _pattern_of(keys: Sequence[Path], target: Node) -> str:
    """Return a pattern for keys and no other leaf of the target: whole paths if they are few, else those above them."""
    wanted = set(keys)
    places = list(topmost(target, wanted)) if len(keys) > _MAX_TOPS else list(keys)
    return "|".join(f"^{literal(joined(path))}" + ("$" if path in wanted else "/.*") for path in places)


def is_raw_key(one: ShapeDifference, target: Node) -> bool:
    """Return whether an array can be the data of the typed key that the target has: one more axis, of two or four."""
    path, was, want = one
    return prng_keys.is_prng_key(node_at(target, path)) and len(was) == len(want) + 1 and was[-1] in (2, 4)


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


def of_layers(plan: TreePlan) -> str:
    """Return what differs and what to do, or empty if something else differs."""
    if plan.target is None:
        return ""
    missing, target = plan.missing, plan.target.node
    return _numbered(missing, target, plan.tree) if missing else stacked(plan.shapes, target)


def stacked(shapes: Sequence[ShapeDifference], target: Node) -> str:
    """Return the explanation if whole subtrees of the target differ in the length of one axis alone, all alike."""
    changes = {_change(was, want) for _, was, want in shapes}
    tops = list(topmost(target, {path for path, _, _ in shapes}))
    if len(changes) != 1 or None in changes or not all(map(_is_stack, (node_at(target, top) for top in tops))):
        return ""
    axis, was, want = changes.pop()  # type: ignore[misc]
    lines = (
        f"They differ in the length of axis {axis} alone, {was} stored and {want} in the target: most likely the "
        f"number of layers, experts or ensemble members that nn.scan or nn.vmap stacks. Build the model with {was}"
    )
    places = {top[-1] for top in tops}
    pattern = literal(places.pop()) if len(places) == 1 else "|".join(literal(joined(top)) for top in tops)
    if len(tops) > _MAX_PLACES and "|" in pattern:
        return f"{lines}; rules.pad and rules.cut change the number."
    where = f"{pattern!r}, {want}{f', axis={axis}' if axis else ''}"
    if want > was:
        return f"{lines}. To add the target's own after the stored ones: rules.pad({where}, value='target')."
    return f"{lines}. To keep the first {want} only: rules.cut({where})."


def _change(was: tuple[int, ...], want: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return axis, stored length and the target's length if two shapes differ on that axis alone."""
    axes = [axis for axis, sizes in enumerate(zip(was, want, strict=False)) if sizes[0] != sizes[1]]
    return (axes[0], was[axes[0]], want[axes[0]]) if len(was) == len(want) and len(axes) == 1 else None


def _is_stack(node: Node) -> bool:
    """Return whether a subtree has arrays of several ranks or sizes: one that is alone may be an embedding."""
    return isinstance(node, Branch) and len({*leaf_shapes(node).values()} - {None}) > 1


def _numbered(missing: Sequence[Path], target: Node, stored: Node) -> str:
    """Return the explanation if layers are missing that would be the next in rows of numbered ones."""
    groups: dict[tuple[str, int, int], list[Path]] = {}
    for (place, stem), (count, wanted) in longer_rows(missing, target, stored).items():
        groups.setdefault((stem, count, wanted), []).append(place)
    return "\n".join(_of_row(*row, places) for row, places in groups.items())


def longer_rows(paths: Iterable[Path], longer: Node, shorter: Node) -> dict[tuple[Path, str], tuple[int, int]]:
    """Find numbered groups of equal layers with more layers in one tree than in the other.

    ``paths`` are the leaves that only the longer tree has. Returns place and text before the numbers → both counts."""
    rows: dict[Path, dict[str, set[int]]] = {}
    more: dict[tuple[Path, str], set[int]] = {}
    for path in paths:
        for end, name in enumerate(path):
            place, here = path[:end], node_at(shorter, path[:end])
            if not isinstance(here, Branch) or name in here.children:
                continue
            if place not in rows:
                rows[place] = _rows(here)
            if (row := numbered(name)) is not None and row[0] in rows[place]:
                more.setdefault((place, row[0]), set()).add(row[1])
            break
    found = {}
    for (place, stem), numbers in more.items():
        count, wanted = len(rows[place][stem]), len(rows[place][stem]) + len(numbers)
        last = leaf_shapes(node_at(shorter, (*place, f"{stem}{count - 1}")))
        others = [leaf_shapes(node_at(longer, (*place, f"{stem}{number}"))) for number in range(count, wanted)]
        is_longer = _rows(node_at(longer, place)).get(stem) == set(range(wanted))  # and not the same row from 1 on
        if is_longer and numbers == set(range(count, wanted)) and last and all(one == last for one in others):
            found[place, stem] = count, wanted
    return found


def cut_rows(unused: Sequence[Path], stored: Node, target: Node) -> str:
    """Return what a target has fewer of, in rows of numbered layers; or empty."""
    counts: dict[tuple[str, int, int], list[Path]] = {}
    for (place, stem), (count, had) in longer_rows(unused, stored, target).items():
        counts.setdefault((stem, had, count), []).append(place)
    lines = []
    for (stem, had, count), places in counts.items():
        shown, more = _names_of_row(stem, had, places)
        lines.append(
            f"The checkpoint has {shown} ({had}{more}), the target {count} of them. Build the model with {had}."
        )
    return "\n".join(lines)


def leaf_shapes(node: Node) -> dict[Path, Any]:
    """Return the shape of each leaf of a subtree; None for those that are not arrays. Empty containers do not count."""
    return {path: getattr(leaf, "shape", None) for path, leaf in iter_leaves(node) if not isinstance(leaf, Branch)}


def _rows(branch: Branch) -> dict[str, set[int]]:
    """Return the numbers of numbered subtrees of a branch by the text before the number."""
    rows: dict[str, set[int]] = {}
    for name, child in branch.children.items():
        if isinstance(child, Branch) and (row := numbered(name)) is not None:
            rows.setdefault(row[0], set()).add(row[1])
    return rows


def _names_of_row(stem: str, count: int, places: list[Path]) -> tuple[str, str]:
    """Return the names of a row's layers in the first place, and in how many more places they are."""
    above = show_path(places[0]) if places[0] else ""
    shown = fold(Row((f"{above}/{stem}{number}".lstrip("/"),)) for number in range(count))[0].names[0]
    return shown, f", and as many in {len(places) - 1} more places" if len(places) > 1 else ""


def _of_row(stem: str, count: int, wanted: int, places: list[Path]) -> str:
    above = [joined(place) for place in places]
    shown, more = _names_of_row(stem, count, places)
    text = (
        f"The checkpoint has {shown} ({count}{more}), the target {wanted} of them. Build the model with {count}, or "
        "keep the target's own values of the others with rules.from_target"
    )
    if len(places) > _MAX_PLACES:
        return f"{text}."
    names = "|".join(str(number) for number in range(count, wanted))
    start = literal(above[0]) if len(above) == 1 else f"({'|'.join(map(literal, above))})"
    pattern = f"{start}/{literal(stem)}({names})".lstrip("/")
    return f"{text}({pattern!r})."
