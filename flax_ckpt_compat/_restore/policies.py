"""Apply the policies to a planned restore: raise, warn or ignore, with the facts, then remedies, the safest first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat import config
from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core.numbered_names import numbered
from flax_ckpt_compat._core.text_formatting import Row, fold, listed, literal, one_line, printable, shown
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_leaves, joined, node_at, show_path, topmost
from flax_ckpt_compat._restore import leaf_kinds
from flax_ckpt_compat._restore.match import plan_tree
from flax_ckpt_compat._restore.plan import ShapeDifference, TreePlan
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import is_key, nearest, shape_and_dtype
from flax_ckpt_compat.rules.optimizers import FIELDS

_log = logging.getLogger("flax_ckpt_compat")
_MOMENTS = FIELDS - {"count", "ema"}  # of optimizers: no parameter is one of them, nor one another
_MAX_TOPS = 4
_MANY = 20_000  # stored leaves, above which errors propose no rules
_MAX_TEXT = 2000  # characters of a proposal, above which errors do not print it
_RENAMED = (
    "If they were saved under other names, or by another optimizer, flax_ckpt_compat.plan_restore proposes rules, such "
    "as rules.rename('old', 'new') and rules.optimizer_state(), and previews the result."
)

# An error's class and its factory: messages with suggestions take long, and a plan needs none.
Refusal = tuple[type[errors.CheckpointError], Callable[[], errors.CheckpointError]]


def refusals(plan: TreePlan, *, as_flax: bool = False, proposes: bool = True) -> Iterator[Refusal]:
    """Yield the errors of a restore, which raises the first; or ``as_flax`` those of ``restore_checkpoint``.

    Those about kinds propose rules unless a plan does it, which does not list the kinds."""
    transforms, settings = plan.options.transforms, config.current() if as_flax else plan.options.settings
    lenient = transforms.orbax_semantics if as_flax else transforms.lenient
    if plan.missing and not lenient and settings.missing_leaves == "error":
        yield errors.MissingLeavesError, lambda: _missing_error(plan)
    if plan.kinds and settings.kind_mismatch == "error":  # before what is unused: entries of a longer sequence are, too
        yield errors.KindMismatchError, lambda: _kinds_error(plan, proposes)
    if _unused_policy(plan, settings, lenient=lenient) == "error":
        yield errors.UnusedLeavesError, lambda: _unused_error(plan)
    if plan.shapes and settings.shape_mismatch == "error":
        yield errors.ShapeMismatchError, lambda: _shapes_error(plan, plan.shapes)
    for problem in plan.problems:
        yield type(problem), lambda problem=problem: problem  # type: ignore[misc]


def enforce(plan: TreePlan) -> None:
    """Apply all policies: raise the first of `refusals`, or log the differences."""
    settings, lenient = plan.options.settings, plan.options.transforms.lenient
    missing = tuple(map(show_path, plan.missing))
    if plan.target is not None and (unmatched := plan.options.transforms.explain_unmatched(plan.target.node)):
        kept = f"; these leaves kept the target's own values: {one_line(missing)}" if missing and lenient else ""
        _log.warning("%s: %s%s", plan.path, unmatched, kept)
    for _, error in refusals(plan):
        raise error()
    if missing and lenient:
        _log.info("%s: not in the checkpoint, kept: %s", plan.path, one_line(missing))
    elif missing and settings.missing_leaves == "warn":
        _log.warning("%s\nThe target's own values were kept.", _missing_leaves(plan))
    if plan.kinds and settings.kind_mismatch == "warn":
        _log.warning(_other_kinds(plan, refused=False))
    enforce_shapes(plan, plan.shapes)
    if plan.unused and plan.target is not None:
        is_warned = _unused_policy(plan, settings, lenient=lenient) == "warn"
        level = logging.WARNING if is_warned else logging.INFO
        _log.log(level, "%s: not in the target, dropped: %s", plan.path, one_line(map(show_path, plan.unused)))
        if settings.unused_leaves in ("auto", "warn") and (counts := _counts_of_schedules(plan)):
            _log.warning("%s: %s", plan.path, counts)


def _unused_policy(plan: TreePlan, settings: config.Settings, *, lenient: bool) -> str:
    """Return what happens to stored leaves that the target lacks: error, warn or ignore."""
    if plan.target is None or not plan.unused:
        return "ignore"
    if settings.unused_leaves != "auto":
        return settings.unused_leaves if _unused_values(plan) else "ignore"
    if plan.cuts_layers is None:
        plan.cuts_layers = any(_longer_rows(plan.unused, plan.tree, plan.target.node))
    # Layers that are cut off are no other part of the state, which a program may not want.
    if not plan.cuts_layers:
        return "ignore"
    return "error" if settings.kind_mismatch == "error" and not lenient else "warn"


def enforce_shapes(plan: TreePlan, shapes: Sequence[ShapeDifference]) -> None:
    """Apply the policy for shapes that differ."""
    policy = plan.options.settings.shape_mismatch
    if not shapes or policy == "ignore":
        return
    if policy == "error":
        raise _shapes_error(plan, shapes)
    _log.warning(_other_shapes(plan, shapes, refused=False))


def _missing_leaves(plan: TreePlan) -> str:
    """Return the folded list of missing leaves, each with the nearest stored names of its shape; without remedies."""
    assert plan.target is not None
    lines = [f"{plan.path} lacks {len(plan.missing)} of the leaves that the target asks for:"]
    rows, more = shown([Row((show_path(path),), ("empty",) * (path in plan.empty)) for path in plan.missing])
    unused = set(map(show_path, plan.unused))
    stored = {show_path(path): getattr(leaf, "shape", None) for path, leaf in iter_leaves(plan.tree)}
    arrays = ((path, *shape_and_dtype(node_at(plan.target.node, path))) for path in plan.missing)
    wanted = {show_path(path): shape for path, shape, dtype in arrays if isinstance(dtype, np.dtype)}
    any_near = False
    for row in rows:
        first = row.members[0].names[0] if row.members else row.names[0]
        near = _nearest_stored(first, wanted.get(first), stored, unused)
        any_near = any_near or bool(near)
        similar = f"   (stored: {', '.join(near)})" if near else ""
        line = f"  {row.names[0]}{similar}{'   (empty: holds no values)' if row.detail else ''}{row.note}"
        lines.append(printable(line, one_line=True))
    if more:
        lines.append(
            f"  and {more} more; the error's attribute missing and flax_ckpt_compat.plan_restore name them all"
        )
    if not any_near:
        tops = one_line(plan.tree.children) if isinstance(plan.tree, Branch) else "a single value, without names"
        lines.append(f"No stored name is similar. At the top level the checkpoint holds: {tops or 'nothing'}")
    return "\n".join(lines)


def _nearest_stored(missing: str, wanted: Any, stored: Mapping[str, Any], unused: set[str]) -> list[str]:
    """Return stored names akin to a missing leaf's, of the shape ``wanted``; None: of a key, or of what is no array."""
    fit = [name for name, shape in stored.items() if None in (wanted, shape) or wanted == shape]
    field = _MOMENTS.intersection(missing.split("/"))
    fit = [name for name in fit if _MOMENTS.intersection(name.split("/")) == field]
    free = set[str]() if wanted is None else unused.intersection(fit)
    # What the target takes by its own name is not the missing leaf while another one below the same top is free.
    left = [name for name in fit if name in free and name.partition("/")[0] == missing.partition("/")[0]]
    return nearest(missing, left, free) or nearest(missing, fit, free)


