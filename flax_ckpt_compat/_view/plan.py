"""Preview a restore without reading large arrays: `plan_restore`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Literal, SupportsFloat

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import MissingLeavesError, ShapeMismatchError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, Path, iter_leaves, show_path
from flax_ckpt_compat._discovery import locating, opening
from flax_ckpt_compat._restore import messages
from flax_ckpt_compat._restore.items import plan_all
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._restore.plan import LeafPlan, RestorePlan, TreePlan
from flax_ckpt_compat._restore.policies import refusals
from flax_ckpt_compat._trees import depth, state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, handles_of, needs, shape_and_dtype
from flax_ckpt_compat._view.metadata import dir_without_pending_saves
from flax_ckpt_compat._view.plan_report import Plan, PlannedLeaf

Owners = dict[Reader, str]  # reader of an item → its name


def plan_restore(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    item: str | None = None,
    transforms: Any = None,
    transforms_default_to_original: bool = True,
    missing_leaves: Literal["error", "warn", "ignore"] | None = None,
    shape_mismatch: Literal["warn", "error", "ignore"] | None = None,
    kind_mismatch: Literal["warn", "error", "ignore"] | None = None,
    unused_leaves: Literal["auto", "error", "warn", "ignore"] | None = None,
    dtype: Literal["stored", "target"] | None = None,
    structure: Literal["flax", "stored"] | None = None,
    must_exist: bool | None = None,
    mapped: bool | None = None,
) -> Plan:
    """Preview `flax_ckpt_compat.restore` with these arguments, without reading large arrays.

    For a preview of ``restore_checkpoint``, pass ``shape_mismatch="warn", kind_mismatch="warn"``, and
    ``missing_leaves="ignore"`` if its ``orbax_transforms`` are not rules.

    The arguments are those of `flax_ckpt_compat.restore`. If ``must_exist`` is False and there is no checkpoint, every
    leaf is the target's, and the format is empty.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        SettingError: a policy has no such value.
        TransformError, NameCollisionError: a rule or transform that does not fit.
        IncompleteCheckpointError, UnrecognizedFormatError, CorruptCheckpointError: the checkpoint cannot be opened.
        StorageError: the file system refused.

    Example:
        >>> _ = save("runs", {"Dense_0": np.ones(2)}, step=1)
        >>> plan = plan_restore("runs", {"encoder": np.zeros(2)})
        >>> plan.raises, plan.missing, [str(rule) for rule in plan.suggestion.rules]
        ('MissingLeavesError', ('encoder',), ["rules.rename('Dense_0', 'encoder')"])
    """
    checkpoint_dir = dir_without_pending_saves(path, prefix)
    options = RestoreOptions.strict(
        transforms,
        transforms_default_to_original,
        item=item,
        missing_leaves=missing_leaves,
        shape_mismatch=shape_mismatch,
        kind_mismatch=kind_mismatch,
        unused_leaves=unused_leaves,
        dtype=dtype,
        structure=structure,
        must_exist=must_exist,
        mapped=mapped,
    )

    def plan_one(found: Location) -> Plan:
        with (
            locating.unchanged(found),
            options.transforms.opening(),
            closing(opening.Opened(found, verify=options.verifies, item=options.item)) as opened,
        ):
            return _plan(opened, plan_all(opened, target, options))

    otherwise = None if options.settings.must_exist else lambda: _nothing(checkpoint_dir.root.path, target)
    options.transforms.wait_for_pending_saves()
    with depth.limited("restored"):
        return locating.read_found(checkpoint_dir, step, plan_one, otherwise)


def _nothing(path: str, target: Any) -> Plan:
    """Return the plan of a restore that returns its target."""
    leaves = iter_leaves(state_dict.describe(target)) if target is not None else ()
    kept = [_kept_leaf(show_path(leaf_path), leaf, "there is no checkpoint") for leaf_path, leaf in leaves]
    return Plan(path, "", tuple(kept), (), 0, None)


def _plan(opened: opening.Opened, plans: RestorePlan) -> Plan:
    leaves: list[PlannedLeaf] = []
    unused: list[str] = []
    unused_nbytes = 0
    needed: dict[Any, int] = {}
    # Rules may move leaves from one item to another.
    owners: Owners = {opened.reader(name): name for name in opened.parts} if plans.is_mapping else {}
    for name, tree_plan in plans.items.items():
        item = (name,) if plans.is_mapping else ()
        leaves += _planned_leaves(tree_plan, item, owners)
        for leaf in tree_plan.single_leaves():
            needed.update(needs(leaf.source))
        stored = dict(iter_leaves(tree_plan.tree)) if tree_plan.unused else {}
        for path in tree_plan.unused:
            source = stored[path]
            if isinstance(source, LeafHandle | Derived):  # None and empty containers hold no values
                unused.append(show_path((*item, *(source.path if isinstance(source, LeafHandle) else path))))
                unused_nbytes += sum(needs(source).values())
    nbytes, trees = sum(needed.values()), tuple(plans.items.values())
    raises, why = _refusal(plans)
    succeeds = raises is not None and not any(True for tree in trees for _ in refusals(tree, as_flax=True))
    lists = tuple(leaves), tuple(unused)
    return Plan(opened.path, opened.format, *lists, nbytes, raises, why, unused_nbytes, succeeds, _plans=trees)


def _refusal(plans: RestorePlan) -> tuple[str | None, str]:
    """Return the name of a restore's first error, and what the leaves do not show of the reason."""
    for tree_plan in plans.items.values():
        for kind, error in refusals(tree_plan, proposes=False):
            is_shown = kind is MissingLeavesError or (kind is ShapeMismatchError and tree_plan.shapes)
            why = messages.of_layers(tree_plan) if is_shown else str(error())
            return kind.__name__, f"{why} {plans.fits}".strip()
    return None, ""


