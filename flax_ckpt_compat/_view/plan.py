"""Preview a restore without reading large arrays: `plan_restore`, and the text of what it finds."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal, SupportsFloat

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import MissingLeavesError, ShapeMismatchError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import Row, fold, format_size, one_line, printable
from flax_ckpt_compat._core.tree import Branch, Path, iter_leaves, show_path
from flax_ckpt_compat._discovery import locating, opening
from flax_ckpt_compat._restore.items import plan_all
from flax_ckpt_compat._restore.plan import LeafPlan, RestoreOptions, RestorePlan, TreePlan
from flax_ckpt_compat._restore.policies import of_layers, refusals, shape_remedies, suggest
from flax_ckpt_compat._suggest import Suggestion
from flax_ckpt_compat._trees import depth, state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, handles_of, needs, shape_and_dtype
from flax_ckpt_compat._view.metadata import dir_without_pending_saves
from flax_ckpt_compat._view.report import Line, Report, Table, _Shown, for_json

Owners = dict[Reader, str]  # reader of an item → its name
# Beyond this, rows of numbered layers are folded; then what keeps its name comes last, and the rest is counted.
MAX_ROWS = 24
_SAME, _TARGET = "same name", ", target "  # in the cells of a row, by which the table also sorts
_OWN = {"missing": "MISSING", "target": "target ({})"}
_COUNTED = {
    "checkpoint": "from the checkpoint",
    "computed": "computed",
    "target": "kept from the target",
    "missing": "missing",
    "reshaped": "of another shape",
    "retyped": "of another dtype",
    "unused": "stored but not used",
}
_STYLES = {"missing": "bold red", "computed": "cyan", "target": "yellow", "checkpoint": ""}
_HEADINGS = ("leaf", "comes from", "shape and dtype")


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """One leaf of the result.

    Attributes:
        path: its key path, joined with ``/``.
        origin: ``checkpoint`` (as stored), ``computed`` (from stored leaves), ``target`` (its own value is kept), or
            ``missing`` (the restore is going to raise).
        sources: key paths of the stored leaves that it comes from.
        how: the computation, or the reason why the target's value is kept, or that its own type reads it; else empty.
        shape: of the result; None if it is not an array, or only a function of the caller's knows.
        dtype: of the result, after casting; None as for ``shape``.
        target_shape, target_dtype: of the target's leaf; None if it is not an array.
        nbytes: size in memory of the stored data that it needs, in bytes.
    """

    path: str
    origin: str
    sources: tuple[str, ...]
    how: str
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None
    target_shape: tuple[int, ...] | None
    target_dtype: np.dtype[Any] | None
    nbytes: int

    @property
    def is_reshaped(self) -> bool:
        """Return whether the result has another shape than the target's leaf."""
        return self.shape is not None and self.target_shape is not None and self.shape != self.target_shape

    @property
    def is_retyped(self) -> bool:
        """Return whether the result has another dtype than the target's leaf."""
        return self.dtype is not None and self.target_dtype is not None and self.dtype != self.target_dtype


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(_Shown):
    """Preview of a restore; prints as a table, and in notebooks, too.

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
        flax_succeeds: whether ``restore_checkpoint`` with these arguments succeeds although this restore raises.
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
    flax_succeeds: bool = False
    function: str = "restore"
    _plans: tuple[TreePlan, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the key paths of the leaves for which the restore raises ``MissingLeavesError``."""
        return tuple(leaf.path for leaf in self.leaves if leaf.origin == "missing")

    @functools.cached_property
    def suggestion(self) -> Suggestion | None:
        """Return rules that would map the checkpoint to the target, if leaves are missing, or shapes or kinds differ.

        Rules are functions, which pickle does not take: a pickled plan has none."""
        found: Suggestion | None = suggest(self._plans)
        return found

    def __repr__(self) -> str:
        title = " ".join(_title(self).replace("\n", ";", 1).split())
        return f"<Plan {title}{f'; raises {self.raises}' if self.raises else ''}>"

    def _report(self) -> Report:
        def value() -> dict[str, Any]:
            return {**for_json(self), "suggestion": None if self.suggestion is None else str(self.suggestion)}

        return Report(_lines(self), value, found=self.raises is not None)

    def __getstate__(self) -> dict[str, Any]:
        # The report only, without the trees and the target's arrays.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {"_plans": ()}


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
            closing(opening.Opened(found, verify=options.settings.checksums == "verify", item=options.item)) as opened,
        ):
            return _plan(opened, plan_all(opened, target, options))

    def nothing() -> Plan:
        leaves = iter_leaves(state_dict.describe(target)) if target is not None else ()
        kept = [_kept_leaf(show_path(leaf_path), leaf, "there is no checkpoint") for leaf_path, leaf in leaves]
        return Plan(checkpoint_dir.root.path, "", tuple(kept), (), 0, None)

    options.transforms.wait_for_pending_saves()
    with depth.limited("restored"):
        return locating.read_found(checkpoint_dir, step, plan_one, None if options.settings.must_exist else nothing)


