"""Define the result of `plan_restore`, and report it: what the restore does, proposed rules, a table of the leaves."""

from __future__ import annotations

import dataclasses
import functools
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flax_ckpt_compat._core.text_formatting import Row, fold, format_size, one_line, printable
from flax_ckpt_compat._core.tree import shown_names
from flax_ckpt_compat._restore.plan import TreePlan
from flax_ckpt_compat._restore.policies import refused_by_flax_name
from flax_ckpt_compat._suggest import Suggestion
from flax_ckpt_compat._view.report import Line, Report, Table, _Shown

# Beyond this, rows of numbered layers are folded, then whole subtrees, then omitted and counted, simple ones first.
MAX_ROWS = 24
_SAME = "same name"
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


def rows_of(planned: Sequence[PlannedLeaf]) -> tuple[list[Row], str]:
    """Return the rows to show, and a line that counts the leaves they leave out; empty if none."""
    rows = [row_of(leaf) for leaf in planned]
    if len(rows) <= MAX_ROWS:
        return rows, ""
    leaves, rows = rows, fold(rows)
    if len(rows) > MAX_ROWS:
        rows = fold(_subtree_rows(leaves))
    # Leaves that simply come from the stored leaf of the same name come second.
    kept = sorted(range(len(rows)), key=lambda at: (_is_simple(rows[at]), at))[:MAX_ROWS]
    left_out = [row for at, row in enumerate(rows) if at not in set(kept)]
    more = sum(row.count for row in left_out)
    what = "each from the stored leaf of the same name" if all(map(_is_simple, left_out)) else "all in plan.leaves"
    return [rows[at] for at in sorted(kept)], f"  … and {more} more, {what}" if more else ""


def _subtree_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Replace the rows of leaves by those of the largest subtrees whose leaves come from alike."""
    keys: dict[str, Any] = {}
    for row in rows:
        path, *sources = row.names
        style, how, what = row.detail
        if not how and len(sources) == 1:
            keys[path] = _without_common_end(path, sources[0])
        else:
            keys[path] = (style, how, what if ", target " in what else "")
    names = topmost_subtrees(keys)
    sizes = Counter([*keys.values(), *names.values()])
    for row in rows:
        path, (style, how, what) = row.names[0], row.detail
        is_moved = not how and len(row.names) == 2
        if ", target " in what or sizes[keys[path] if is_moved else names[path]] == 1:
            yield row
        else:
            yield Row(keys[path] if is_moved else (names[path],), (style, how, ""))


def _without_common_end(path: str, source: str) -> tuple[str, str]:
    """Return the subtrees of a leaf and of its source below which the names are the same."""
    ours, theirs = shown_names(path), shown_names(source)
    while len(ours) > 1 and len(theirs) > 1 and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    end = "/…" if len("/".join(ours)) < len(path) else ""
    return "/".join(ours) + end, "/".join(theirs) + end


def topmost_subtrees(keys: dict[str, Any]) -> dict[str, str]:
    """Return for each path the topmost subtree whose paths all have the same key, as ``a/b/…``, or the path itself."""
    mixed, tops = object(), {}
    found: dict[str, Any] = {}
    for path, key in keys.items():
        for prefix in _prefixes(path):
            if found.setdefault(prefix, key) != key:
                found[prefix] = mixed
    for path in keys:
        tops[path] = next((f"{prefix}/…" for prefix in _prefixes(path) if found[prefix] is not mixed), path)
    return tops


def _prefixes(path: str) -> list[str]:
    parts = shown_names(path)
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def row_of(leaf: PlannedLeaf) -> Row:
    """Return a leaf's row: names, then style, origin, and shape and dtype, which do not fold."""
    style = "magenta" if leaf.is_reshaped else _STYLES[leaf.origin]
    how, sources = _source(leaf)
    return Row((leaf.path, *sources), (style, how, _what(leaf)))


def _is_simple(row: Row) -> bool:
    return row.detail[:2] == (_STYLES["checkpoint"], _SAME) and ", target " not in row.detail[2]