def _missing_error(plan: TreePlan) -> errors.MissingLeavesError:
    rule = _from_target(plan, plan.missing)
    named = f"name these leaves, orbax_transforms=[{rule}], or " if rule else ""
    message = (
        f"{_missing_leaves(plan)}\n{of_layers(plan) or _proposal(plan) or _RENAMED}\n"
        f"Only where the target's own values are wanted, {named}pass orbax_transforms={{}} to restore_checkpoint or "
        "missing_leaves='ignore' to restore, or set flax_ckpt_compat.config.update(missing_leaves='ignore')."
    )
    missing = tuple(map(show_path, plan.missing))
    return errors.MissingLeavesError(message, path=plan.path, leaf=missing[0], missing=missing)


def _from_target(plan: TreePlan, paths: Sequence[Path]) -> str:
    """Return the rule that keeps some of the target's leaves; empty if they are many paths, or most of the target."""
    assert plan.target is not None
    if 2 * len(paths) > sum(1 for _ in iter_leaves(plan.target.node)):
        return ""  # another model
    tops = [literal(joined(path)) for path in topmost(plan.target.node, set(paths))]
    return f"rules.from_target({', '.join(map(repr, tops))})" if 0 < len(tops) <= _MAX_TOPS else ""


def suggest(plans: Sequence[TreePlan]) -> Any:
    """Return the `flax_ckpt_compat._suggest.Suggestion` for what the plans of a restore lack or differ in, or None.

    One without a doubt is tried: what a restore with it still refuses is `remaining`."""
    plan = next((one for one in plans if one.missing or one.shapes or one.kinds), None)
    if plan is None or plan.target is None:  # without a target, nothing differs
        return None
    from flax_ckpt_compat import _suggest  # most restores need none of it

    stored, wanted = plan.all_items or (plan.tree, plan.target.node)
    try:
        return _suggest.suggest(stored, wanted, lambda tree: [path for one in plans for path in _refused(one, tree)])
    except Exception:  # noqa: BLE001  (a guess that fails must not hide what is missing)
        _log.debug("no suggestion for %s", plan.path, exc_info=True)
        return None