def _sources(source: Any, item: Path, owners: Owners) -> tuple[str, ...]:
    """Return the key paths of the stored leaves of a source in the whole checkpoint."""
    items = [((owners[one.reader],) if one.reader in owners else item, one.path) for one in handles_of(source)]
    return tuple(show_path((*item, *path)) for item, path in items)


def _planned_leaves(plan: TreePlan, item: Path, owners: Owners) -> Iterator[PlannedLeaf]:
    """Yield the leaves of a tree's plan; a subtree that is restored as stored counts as one."""
    raises = plan.options.settings.missing_leaves == "error" and not plan.options.transforms.lenient
    missing = frozenset(plan.missing) if raises else frozenset()
    subtrees = {} if plan.target is None else plan.stored_subtrees
    for path, group in itertools.groupby(plan.single_leaves(), lambda leaf: leaf.path):
        if path in subtrees:
            yield _planned_subtree(path, [leaf.source for leaf in group], item, owners)
        else:
            for leaf in group:
                yield _planned(leaf, item, owners, "missing" if path in missing else "target")
    for path, stored in subtrees.items():
        if all(isinstance(leaf, Branch) for _, leaf in iter_leaves(stored)):  # without leaves
            yield _planned_subtree(path, [], item, owners)
    for path in sorted(plan.empty):
        origin = "missing" if path in missing else "target"
        yield _kept_leaf(show_path((*item, *path)), {}, "not in the checkpoint", origin)


def _planned_subtree(path: Path, found: Sequence[Any], item: Path, owners: Owners) -> PlannedLeaf:
    sources = tuple(name for source in found for name in _sources(source, item, owners))
    how = "by the rules of the target's own type, or leaf by leaf if they refuse it"
    nbytes = sum(size for source in found for size in needs(source).values())
    return PlannedLeaf(show_path((*item, *path)), "checkpoint", sources, how, None, None, None, None, nbytes)


def _planned(leaf: LeafPlan, item: Path, owners: Owners, origin: str) -> PlannedLeaf:
    name, source, target = show_path((*item, *leaf.path)), leaf.source, leaf.target
    if source is Own.KEEP_TARGET:
        return _kept_leaf(name, target, leaf.why, origin)
    (shape, dtype), wanted = shape_and_dtype(source), shape_and_dtype(target)
    if isinstance(source, LeafHandle) and source.kind is not LeafKind.ARRAY:
        # Of a key, shape and dtype are those of its data; Python values have none.
        if leaf.cast is not None:  # a number, converted to the target's type
            shape, dtype = ((), leaf.cast) if hasattr(target, "shape") else (None, None)
        elif source.kind is not LeafKind.NUMPY_SCALAR:
            wanted = shape, dtype = None, None
    dtype = dtype if dtype is None or leaf.cast is None else leaf.cast
    origin, how = ("computed", source.how) if isinstance(source, Derived) else ("checkpoint", "")
    sources, nbytes = _sources(source, item, owners), sum(needs(source).values())
    return PlannedLeaf(name, origin, sources, how, shape, dtype, *wanted, nbytes)


def _kept_leaf(path: str, leaf: Any, why: str, origin: str = "target") -> PlannedLeaf:
    """Return a leaf that keeps the target's value, or is missing."""
    shape, dtype = shape_and_dtype(leaf)
    return PlannedLeaf(path, origin, (), why, shape, dtype, shape, dtype, 0)
