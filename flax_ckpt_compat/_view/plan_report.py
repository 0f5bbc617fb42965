"""Define the result of `plan_restore`, and report it: what the restore does, proposed rules, a table of the leaves."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._core.text_formatting import Row, fold, format_size, one_line, printable
from flax_ckpt_compat._restore.plan import TreePlan
from flax_ckpt_compat._suggest import Suggestion
from flax_ckpt_compat._view.report import Line, Report, Table, _Shown, for_json

# Beyond this, rows of numbered layers are folded, then omitted and counted, simple ones first.
MAX_ROWS = 24
_SAME, _TARGET = "same name", ", target "
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


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """One leaf of the result.

    Attributes:
        path: its key path, joined with ``/``.
        origin: ``checkpoint`` (as stored), ``computed`` (from stored leaves), ``target`` (its own value is kept), or
            ``missing`` (the restore is going to raise).
        sources: key paths of the stored leaves that it comes from.
        how: the computation, or the reason why the target's value is kept; else empty.
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


def _row(leaf: PlannedLeaf) -> Row:
    """Return a leaf's row: its key path and where it comes from, then style, and shape and dtype."""
    names = ", ".join(leaf.sources) if len(leaf.sources) < 3 else f"{leaf.sources[0]} … {leaf.sources[-1]}"
    source = ": ".join(filter(None, (leaf.how, names))) or "None"
    if leaf.origin in _OWN:
        source = _OWN[leaf.origin].format(leaf.how)
    elif source == leaf.path:
        source = _SAME
    wanted = [str(leaf.target_shape)] * leaf.is_reshaped + [str(leaf.target_dtype)] * leaf.is_retyped
    what = "" if leaf.shape is None else f"{leaf.shape} {leaf.dtype}"
    what = f"{what}, target {' '.join(wanted)}" if wanted else what
    return Row((leaf.path, source), ("magenta" if leaf.is_reshaped else _STYLES[leaf.origin], what))


def _table(plan: Plan) -> Iterator[Line | Table]:
    """Yield a table of the leaves, and a line that counts those for which it has no room."""
    rows = list(map(_row, plan.leaves))
    rows = fold(rows) if len(rows) > MAX_ROWS else rows
    # Leaves that simply come from the stored leaf of the same name come second.
    simple = [row.names[1] == _SAME and _TARGET not in row.detail[1] for row in rows]
    order = sorted(range(len(rows)), key=lambda at: (simple[at], at))
    shown = [rows[at] for at in sorted(order[:MAX_ROWS])]
    cells = [
        (*(printable(name, one_line=True) for name in row.names), f"{row.detail[1]}{row.note}".strip()) for row in shown
    ]
    yield Table(_HEADINGS, cells, styles=[row.detail[0] for row in shown], indent=2)
    if left := sum(rows[at].count for at in order[MAX_ROWS:]):
        yield Line(f"  … and {left} more: see .leaves, or --json", hang=2)


_MAX_STEPS = 12  # of a proposal that is printed with the plan; longer ones are printed by themselves
_HEADINGS = ("leaf", "comes from", "shape and dtype")


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
        found: Iterator[Suggestion] = filter(None, (tree_plan.suggest() for tree_plan in self._plans))
        return next(found, None)

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


def _lines(plan: Plan) -> Iterator[Line | Table]:
    """Yield what a restore does, proposed rules, a table of the leaves, and what is not used."""
    yield Line(_title(plan), hang=2)
    for text in map(printable, _verdict(plan)):
        prose, _, code = text.partition("\n")
        yield Line(prose)
        yield from [Line(code, hang=None)] * bool(code)
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


def _verdict(plan: Plan) -> Iterator[str]:
    """Yield what the function that is previewed does, and proposed rules; long ones are printed by themselves."""
    if plan.raises is not None:
        milder = " (restore_checkpoint would succeed)" if plan.flax_succeeds else ""
        yield f"{plan.function} raises {plan.raises}{milder}" + (f": {plan.why}" if plan.why else ".")
    else:
        is_reshaped = any(leaf.is_reshaped for leaf in plan.leaves)
        yield f"{plan.function} succeeds." + " Where shapes differ, the result has the stored shape." * is_reshaped
    found = plan.suggestion
    is_explained = bool(plan.why) and plan.raises in ("MissingLeavesError", "ShapeMismatchError")
    if found is None:
        if plan._plans and plan.missing and not is_explained:
            yield "Nothing that is stored resembles what is missing."
    elif not (found.doubts and is_explained):
        sure = "These rules would map it"
        if found.keeps_all:
            sure = "Nothing that is stored fits there. Where the target's own values are wanted"
        if found.doubts:
            sure = f"A guess, to be checked leaf by leaf ({found.doubts[0]})"
        yield f"{sure}:\n{'print(plan.suggestion)' if len(found.steps) > _MAX_STEPS else found}"
