"""Explain that only the number of layers differs: stacked on one axis of the arrays, or numbered one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flax_ckpt_compat._core.fold_names import Row, fold
from flax_ckpt_compat._core.module_names import numbered
from flax_ckpt_compat._core.regex_templates import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, joined, node_at, show_path, topmost
from flax_ckpt_compat._restore.plan import ShapeDifference, TreePlan

_MAX_PLACES = 4


def explain(plan: TreePlan) -> str:
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
