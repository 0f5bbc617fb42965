"""Define the result of `plan_restore`, and report it: what the restore does, proposed rules, a table of the leaves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.text_formatting import Row, fold, format_size, one_line, printable
from flax_ckpt_compat._core.tree import shown_names
from flax_ckpt_compat._restore.plan import TreePlan
from flax_ckpt_compat._suggest import Suggestion
from flax_ckpt_compat._view.report import Line, Report, Table, _Shown, for_json

# Beyond this, rows of numbered layers are folded, then whole subtrees, then omitted and counted, simple ones first.
MAX_ROWS = 24
_MAX_SUBTREES, _MAX_UNUSED = 20, 8  # of the table, and of the line below it
_SAME, _TARGET = "same name", ", target "
_OWN = {"missing": "MISSING", "target": "target ({})"}
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
    """Return a leaf's row: its key path and stored leaves, then style, origin, and shape and dtype."""
    style, how, sources = _STYLES[leaf.origin], leaf.how, leaf.sources
    if leaf.origin in _OWN:
        how, sources = _OWN[leaf.origin].format(leaf.how), ()
    elif sources == (leaf.path,) and not how:
        how, sources = _SAME, ()
    wanted = [str(leaf.target_shape)] * leaf.is_reshaped + [str(leaf.target_dtype)] * leaf.is_retyped
    what = "" if leaf.shape is None else f"{leaf.shape} {leaf.dtype}"
    what = f"{what}, target {' '.join(wanted)}" if wanted else what
    return Row((leaf.path, *sources), ("magenta" if leaf.is_reshaped else style, how, what))


def _few(rows: Sequence[Row], most: int) -> list[Row]:
    """Fold many rows, of numbered layers, and cut key paths to ever higher subtrees, until there are few rows."""
    if len(rows) <= MAX_ROWS:
        return list(rows)
    folded, levels = fold(rows), max((len(shown_names(row.names[0])) for row in rows), default=0)
    while len(folded) > most and levels > 1:
        levels -= 1
        folded = fold(_cut(row, levels) for row in rows)
    return folded


def _cut(row: Row, levels: int) -> Row:
    """Return the row of the subtree at a level, or below it if the row's sources have other names there."""
    names, cut = list(map(shown_names, row.names)), False
    while len(names[0]) > levels and len({one[-1] if len(one) > 1 else "" for one in names}) == 1:
        names, cut = [one[:-1] for one in names], True
    if not cut or _TARGET in "".join(row.detail):
        return row
    return Row(tuple(f"{'/'.join(one)}/…" for one in names), (*row.detail[:2], "")[: len(row.detail)])


def _shown(rows: list[Row]) -> tuple[list[Row], str]:
    """Return the rows to show, and a line that counts the leaves they leave out; empty if none."""
    # Leaves that simply come from the stored leaf of the same name come second.
    simple = [row.detail[1] == _SAME and _TARGET not in row.detail[2] for row in rows]
    order = sorted(range(len(rows)), key=lambda at: (simple[at], at))
    kept, left_out = sorted(order[:MAX_ROWS]), order[MAX_ROWS:]
    is_simple = all(simple[at] for at in left_out)
    what = "each from the stored leaf of the same name" if is_simple else "all in plan.leaves"
    more = f"  … and {sum(rows[at].count for at in left_out)} more, {what}" if left_out else ""
    return [rows[at] for at in kept], more