def _plan(opened: opening.Opened, plans: RestorePlan) -> Plan:
    leaves: list[PlannedLeaf] = []
    unused: list[str] = []
    unused_size = 0
    needed: dict[Any, int] = {}
    # Rules may move leaves from one item to another.
    owners: Owners = {opened.reader(name): name for name in opened.parts} if plans.is_mapping else {}
    for name, tree_plan in plans.items.items():
        item = (name,) if plans.is_mapping else ()
        leaves += _planned_leaves(tree_plan, item, owners)
        for leaf in tree_plan.leaves:
            needed.update(needs(leaf.source))
        stored = dict(iter_leaves(tree_plan.tree)) if tree_plan.unused else {}
        for path in tree_plan.unused:
            source = stored[path]
            if isinstance(source, LeafHandle | Derived):  # None and empty containers hold no values
                unused.append(show_path((*item, *(source.path if isinstance(source, LeafHandle) else path))))
                unused_size += sum(needs(source).values())
    size, trees = sum(needed.values()), tuple(plans.items.values())
    raises, why = _refusal(plans)
    succeeds = raises is not None and not any(True for tree in trees for _ in refusals(tree, as_flax=True))
    return Plan(
        opened.path, opened.format, tuple(leaves), tuple(unused), size, raises, why, unused_size, succeeds, _plans=trees
    )


def _refusal(plans: RestorePlan) -> tuple[str | None, str]:
    """Return the name of a restore's first error, and what the leaves do not show of the reason."""
    for tree_plan in plans.items.values():
        for kind, error in refusals(tree_plan, proposes=False):
            is_shown = kind is MissingLeavesError or (kind is ShapeMismatchError and tree_plan.shapes)
            why = of_layers(tree_plan) if is_shown else str(error())
            return kind.__name__, f"{why} {plans.fits}".strip()
    return None, ""


def _sources(source: Any, item: Path, owners: Owners) -> tuple[str, ...]:
    """Return the key paths of the stored leaves of a source in the whole checkpoint."""
    items = [((owners[one.reader],) if one.reader in owners else item, one.path) for one in handles_of(source)]
    return tuple(show_path((*item, *path)) for item, path in items)


def _planned_leaves(plan: TreePlan, item: Path, owners: Owners) -> Iterator[PlannedLeaf]:
    """Yield the leaves of a tree's plan, then containers without leaves: stored and taken as they are, or missing."""
    raises = plan.options.settings.missing_leaves == "error" and not plan.options.transforms.lenient
    missing = frozenset(plan.missing) if raises else frozenset()
    for leaf in plan.leaves:
        yield _planned(leaf, item, owners, "missing" if leaf.path in missing else "target")
    for path, stored in plan.stored_subtrees.items() if plan.target is not None else ():
        if all(isinstance(leaf, Branch) for _, leaf in iter_leaves(stored)):  # without leaves
            what = "an empty container"
            yield PlannedLeaf(show_path((*item, *path)), "checkpoint", (), what, None, None, None, None, 0)
    for path in sorted(plan.empty):
        origin = "missing" if path in missing else "target"
        yield _kept_leaf(show_path((*item, *path)), {}, "not in the checkpoint", origin)


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
            shape, dtype, wanted = None, None, (None, None)
    dtype = dtype if dtype is None or leaf.cast is None else leaf.cast
    origin, how = ("computed", source.how) if isinstance(source, Derived) else ("checkpoint", leaf.why)
    sources, nbytes = _sources(source, item, owners), sum(needs(source).values())
    return PlannedLeaf(name, origin, sources, how, shape, dtype, *wanted, nbytes)


def _kept_leaf(path: str, leaf: Any, why: str, origin: str = "target") -> PlannedLeaf:
    """Return a leaf that keeps the target's value, or is missing."""
    shape, dtype = shape_and_dtype(leaf)
    return PlannedLeaf(path, origin, (), why, shape, dtype, shape, dtype, 0)