def _refused(plan: TreePlan, tree: Node) -> list[Path]:
    """Return what a restore would refuse if the plan's tree, or that of all items, were another one."""
    if plan.target is None:
        return []
    item: Path = () if plan.all_items is None else (plan.item,)  # in which the leaves' paths are
    again = plan_tree(plan.reader, node_at(tree, item) or Branch({}), plan.target, plan.options, plan.location)
    why: dict[type, list[Path]] = {
        errors.MissingLeavesError: again.missing,
        errors.KindMismatchError: [one.path for one in again.kinds],
        errors.UnusedLeavesError: again.unused,
        errors.ShapeMismatchError: [path for path, *_ in again.shapes],
    }
    left = [path for kind, _ in refusals(again) for path in why.get(kind, ())]
    left += [tuple((problem.leaf or "").split("/")) for problem in again.problems]
    return [(*item, *path) for path in dict.fromkeys(left)]


def _proposal(plan: TreePlan) -> str:
    """Return text that proposes rules for mapping the checkpoint to the target; empty if there are none, or a guess."""
    if sum(1 for _ in iter_leaves(plan.tree)) > _MANY:
        return ""  # it takes seconds; a plan has it
    found = suggest([plan])
    if found is None or not found.rules or (found.doubts and not found.is_about_layout):
        return ""
    if plan.kinds and not plan.missing and not found.confident:
        return ""  # what it leaves would raise again
    if len(str(found)) > _MAX_TEXT:
        return "Rules would map it: print the attribute suggestion of flax_ckpt_compat.plan_restore."
    after = ", after those that were given" if plan.options.transforms.rules else ""
    but = f", but {found.doubts[0]}: check the result" if found.doubts else ""
    what = f"a part of it (not {one_line(found.remaining)})" if found.remaining else "it"
    return f"These rules would map {what} to the target{after} (orbax_transforms= in restore_checkpoint){but}:\n{found}"


def of_layers(plan: TreePlan) -> str:
    """Return which numbered layers are missing that would be the next in their rows; or empty."""
    assert plan.target is not None
    return _explain_rows(_longer_rows(plan.missing, plan.target.node, plan.tree))


def _longer_rows(
    paths: Sequence[Path], longer: Node, shorter: Node, place: Path = ()
) -> Iterator[tuple[Path, tuple[str, ...], int]]:
    """Yield the rows of numbered layers, alike in shapes, of which one tree has more: place, names, the lower count.

    ``paths`` are the leaves that only the longer tree has."""
    if not isinstance(longer, Branch) or not isinstance(shorter, Branch):
        return
    rows = _rows(longer)
    for stem, names in _rows(shorter).items():
        row, last = rows.get(stem, ()), _shapes(shorter.children[names[-1]])
        more = row[len(names) :] if row[: len(names)] == names else ()
        are_alike = last and all(_shapes(longer.children[name]) == last for name in more)
        if more and are_alike and all(any(path[: len(place) + 1] == (*place, one) for path in paths) for one in more):
            yield place, row, len(names)
    for name, child in shorter.children.items():
        if name in longer.children:
            yield from _longer_rows(paths, longer.children[name], child, (*place, name))