def cells_of(row: Row) -> tuple[str, str, str]:
    """Return the path of a row's leaves, where they come from, and their shape and dtype."""
    path, *sources = row.names
    _, how, what = row.detail
    names = ", ".join(sources) if len(sources) < 3 else f"{sources[0]} … {sources[-1]}"
    source = ": ".join(filter(None, (how, names))) or "None"
    return printable(path, one_line=True), printable(source, one_line=True), f"{what}{row.note}".strip()


def _source(leaf: PlannedLeaf) -> tuple[str, tuple[str, ...]]:
    """Return a leaf's origin, and the stored leaves to name with it."""
    if leaf.origin == "missing":
        return "MISSING", ()
    if leaf.origin == "target":
        return f"target ({leaf.how})", ()
    return (_SAME, ()) if leaf.sources == (leaf.path,) and not leaf.how else (leaf.how, leaf.sources)


def _what(leaf: PlannedLeaf) -> str:
    if leaf.shape is None:
        return ""
    found = f"{leaf.shape} {leaf.dtype}"
    wanted = [str(leaf.target_shape)] * leaf.is_reshaped + [str(leaf.target_dtype)] * leaf.is_retyped
    return f"{found}, target {' '.join(wanted)}" if wanted else found


# What restore_checkpoint does instead of an error of restore.
_MILD = {
    "ShapeMismatchError": "warns, and returns what is stored",
    "KindMismatchError": "warns, and returns what is stored",
    "UnusedLeavesError": "warns, and drops them",
    "MissingLeavesError": "keeps the target's values",
}
_MAX_STEPS = 12  # of a proposal that is printed with the plan; longer ones are printed by themselves
_MAX_WIDTH = 80
_HEADINGS = ("leaf", "comes from", "shape and dtype")