def _cells(row: Row) -> tuple[str, str, str]:
    """Return the path of a row's leaves, where they come from, and their shape and dtype."""
    path, *sources = row.names
    _, how, what = row.detail
    names = ", ".join(sources) if len(sources) < 3 else f"{sources[0]} … {sources[-1]}"
    source = ": ".join(filter(None, (how, names))) or "None"
    return printable(path, one_line=True), printable(source, one_line=True), f"{what}{row.note}".strip()


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
    _pickled: tuple[str, ...] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the key paths of the leaves for which the restore raises ``MissingLeavesError``."""
        return tuple(leaf.path for leaf in self.leaves if leaf.origin == "missing")

    @functools.cached_property
    def suggestion(self) -> Suggestion | None:
        """Return rules that would map the checkpoint to the target, if leaves are missing, or shapes or kinds differ.

        Rules are functions, which pickle does not take: a pickled plan prints them, and its ``suggestion`` is None."""
        found: Iterator[Suggestion] = filter(None, (tree_plan.suggest() for tree_plan in self._plans))
        return next(found, None)

    def __repr__(self) -> str:
        title = " ".join(_title(self).replace("\n", ";", 1).split())
        return f"<Plan {title}{f'; raises {self.raises}' if self.raises else ''}>"

    def _report(self) -> Report:
        return Report(_lines(self), functools.partial(_to_json, self), found=self.raises is not None)

    def __getstate__(self) -> dict[str, Any]:
        # The report only, without the trees and the target's arrays.
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**state, "_plans": (), "_pickled": tuple(_verdict(self, math.inf))}


def _lines(plan: Plan) -> Iterator[Line | Table]:
    """Yield what a restore does, proposed rules, a table of the leaves, and what is not used."""
    rows = list(map(_row, plan.leaves))
    rows, more = _shown(_few(rows, _MAX_SUBTREES))
    yield Line(_title(plan), hang=2)
    for text in map(printable, _verdict(plan)):
        prose, _, code = text.partition("\n")
        yield Line(prose)
        yield from [Line(code, hang=None)] * bool(code)
    yield Table(_HEADINGS, list(map(_cells, rows)), styles=[row.detail[0] for row in rows], indent=2)
    yield from [Line(more, hang=2)] * bool(more)
    if plan.unused:
        unused = _few([Row((path,)) for path in plan.unused], _MAX_UNUSED)
        names = one_line(" ".join(f"{row.names[0]} {row.note}".split()) for row in unused)
        yield Line(printable(f"Stored, but not used: {names}"), hang=2)


def _title(plan: Plan) -> str:
    """Return the checkpoint and the bytes to read; then, on a line of its own, how many leaves come from where."""
    path = printable(plan.path, one_line=True)
    origins = {"checkpoint": "from the checkpoint", "computed": "computed", "target": "kept from the target"}
    counts = Counter(leaf.origin for leaf in plan.leaves)
    words = [f"{counts[origin]} {what}" for origin, what in origins.items() if counts[origin]]
    differing = {
        "missing": [leaf for leaf in plan.leaves if leaf.origin == "missing"],
        "of another shape": [leaf for leaf in plan.leaves if leaf.is_reshaped],
        "of another dtype": [leaf for leaf in plan.leaves if leaf.is_retyped],
    }
    sizes = [(what, len(leaves), sum(map(_nbytes, leaves))) for what, leaves in differing.items()]
    sizes.append(("stored but not used", len(plan.unused), plan.unused_nbytes))
    words += [f"{count} {what} ({format_size(nbytes)})" for what, count, nbytes in sizes if count]
    return f"{path} ({plan.format}): {format_size(plan.nbytes)} to read\n  {', '.join(words) or 'no leaves'}"


def _verdict(plan: Plan, most_steps: float = _MAX_STEPS) -> Iterator[str]:
    """Yield what the function that is previewed does, and proposed rules, unless these are more than ``most_steps``."""
    if plan._pickled is not None:
        yield from plan._pickled
        return
    if plan.raises is not None:
        milder = " (restore_checkpoint would succeed)" if plan.flax_succeeds else ""
        yield f"{plan.function} raises {plan.raises}{milder}" + (f": {plan.why}" if plan.why else ".")
    elif plan.missing:
        yield f"{plan.function} succeeds, and what is missing keeps the target's values."
    else:
        is_reshaped = any(leaf.is_reshaped for leaf in plan.leaves)
        yield f"{plan.function} succeeds." + " Where shapes differ, the result has the stored shape." * is_reshaped
    found, is_explained = (
        plan.suggestion,
        bool(plan.why) and plan.raises in ("MissingLeavesError", "ShapeMismatchError"),
    )
    if found is None:
        yield from ["Nothing that is stored resembles what is missing."] * bool(plan.missing and not is_explained)
    elif not (found.doubts and is_explained):
        sure = "These rules would map it"
        if found.keeps_all:
            sure = "Nothing that is stored fits there. Where the target's own values are wanted"
        if found.doubts:
            sure = f"A guess, to be checked leaf by leaf ({found.doubts[0]})"
        yield f"{sure}:\n{'print(plan.suggestion)' if len(found.steps) > most_steps else found}"


def _nbytes(leaf: PlannedLeaf) -> int:
    """Return the size of the target's array if it is missing, else of what is read."""
    if leaf.origin != "missing" or leaf.target_shape is None:
        return int(leaf.nbytes)
    return int(math.prod(leaf.target_shape) * getattr(leaf.target_dtype, "itemsize", 0))


def _to_json(plan: Plan) -> dict[str, Any]:
    suggestion = None if plan.suggestion is None else str(plan.suggestion)
    return {**for_json(plan), "missing": plan.missing, "suggestion": suggestion}