def _lines(plan: Plan) -> Iterator[Line | Table]:
    """Yield what a restore does, proposed rules, a table of the leaves, and what is not used."""
    yield Line(_title(plan), hang=2)
    yield from _verdict(plan)
    yield from _table(plan)
    if plan.unused:
        yield Line(f"Stored, but not used: {one_line(plan.unused)}", hang=2)


def _title(plan: Plan) -> str:
    """Return the checkpoint and the bytes to read; then, on a line of its own, how many leaves come from where."""
    counts = Counter(leaf.origin for leaf in plan.leaves)
    counts["reshaped"] = sum(leaf.is_reshaped for leaf in plan.leaves)
    counts["retyped"] = sum(leaf.is_retyped for leaf in plan.leaves)
    counts["unused"] = len(plan.unused)
    words = [f"{counts[name]} {what}" for name, what in _COUNTED.items() if counts[name]]
    unused = f" ({format_size(plan.unused_nbytes)})" if plan.unused else ""
    path = printable(plan.path, one_line=True)
    return f"{path} ({plan.format}): {format_size(plan.nbytes)} to read\n  {', '.join(words) or 'no leaves'}{unused}"


def _verdict(plan: Plan) -> Iterator[Line]:
    """Yield what the function that is previewed does, and proposed rules."""
    if plan.raises is not None:
        milder = " (restore_checkpoint would succeed)" if plan.flax_succeeds else ""
        why = f": {plan.why}" if plan.why else "."
        yield Line(printable(f"{plan.function} raises {plan.raises}{milder}{why}"))
    else:
        where = " Where shapes differ, the result has the stored shape." * any(one.is_reshaped for one in plan.leaves)
        yield Line(f"{plan.function} succeeds.{where}")
    found, trees = plan.suggestion, plan._plans
    is_explained = bool(plan.why) and plan.raises in ("MissingLeavesError", "ShapeMismatchError")
    if found is None:
        if trees and plan.missing and not is_explained:
            yield Line("Nothing stored fits by name and shape; for other names write rules.rename, or fuse and split.")
        for tree in (tree for tree in trees if tree.shapes and plan.raises == "ShapeMismatchError"):
            yield Line(printable(str(tree.problems[0]) if tree.problems else shape_remedies(tree, tree.shapes)))
    elif not (found.doubts and found.rules and is_explained):
        rest = f" (not {one_line(found.remaining)})" if found.remaining else ""
        heading = "These rules would map it" if found.confident else f"These rules would map a part of it{rest}"
        if not found.rules:
            heading = "Nothing that is stored fits there. Where the target's own values are wanted"
        if found.doubts:
            heading = f"A guess, to be checked leaf by leaf ({found.doubts[0]})"
        yield from (Line(printable(f"{heading}:")), Line(printable(str(found)), hang=None))


def _row(leaf: PlannedLeaf) -> Row:
    """Return a leaf's row: its key path and where it comes from, then style, and shape and dtype."""
    names = ", ".join(leaf.sources) if len(leaf.sources) < 3 else f"{leaf.sources[0]} … {leaf.sources[-1]}"
    source = ": ".join(filter(None, (leaf.how, names))) or "None"
    if leaf.origin in _OWN:
        source = _OWN[leaf.origin].format(leaf.how)
    elif leaf.origin == "checkpoint" and names == leaf.path:
        source = _SAME
    wanted = [str(leaf.target_shape)] * leaf.is_reshaped + [str(leaf.target_dtype)] * leaf.is_retyped
    what = "" if leaf.shape is None else f"{leaf.shape} {leaf.dtype}"
    what = f"{what}{_TARGET}{' '.join(wanted)}" if wanted else what
    return Row((leaf.path, source), ("magenta" if leaf.is_reshaped else _STYLES[leaf.origin], what))


def _table(plan: Plan) -> Iterator[Line | Table]:
    """Yield a table of the leaves, and a line that counts those for which it has no room."""
    rows = list(map(_row, plan.leaves))
    rows = fold(rows) if len(rows) > MAX_ROWS else rows
    if len(rows) > MAX_ROWS:
        rows.sort(key=lambda row: row.names[1] == _SAME and _TARGET not in row.detail[1])
    shown = rows[:MAX_ROWS]
    cells = [(*row.names, f"{row.detail[1]}{row.note}".strip()) for row in shown]
    cells = [tuple(printable(text, one_line=True) for text in one) for one in cells]
    yield Table(_HEADINGS, cells, styles=[row.detail[0] for row in shown], indent=2)
    if left := sum(row.count for row in rows[MAX_ROWS:]):
        yield Line(f"  … and {left} more: see .leaves, or --json", hang=2)