def _rows(branch: Branch) -> dict[str, tuple[str, ...]]:
    """Return the names of subtrees that are numbered from 0, in order, by the text before the number."""
    rows: dict[str, dict[int, str]] = {}
    for name, child in branch.children.items():
        if isinstance(child, Branch) and (row := numbered(name)) is not None:
            rows.setdefault(row[0], {})[row[1]] = name
    whole = {stem: row for stem, row in rows.items() if row.keys() == set(range(len(row)))}
    return {stem: tuple(row[number] for number in range(len(row))) for stem, row in whole.items()}


def _shapes(node: Node) -> dict[Path, Any]:
    """Return the shape of each leaf of a subtree; None for those that are not arrays. Empty containers do not count."""
    return {path: getattr(leaf, "shape", None) for path, leaf in iter_leaves(node) if not isinstance(leaf, Branch)}


def _explain_rows(rows: Iterable[tuple[Path, tuple[str, ...], int]], *, is_cut: bool = False) -> str:
    """Return how many layers the checkpoint and the target have; the target has fewer if ``is_cut``."""
    groups: dict[tuple[tuple[str, ...], int], list[Path]] = {}
    for place, names, fewer in rows:
        groups.setdefault((names, fewer), []).append(place)
    lines = []
    for (names, fewer), places in groups.items():
        had, wanted = (len(names), fewer) if is_cut else (fewer, len(names))
        stored = fold(Row((show_path((*places[0], name)),)) for name in names[:had])[0].names[0]
        also = f", and as many in {len(places) - 1} more places" if len(places) > 1 else ""
        lines.append(
            f"The checkpoint has {stored} ({had}{also}), the target {wanted} of them. Build the model with {had}."
        )
    return "\n".join(lines)


def _unused_values(plan: TreePlan) -> list[Path]:
    """Return the unused stored leaves that hold values: None and empty containers do not."""
    stored = dict(iter_leaves(plan.tree)) if plan.unused else {}
    return [path for path in plan.unused if stored[path] is not None and not isinstance(stored[path], Branch)]


def _unused_error(plan: TreePlan) -> errors.UnusedLeavesError:
    """Return the error with the folded list of stored leaves that the target lacks, and remedies."""
    assert plan.target is not None
    unused = _unused_values(plan)
    lines = [f"{plan.path} has {len(unused)} leaves that the target lacks, so a restore would drop them:"]
    lines += listed([Row((show_path(path),)) for path in unused], "; flax_ckpt_compat.plan_restore names them all")
    layers = _explain_rows(_longer_rows(plan.unused, plan.tree, plan.target.node), is_cut=True)
    lines.append(layers or "If the target should be what was saved, correct the configuration that it is made from.")
    tops = [literal(joined(path)) for path in topmost(plan.tree, set(unused))]
    rule = f"name them, orbax_transforms=[rules.drop({', '.join(map(repr, tops))})] (transforms= in restore), or "
    lines.append(
        f"To drop them all the same, {rule if 0 < len(tops) <= _MAX_TOPS else ''}pass unused_leaves='ignore' to "
        "restore, or set flax_ckpt_compat.config.update(unused_leaves='ignore')."
    )
    return errors.UnusedLeavesError("\n".join(lines), path=plan.path, leaf=show_path(unused[0]))


def _counts_of_schedules(plan: TreePlan) -> str:
    """Return a sentence that names the dropped counts of an optimizer's schedules, or empty."""
    counts = [path for path in plan.unused if path[-1:] == ("count",) and _is_in_sequence(plan, path)]
    if not counts:
        return ""
    return (
        f"the target's optimizer has no place for the step of a schedule, which is dropped: "
        f"{one_line(map(show_path, counts))}; with a schedule later on, that begins at step 0"
    )


