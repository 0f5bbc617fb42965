"""Compose messages about missing leaves and other shapes, with remedies, the safest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.text_formatting import Names, Row, fold, listed, literal, one_line, printable, shown
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_leaves, joined, node_at, show_path, topmost
from flax_ckpt_compat._restore import common_causes
from flax_ckpt_compat._restore.plan import ShapeDifference, TreePlan
from flax_ckpt_compat._trees.leaf_sources import is_array, shape_and_dtype

_MAX_STORED = 200
_MAX_TOPS = 4
_RENAMED = (
    "If they were saved under other names, map these with flax_ckpt_compat.rules, such as rules.rename('old', 'new'); "
    "flax_ckpt_compat.plan_restore previews the result."
)


def missing_leaves(plan: TreePlan) -> str:
    """Return the folded list of missing leaves, each with the nearest stored names of its shape; without remedies."""
    lines = [f"{plan.path} lacks {len(plan.missing)} of the leaves that the target asks for:"]
    rows, more = shown([Row((show_path(path),), ("empty",) * (path in plan.empty)) for path in plan.missing])
    names = Names(_names_of(plan.tree))
    held = {show_path(path): leaf.shape for path, leaf in iter_leaves(plan.tree) if is_array(leaf)}
    target = None if plan.target is None else plan.target.node
    arrays = ((path, *shape_and_dtype(node_at(target, path))) for path in plan.missing)
    wanted = {show_path(path): shape for path, shape, dtype in arrays if isinstance(dtype, np.dtype)}
    any_near = False
    for row in rows:
        size = wanted.get(row.names[0])  # None for a folded row, for keys, and for what is no array
        near = [name for name in names.nearest(row.names[0]) if size is None or held.get(name, size) == size]
        any_near = any_near or bool(near)
        similar = f"   (stored: {', '.join(near)})" if near else ""
        line = f"  {row.names[0]}{similar}{'   (empty: holds no values)' if row.detail else ''}{row.note}"
        lines.append(printable(line, one_line=True))
    if more:
        lines.append(
            f"  and {more} more; the error's attribute missing and flax_ckpt_compat.plan_restore name them all"
        )
    if not any_near:
        lines.append(_top_level(plan.tree))
    return "\n".join(lines)


def _names_of(stored: Node) -> list[str]:
    names = [show_path(path) for path, _ in iter_leaves(stored)]
    return names if len(names) <= _MAX_STORED else [row.names[0] for row in fold(Row((name,)) for name in names)]


def _top_level(stored: Node) -> str:
    if not isinstance(stored, Branch):
        return "The checkpoint is a single value, without names."
    if not stored.children:
        return "The checkpoint holds no names at all."
    return f"None of the stored names is similar. At the top level the checkpoint holds: {one_line(stored.children)}"


def missing_remedies(missing: Sequence[Path], target: Node, suggestion: str) -> str:
    """Return the remedies for missing leaves; ``suggestion`` has rules that map the checkpoint, or is empty."""
    # Where most of it is missing, this is another model, and nothing to keep part by part.
    is_little = 2 * len(missing) < sum(1 for _ in iter_leaves(target))
    rule = _from_target(target, missing) if is_little else ""
    named = f"name these leaves, orbax_transforms=[{rule}], or " if rule else ""
    return (
        f"{suggestion or _RENAMED}\nOnly where the target's own values are wanted, {named}"
        "pass orbax_transforms={} to restore_checkpoint or missing_leaves='ignore' to restore, or set "
        "flax_ckpt_compat.config.update(missing_leaves='ignore')."
    )


def changed_optimizer(guess: Any) -> str:
    """Return what a `Suggestion` that is no more than a guess says if it is about optimizers' states alone; or empty.

    Their states are matched by the names of their fields, so that no value gets into another one's place."""
    sources = [step.rule.source for step in guess.steps]
    carried = [source for source in sources if source.startswith("rules.optimizer_state(")]
    begun = [source for source in sources if source.startswith("rules.copy(")]
    if guess.remaining or not carried or len(carried) + len(begun) < len(sources):
        return ""
    text = (
        f"The optimizer is another one. {', '.join(carried)} carries over the state that both have, and keeps the "
        "target's for the rest"
    )
    if begun:
        return f"{text}; add {', '.join(begun)} where each step was one update, so that the new schedule goes on."
    return f"{text}; but {guess.doubts[0]}."


def taken_away(plan: TreePlan) -> str:
    """Return the sentence about a rule that moves a leaf for which the target asks under its stored name; or empty."""
    if (found := plan.taken_away()) is None:
        return ""
    return f"A rule moves the stored {show_path(found[0])} to {show_path(found[1])}: leave that rule out."


def unused_values(plan: TreePlan) -> list[Path]:
    """Return the unused stored leaves that hold values: None and empty containers do not."""
    stored = dict(iter_leaves(plan.tree)) if plan.unused else {}
    return [path for path in plan.unused if stored[path] is not None and not isinstance(stored[path], Branch)]


