"""Preview a restore without reading large arrays: `plan_restore`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from flax_ckpt_compat._core import misplaced_keywords
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import MissingLeavesError, ShapeMismatchError
from flax_ckpt_compat._core.location import Location, as_text
from flax_ckpt_compat._core.tree import iter_leaves, show_path
from flax_ckpt_compat._discovery import locating, opening, saved_steps
from flax_ckpt_compat._restore import common_causes
from flax_ckpt_compat._restore.items import plan_all
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._restore.plan import RestorePlan, TreePlan
from flax_ckpt_compat._restore.policies import refusals
from flax_ckpt_compat._save import async_saves
from flax_ckpt_compat._suggest import Suggestion
from flax_ckpt_compat._trees import depth, state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, needs
from flax_ckpt_compat._view import plan_html, plan_text
from flax_ckpt_compat._view.planned_leaves import Owners, PlannedLeaf, kept_leaf, planned_leaves

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Preview of a restore; prints as a table, and in notebooks as a tree that can be searched.

    Attributes:
        path: absolute path of the checkpoint.
        format: ``msgpack``, ``orbax``, or the name of another layout, such as ``safetensors``.
        leaves: every leaf of the result, in the target's order.
        unused: key paths of the stored leaves that the result does not use.
        nbytes: size in memory of all stored data to be read, in bytes.
        raises: name of the error that `flax_ckpt_compat.restore` raises with these arguments, or None. Errors of
            damaged data, the caller's functions and custom serialization show only in the restore itself.
        why: the error's message, or empty if the leaves already show the reason. If just the number of layers differs,
            that.
        unused_nbytes: size in memory of the unused stored leaves, in bytes.
        function: name of the function that is previewed, for the text.
    """

    path: str
    format: str
    leaves: tuple[PlannedLeaf, ...]
    unused: tuple[str, ...]
    nbytes: int
    raises: str | None
    why: str = ""
    unused_nbytes: int = 0
    function: str = "restore"
    _plans: tuple[TreePlan, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the key paths of the leaves for which the restore raises ``MissingLeavesError``."""
        return tuple(leaf.path for leaf in self.leaves if leaf.origin == "missing")

    @functools.cached_property
    def suggestion(self) -> Suggestion | None:
        """Return rules that would map the checkpoint to the target, if leaves are missing or shapes differ; or None."""
        found: Iterator[Suggestion] = filter(None, (tree_plan.suggest() for tree_plan in self._plans))
        return next(found, None)

    def __repr__(self) -> str:
        title = " ".join(plan_text.title(self).replace("\n", ";", 1).split())
        return f"<Plan {title}{f'; raises {self.raises}' if self.raises else ''}>"

    def _repr_html_(self) -> str:
        return plan_html.render(self)

    def __str__(self) -> str:
        return plan_text.plain(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from plan_text.rich(self, options.max_width)

    def __reduce__(self) -> Any:
        # The report only, without the trees and the target's arrays.
        kept = (self.path, self.format, self.leaves, self.unused, self.nbytes, self.raises, self.why)
        return Plan, (*kept, self.unused_nbytes, self.function)


@misplaced_keywords.explained(misplaced_keywords.OF_RESTORE)
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

    Args:
        path: a directory of checkpoints, or one checkpoint.
        target: tree of the wanted structure, or None.
        step: the step in the directory; None takes the latest complete one.
        prefix: literal text before the step in the checkpoints' names.
        item: the item of a checkpoint of several, as one tree; None takes all that the target has.
        transforms: rules or transforms, as for ``restore_checkpoint``'s ``orbax_transforms``.
        transforms_default_to_original: True: leaves that no transform matches come from the checkpoint; False: from
            the target.
        missing_leaves: policy, as for `flax_ckpt_compat.restore`; None takes the setting or that function's default.
        shape_mismatch: likewise.
        kind_mismatch: likewise.
        unused_leaves: likewise.
        dtype: likewise.
        structure: likewise.
        must_exist: likewise. If False and there is no checkpoint, every leaf is the target's, and the format is empty.
        mapped: likewise.

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
    checkpoint_dir = saved_steps.checkpoint_dir(as_text(path), as_text(prefix, "prefix"))
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
    async_saves.wait_for_pending_saves(checkpoint_dir)
    options.transforms.wait_for_pending_saves()
    with depth.limited("restored", target):
        return locating.read_found(checkpoint_dir, step, plan_one, otherwise)


def _nothing(path: str, target: Any) -> Plan:
    """Return the plan of a restore that returns its target."""
    leaves = iter_leaves(state_dict.describe(target)) if target is not None else ()
    kept = [kept_leaf(show_path(leaf_path), leaf, "there is no checkpoint") for leaf_path, leaf in leaves]
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
        leaves += planned_leaves(tree_plan, item, owners)
        for leaf in tree_plan.leaves:
            needed.update(needs(leaf.source))
        stored = dict(iter_leaves(tree_plan.tree)) if tree_plan.unused else {}
        # None and empty containers hold no values.
        idle = [(path, stored[path]) for path in tree_plan.unused if isinstance(stored[path], LeafHandle | Derived)]
        unused_nbytes += sum(size for _, leaf in idle for size in needs(leaf).values())
        unused.extend(show_path((*item, *(leaf.path if isinstance(leaf, LeafHandle) else path))) for path, leaf in idle)
    nbytes, trees = sum(needed.values()), tuple(plans.items.values())
    refusal = _refusal(plans)
    return Plan(opened.path, opened.format, tuple(leaves), tuple(unused), nbytes, *refusal, unused_nbytes, _plans=trees)


def _refusal(plans: RestorePlan) -> tuple[str | None, str]:
    """Return the name of a restore's first error, and what the leaves do not show of the reason."""
    for tree_plan in plans.items.values():
        for kind, error in refusals(tree_plan):
            is_shown = kind is MissingLeavesError or (kind is ShapeMismatchError and tree_plan.shapes)
            why = common_causes.explain(tree_plan) if is_shown else str(error())
            return kind.__name__, f"{why} {plans.fits}".strip()
    return None, ""