class _Travelled(NamedTuple):
    """Facts that a pickled plan keeps of the trees, which are not pickled with it."""

    flax_succeeds: bool
    verdict: tuple[str, ...]


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
    _travelled: _Travelled | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the key paths of the leaves for which the restore raises ``MissingLeavesError``."""
        return tuple(leaf.path for leaf in self.leaves if leaf.origin == "missing")

    @functools.cached_property
    def suggestion(self) -> Suggestion | None:
        """Return rules that would map the checkpoint to the target, if leaves are missing or shapes differ; or None.

        Rules are functions, which pickle does not take: a pickled plan prints them, and its ``suggestion`` is None."""
        found: Iterator[Suggestion] = filter(None, (tree_plan.suggest() for tree_plan in self._plans))
        return next(found, None)

    @property
    def flax_succeeds(self) -> bool:
        """Return whether ``restore_checkpoint`` with these arguments succeeds although this restore raises."""
        if self._travelled is not None:
            return self._travelled.flax_succeeds
        plans = self._plans if self.raises is not None and self.function == "restore" else ()
        return bool(plans) and not any(map(refused_by_flax_name, plans))

    def __repr__(self) -> str:
        title = " ".join(_title(self).replace("\n", ";", 1).split())
        return f"<Plan {title}{f'; raises {self.raises}' if self.raises else ''}>"

    def _report(self) -> Report:
        return report(self)

    def __reduce__(self) -> Any:
        # The report only, without the trees and the target's arrays.
        kept = (self.path, self.format, self.leaves, self.unused, self.nbytes, self.raises, self.why)
        travelled = self._travelled or _Travelled(self.flax_succeeds, tuple(_verdict(self, math.inf)))
        return Plan, (*kept, self.unused_nbytes, self.function, (), travelled)


def report(plan: Plan) -> Report:
    """Return what is shown of a plan."""
    return Report(_lines(plan), functools.partial(_to_json, plan), found=plan.raises is not None)


def _lines(plan: Plan) -> Iterator[Line | Table]:
    """Yield what a restore does, proposed rules, a table of the leaves, and what is not used."""
    rows, more = rows_of(plan.leaves)
    yield Line(_title(plan))
    for text in map(printable, _verdict(plan)):
        prose, _, code = text.partition("\n")
        yield Line(prose)
        if code:
            yield Line(code, hang=None)
    yield Table(_HEADINGS, list(map(cells_of, rows)), styles=[row.detail[0] for row in rows], indent=2)
    yield from (Line(printable(line), hang=2) for line in _rest(plan, more))


def _title(plan: Plan) -> str:
    """Return the checkpoint and the bytes to read; then, on lines of their own, how many leaves come from where."""
    path = printable(plan.path, one_line=True)
    read = f"{path} ({plan.format}): {format_size(plan.nbytes)} to read"
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
    # Lines break between the words, not within them.
    summary = ", ".join(word.replace(" ", "\xa0") for word in words) or "no leaves"
    lines = textwrap.wrap(summary, _MAX_WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([read, *lines]).replace("\xa0", " ")


def _verdict(plan: Plan, most_steps: float = _MAX_STEPS) -> Iterator[str]:
    """Yield what the function that is previewed does, and proposed rules, unless these are more than ``most_steps``."""
    if plan._travelled is not None:
        yield from plan._travelled.verdict
        return
    if plan.raises is not None:
        yield f"{plan.function} raises {plan.raises}{_unlike(plan)}" + (f": {plan.why}" if plan.why else ".")
    elif plan.missing:
        yield f"{plan.function} succeeds, and what is missing keeps the target's values."
    elif any(leaf.is_reshaped for leaf in plan.leaves):
        yield f"{plan.function} succeeds. Where shapes differ, the result has the stored shape."
    else:
        yield f"{plan.function} succeeds."
    is_explained = bool(plan.why) and plan.raises in ("MissingLeavesError", "ShapeMismatchError")
    if plan.missing and plan.suggestion is None and not is_explained:
        yield "Nothing that is stored resembles what is missing."
    if plan.suggestion is not None and not (plan.suggestion.doubts and is_explained):
        sure = "These rules would map it"
        if plan.suggestion.keeps_all:
            sure = "Nothing that is stored fits there. Where the target's own values are wanted"
        if plan.suggestion.doubts:
            sure = f"A guess, to be checked leaf by leaf ({plan.suggestion.doubts[0]})"
        is_long = len(plan.suggestion.steps) > most_steps
        yield f"{sure}:\n{'print(plan.suggestion)' if is_long else plan.suggestion}"


def _unlike(plan: Plan) -> str:
    """Return in which way ``restore_checkpoint``, whose defaults are milder, does something else; or empty."""
    return f" (restore_checkpoint {_MILD[plan.raises]})" if plan.raises in _MILD and plan.flax_succeeds else ""


def _rest(plan: Plan, more: str) -> Iterator[str]:
    """Yield what the table leaves out."""
    if more:
        yield more
    if len(plan.unused) > MAX_ROWS:
        used = {source for leaf in plan.leaves for source in leaf.sources}
        keys = dict.fromkeys(used, True) | dict.fromkeys(plan.unused, False)
        names = topmost_subtrees(keys)
        rows = fold(Row((names[path],)) for path in plan.unused)
        yield f"Stored, but not used: {one_line(' '.join(f'{row.names[0]} {row.note}'.split()) for row in rows)}"
    elif plan.unused:
        yield f"Stored, but not used: {one_line(plan.unused)}"


def _nbytes(leaf: PlannedLeaf) -> int:
    """Return the size of the target's array if it is missing, else of what is read."""
    if leaf.origin != "missing" or leaf.target_shape is None:
        return int(leaf.nbytes)
    return int(math.prod(leaf.target_shape) * getattr(leaf.target_dtype, "itemsize", 0))


def _to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as what JSON holds; dtypes are texts."""
    fields = (
        "path",
        "format",
        "nbytes",
        "function",
        "raises",
        "flax_succeeds",
        "why",
        "missing",
        "unused",
        "unused_nbytes",
    )
    leaves = [dataclasses.asdict(leaf) for leaf in plan.leaves]
    for leaf in leaves:
        leaf.update({name: None if leaf[name] is None else str(leaf[name]) for name in ("dtype", "target_dtype")})
    suggestion = None if plan.suggestion is None else str(plan.suggestion)
    return {**{name: getattr(plan, name) for name in fields}, "suggestion": suggestion, "leaves": leaves}