def unused_leaves(plan: TreePlan) -> str:
    """Return the folded list of stored leaves that the target lacks, with remedies."""
    assert plan.target is not None
    unused = unused_values(plan)
    rows, more = shown([Row((show_path(path),)) for path in unused])
    lines = [f"{plan.path} has {len(unused)} leaves that the target lacks, so a restore would drop them:"]
    lines += [printable(f"  {row.names[0]}{row.note}", one_line=True) for row in rows]
    lines += [f"  and {more} more; flax_ckpt_compat.plan_restore names them all"] if more else []
    if layers := common_causes.cut_rows(plan.unused, plan.tree, plan.target.node):
        lines.append(layers)
    else:
        lines.append("If the target should be what was saved, correct the configuration that it is made from.")
    tops = [literal(joined(path)) for path in topmost(plan.tree, set(unused))]
    rule = f"name them, orbax_transforms=[rules.drop({', '.join(map(repr, tops))})] (transforms= in restore), or "
    lines.append(
        f"To drop them all the same, {rule if 0 < len(tops) <= _MAX_TOPS else ''}pass unused_leaves='ignore' to "
        "restore, or set flax_ckpt_compat.config.update(unused_leaves='ignore')."
    )
    return "\n".join(lines)


def counts_of_schedules(plan: TreePlan) -> str:
    """Return a sentence that names the dropped counts of an optimizer's schedules, or empty."""
    named = [path for path in plan.unused if path and path[-1] == "count"]
    counts = [path for path in named if _is_count(node_at(plan.tree, path)) and _is_in_optimizer(plan, path)]
    if not counts:
        return ""
    return (
        f"the target's optimizer has no place for the step of a schedule, which is dropped: "
        f"{one_line(map(show_path, counts))}; with a schedule later on, that begins at step 0"
    )


def _is_in_optimizer(plan: TreePlan, path: Path) -> bool:
    """Return whether the target has part of what a stored leaf lies in, and that is a sequence, as optax chains."""
    node: Node = None if plan.target is None else plan.target.node
    for name in path:
        if not isinstance(node, Branch) or name not in node.children:
            break
        node = node.children[name]
    return isinstance(node, Branch) and node.container is not Container.DICT


def _is_count(leaf: Any) -> bool:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return shape == () and (dtype is None or np.issubdtype(dtype, np.integer))


def _from_target(target: Node, paths: Iterable[Path]) -> str:
    """Return the rule that keeps some of the target's leaves; empty if it would name many paths."""
    tops = [literal(joined(path)) for path in topmost(target, set(paths))]
    return f"rules.from_target({', '.join(map(repr, tops))})" if 0 < len(tops) <= _MAX_TOPS else ""


def other_shapes(
    shapes: Sequence[ShapeDifference],
    source: str,
    target: Node,
    *,
    arrays: int,
    refused: bool,
    cause: str = "",
    suggestion: str = "",
) -> str:
    """Return the folded list of shapes that differ, and the remedies.

    ``arrays`` is the number of stored arrays that the target asks for. If ``refused``, the restore fails; else the
    stored arrays are returned. ``cause`` explains all that differs, and ``suggestion`` has rules that map the
    checkpoint; or they are empty."""
    keys = {one[0] for one in shapes if common_causes.is_raw_key(one, target)}
    rows = [Row((show_path(path),), (_difference(was, want, path in keys),)) for path, was, want in shapes]
    have = "has" if len(shapes) == 1 else "have"
    lines = [f"{source}: {len(shapes)} of the stored arrays {have} another shape than the target's"]
    lines[0] += ":" if refused else "; they are returned as stored:"
    lines += listed(rows, "; flax_ckpt_compat.plan_restore names them all")
    cause = cause or common_causes.of_shapes(shapes, target, arrays) or _other_keys(shapes, target)
    cause = cause or common_causes.stacked(shapes, target)
    if cause or not suggestion:
        lines.append(cause or _changed(shapes, target, arrays))
    else:
        lines.append(suggestion)
    if refused:
        lines.append(
            "To get the stored arrays all the same, set flax_ckpt_compat.config.update(shape_mismatch='warn')."
        )
    return "\n".join(lines)


def _difference(was: tuple[int, ...], want: tuple[int, ...], is_key: bool) -> str:
    return f"stored {was}, target {want}" if not is_key else f"stored raw data {was}, target typed keys of shape {want}"


def _other_keys(shapes: Sequence[ShapeDifference], target: Node) -> str:
    """Return the remedy if all that differs are raw PRNG keys of another implementation, by shape and dtype."""
    for path, was, want in shapes:
        is_data = getattr(node_at(target, path), "dtype", None) == np.uint32 and was[:-1] == want[:-1]
        if not is_data or sorted((*was[-1:], *want[-1:])) != [2, 4]:
            return ""
    rule = _from_target(target, [path for path, _, _ in shapes]) or "rules.from_target"
    return (
        "They look like raw PRNG keys of another implementation: 2 numbers are one of threefry2x32, 4 of rbg. Make the "
        f"target's with the one that was saved (jax_default_prng_impl), or begin with new keys: {rule}."
    )


def _changed(shapes: Sequence[ShapeDifference], target: Node, arrays: int) -> str:
    line = "If the target should be the model that was saved, correct the model's configuration."
    if len(shapes) >= arrays:
        return line
    rule = _from_target(target, [path for path, _, _ in shapes]) or "rules.from_target"
    return (
        f"{line} If these parts are new on purpose, such as a head, {rule} keeps the target's own values; "
        "rules.pad, cut and reshape change stored ones."
    )