def _is_in_sequence(plan: TreePlan, path: Path) -> bool:
    """Return whether the last node of the target on the way to a stored leaf is a sequence, as optax chains."""
    nodes = (node_at(plan.target and plan.target.node, path[:end]) for end in range(len(path), -1, -1))
    node = next((node for node in nodes if isinstance(node, Branch)), None)
    return node is not None and node.container is not Container.DICT


def _other_kinds(plan: TreePlan, *, refused: bool, proposes: bool = True) -> str:
    """Return the folded list of leaves of another kind, then the remedies; if it is ``refused``, rules come first."""
    differences = plan.kinds
    count = len(differences)
    are_cut = all(one.is_cut for one in differences)
    first = f"{plan.path}: {count} of the target's nodes {'is' if count == 1 else 'are'} of another kind than stored"
    lines = [first + (":" if refused or are_cut else "; what is stored is returned:")]
    rows = [Row((show_path(one.path),), (f"stored {one.stored}, target {one.wanted}",)) for one in differences]
    lines += listed(rows)
    proposed = _proposal(plan) if refused and proposes else ""
    lines += [proposed] if proposed else dict.fromkeys(one.hint for one in differences if one.hint)
    if refused:
        wanted = "the entries that fit" if are_cut else "what is stored all the same"
        lines.append(f"To get {wanted}, set kind_mismatch='warn'{'' if are_cut else ', or restore without a target'}.")
    return "\n".join(lines)


def _kinds_error(plan: TreePlan, proposes: bool) -> errors.KindMismatchError:
    message = _other_kinds(plan, refused=True, proposes=proposes)
    return errors.KindMismatchError(message, path=plan.path, leaf=show_path(plan.kinds[0].path))


def _other_shapes(plan: TreePlan, shapes: Sequence[ShapeDifference], *, refused: bool) -> str:
    """Return the folded list of shapes that differ, then the remedies; if it is ``refused``, rules come first."""
    texts = [f"stored {was}, target {'typed keys of shape ' * _is_key(plan, path)}{want}" for path, was, want in shapes]
    rows = [Row((show_path(one[0]),), (text,)) for one, text in zip(shapes, texts, strict=True)]
    have = "has" if len(shapes) == 1 else "have"
    lines = [f"{plan.path}: {len(shapes)} of the stored arrays {have} another shape than the target's"]
    lines[0] += ":" if refused else "; they are returned as stored:"
    lines += listed(rows, "; flax_ckpt_compat.plan_restore names them all")
    lines.append((_proposal(plan) if refused else "") or shape_remedies(plan, shapes))
    if refused:
        lines.append("To get the stored arrays all the same, set shape_mismatch='warn'.")
    return "\n".join(lines)


def _shapes_error(plan: TreePlan, shapes: Sequence[ShapeDifference]) -> errors.ShapeMismatchError:
    message = _other_shapes(plan, shapes, refused=True)
    return errors.ShapeMismatchError(message, path=plan.path, leaf=show_path(shapes[0][0]))


def shape_remedies(plan: TreePlan, shapes: Sequence[ShapeDifference]) -> str:
    """Return what to do about shapes that differ where no rules are proposed."""
    if all(
        _is_key(plan, path) and not is_key(node_at(plan.tree, path)) and len(was) == len(want) + 1 and was[-1] in (2, 4)
        for path, was, want in shapes
    ):
        return leaf_kinds.RAW_KEYS
    text = "If the target should be the model that was saved, correct the model's configuration."
    if rule := _from_target(plan, [path for path, _, _ in shapes]):
        text += f" If these parts are new on purpose, such as a head, {rule} keeps the target's own values."
    return (
        f"{text} rules.pad, cut and reshape change stored arrays, and rules.unreplicate takes one replica; for a state "
        "from flax.jax_utils.replicate, restore into flax.jax_utils.unreplicate(target), and replicate afterwards."
    )


def _is_key(plan: TreePlan, path: Path) -> bool:
    return plan.target is not None and prng_keys.is_prng_key(node_at(plan.target.node, path))
