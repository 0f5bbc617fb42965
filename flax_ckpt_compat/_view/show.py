"""Show what is in one checkpoint: leaves with types, sizes, shardings and statistics, as a tree or a treemap."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, SupportsFloat

import numpy as np

from flax_ckpt_compat._core import backend
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import MissingLeavesError, SettingError
from flax_ckpt_compat._core.text_formatting import Row, counted, fold, format_size, printable
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Path, from_leaves, show_path
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._trees import depth
from flax_ckpt_compat._view import metadata
from flax_ckpt_compat._view.array_values import Stats, is_numeric
from flax_ckpt_compat._view.report import Line, Report, Table, for_json

_NUMBERS = ("min", "max", "mean", "NaN", "inf")
_HEADINGS = ("leaf", "type", "leaves", "size", *_NUMBERS, "sharding")
_LEFT = ("leaf", "type", "sharding")
_MAX_NAME = 100
_MAX_ROWS = 200  # of a notebook
_MAX_BOXES, _MAX_DEPTH = 500, 6  # of more leaves, equal numbered subtrees are one box; levels that are drawn at once
_AT_ONCE = 2
_Types = dict[Path, tuple[str, str]]  # type and sharding of each leaf, as shown


@dataclasses.dataclass(slots=True)
class ChosenLeaves(metadata.StoredLeaves):
    """The leaves of a checkpoint that were asked for; its files may be closed."""

    stored: int = 0  # number of all leaves
    shardings: dict[Path, str] = dataclasses.field(default_factory=dict)  # Orbax's JSON text of those that are saved
    stats: dict[Path, Stats] | None = None  # of those that are numbers; None if they were not asked for

    @property
    def nbytes(self) -> int:
        """Return the size of the leaves in memory, in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves.values())


@depth.limited("shown")
def choose_leaves(
    path: str | os.PathLike[str],
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    item: str | None = None,
    pattern: str | None = None,
    stats: bool = False,
) -> ChosenLeaves:
    """Return what is in a checkpoint. Arrays are read for statistics alone, in bounded memory.

    Only leaves are returned that the regular expression ``pattern`` matches, in whole names, anywhere in their key
    paths, or from the root if it begins with ``^``."""
    read = functools.partial(choose_among, pattern=pattern, stats=stats)
    checkpoint_dir = metadata.dir_without_pending_saves(path, prefix)
    return metadata.read_one(checkpoint_dir, read, step=step, item=item, doing="show")


def choose_among(opened: Opened, pattern: str | None = None, *, stats: bool = False) -> ChosenLeaves:
    """Return what is in an open checkpoint; see `choose_leaves`."""
    stored = metadata.leaves_of(opened)
    wanted = {*stored.leaves, *stored.empty} if pattern is None else _matching(stored, pattern)
    leaves = {path: leaf for path, leaf in stored.leaves.items() if path in wanted}
    empty = {path: what for path, what in stored.empty.items() if path in wanted}
    shardings = {path: text for path, handle in leaves.items() if (text := handle.sharding) is not None}
    numbers = _stats(leaves) if stats else None
    return ChosenLeaves(stored.path, stored.format, leaves, empty, len(stored.leaves), shardings, numbers)


def _matching(stored: metadata.StoredLeaves, pattern: str) -> set[Path]:
    """Return the key paths that a pattern matches."""
    from flax_ckpt_compat.rules import _nodes, _rule  # which take a tenth of the start, and few calls filter

    with _rule.named("--filter"):
        names = _nodes.Names([pattern])
    matching = {path for path in (*stored.leaves, *stored.empty) if any(names.matches(path))}
    if not matching:
        near = _nodes.near_names(pattern, from_leaves(stored.leaves))
        message = f"{stored.path}: no leaf matches {pattern!r}, which must match whole names of key paths; {near}"
        raise MissingLeavesError(message, path=stored.path, leaf=pattern, missing=(pattern,))
    return matching


def _stats(leaves: dict[Path, LeafHandle]) -> dict[Path, Stats]:
    """Read leaves, and return the statistics of those that are numbers."""
    texts = (LeafKind.STR, LeafKind.BYTES, LeafKind.PRNG_KEY)
    handles = [handle for handle in leaves.values() if handle.kind not in texts]
    found: dict[LeafHandle, Stats] = {}

    def read(batch: Sequence[LeafHandle]) -> None:
        parts = ((batch[0], backend.read_all([part])[0]) for part in batch[0].parts())
        for handle, value in parts if len(batch) == 1 else zip(batch, backend.read_all(batch), strict=True):
            array = np.asarray(value)
            if is_numeric(array):
                found.setdefault(handle, Stats()).add(array)

    in_parallel(read, list(backend.batches(handles)), _AT_ONCE)
    return {path: found[handle] for path, handle in leaves.items() if handle in found}


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A subtree or leaf to show, or equal ones of numbered layers that are one row."""

    path: str
    name: str  # the last one of its path
    level: int
    count: int  # number of leaves
    nbytes: int  # their size in memory, in bytes
    type: str = ""  # of a leaf, or what an empty node is
    sharding: str = ""
    stats: Stats | None = None


@depth.limited("shown")
def _rows(chosen: ChosenLeaves, *, folds: bool = True) -> list[_Row]:
    """Return the root, and all below it, from the top down; if it ``folds``, equal numbered subtrees are one row."""
    leaves: dict[Path, LeafHandle | str] = {**chosen.leaves, **chosen.empty}
    types = {path: (metadata.describe(leaf), _sharding(chosen.shardings.get(path))) for path, leaf in leaves.items()}
    return list(_rows_of(chosen, types, list(leaves), "", show_path(()), folds=folds))


def _rows_of(
    chosen: ChosenLeaves, types: _Types, paths: list[Path], above: str, name: str, level: int = 0, *, folds: bool
) -> Iterator[_Row]:
    """Yield the row of a node, or of equal ones, with these leaves and empty nodes, and all below it."""
    handles = [chosen.leaves[path] for path in paths if path in chosen.leaves]
    row = _Row(f"{above}{name}", name, level, len(handles), sum(handle.nbytes for handle in handles))
    rest = [path for path in paths if len(path) > level]  # JSON items may be beside a tree that is one leaf
    if not rest:
        found = [chosen.stats[path] for path in paths if path in chosen.stats] if chosen.stats else []
        stats = functools.reduce(Stats.merge, found, Stats()) if found else None
        kind, sharding = types[paths[0]]
        yield dataclasses.replace(row, type=kind, sharding=sharding, stats=stats)
        return
    yield row
    below: dict[str, list[Path]] = {}
    for path in rest:
        below.setdefault(show_path((path[level],)), []).append(path)
    if all(one.isascii() and one.isdecimal() for one in below):  # items of lists and tuples: empty ones came last
        below = dict(sorted(below.items(), key=lambda one: (len(one[0]), one[0])))
    forms: dict[Any, str] = {}  # equal for subtrees of equal names, types and shardings
    children = []
    for one, inside in below.items():
        form = tuple((path[level + 1 :], types[path]) for path in inside) if folds else one
        children.append(Row((one,), (forms.setdefault(form, str(len(forms))),)))
    root = f"{above}{name}/" if level else ""
    for child in fold(children):
        inside = [path for one in child.members for path in below[one.names[0]]]
        yield from _rows_of(chosen, types, inside, root, child.names[0], level + 1, folds=folds)


def title(chosen: ChosenLeaves) -> str:
    """Return the first line: path, format, leaves and size."""
    part_of = "" if len(chosen.leaves) == chosen.stored else f"{len(chosen.leaves)} of "
    path, count = printable(chosen.path, one_line=True), counted(chosen.stored, "leaf")
    return f"{path} ({chosen.format}): {part_of}{count}, {format_size(chosen.nbytes)}"


def report(chosen: ChosenLeaves, levels: int | None = None) -> Report:
    """Return what is shown of a checkpoint; ``levels`` is the number of levels of the tree, None for all."""
    return Report(_lines(chosen, levels), functools.partial(_to_json, chosen))


def short_report(chosen: ChosenLeaves) -> Report:
    """Return the report with as many levels of the tree as a notebook has room for."""
    levels = sorted(row.level for row in _rows(chosen))
    return report(chosen, max(1, levels[_MAX_ROWS] - 1) if len(levels) > _MAX_ROWS else None)


def _lines(chosen: ChosenLeaves, levels: int | None) -> Iterator[Line | Table]:
    """Yield a row for each subtree and leaf, those of numbered layers folded, red ones for NaN and infinity."""
    yield Line(title(chosen), hang=2)
    rows = _rows(chosen)
    rows = [row for row in rows[1:] or rows if levels is None or row.level <= levels]
    cells = list(map(_cells, rows))
    shown = [n for n, heading in enumerate(_HEADINGS) if heading in _LEFT[:2] or any(row[n] for row in cells)]
    yield Table(
        [_HEADINGS[n] for n in shown],
        [[printable(row[n], one_line=True) for n in shown] for row in cells],
        {at for at, n in enumerate(shown) if _HEADINGS[n] not in _LEFT},
        ["red" if row.stats and (row.stats.nan or row.stats.inf) else None for row in rows],
    )
    yield Line("")
    totals = _by_dtype(chosen).items()
    sizes = [(name, str(one["leaves"]), format_size(one["nbytes"]) if one["nbytes"] else "") for name, one in totals]
    yield Table(("dtype", "leaves", "size"), sizes, {1, 2})


def _cells(row: _Row) -> tuple[str, ...]:
    numbers = [getattr(row.stats, name.lower(), "") for name in _NUMBERS]
    texts = ["-" if one is None else f"{one:.4g}" if isinstance(one, float) else str(one) for one in numbers]
    name, size = f"{'  ' * (row.level - 1)}{_short(row.name)}", format_size(row.nbytes) if row.nbytes else ""
    return name, row.type, str(row.count), size, *texts, row.sharding


def _short(text: str) -> str:
    """Cut off names that no line has room for: the column is as wide as the longest."""
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 1]}…"


@functools.lru_cache(maxsize=1024)
def _sharding(text: str | None) -> str:
    """Return a saved sharding in jax's words: partition spec, and shape of the mesh; nothing for a single device."""
    try:
        found = json.loads(text or "{}")
        kind = found.get("sharding_type", "")
        if kind != "NamedSharding":
            return "" if kind == "SingleDeviceSharding" else _short(str(kind))
        spec = str(found["partition_spec"])[1:-1].replace("[", "(").replace("]", ")")
        mesh = ", ".join(f"{name}={size}" for name, size in zip(found["axis_names"], found["shape"], strict=True))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "?"
    return _short(f"P({spec}) of {mesh}")


def _by_dtype(chosen: ChosenLeaves) -> dict[str, dict[str, int]]:
    """Return numbers and sizes of leaves by dtype, or by the kind of Python values and keys, the largest first."""
    found: dict[str, dict[str, int]] = {}
    for leaf in chosen.leaves.values():
        has_dtype = leaf.dtype is not None and leaf.kind is not LeafKind.PRNG_KEY
        one = found.setdefault(str(leaf.dtype) if has_dtype else leaf.kind.value, {"leaves": 0, "nbytes": 0})
        one["leaves"] += 1
        one["nbytes"] += leaf.nbytes
    return dict(sorted(found.items(), key=lambda one: (-one[1]["nbytes"], -one[1]["leaves"], one[0])))


def _to_json(chosen: ChosenLeaves) -> dict[str, Any]:
    """Return every leaf, and totals by dtype, as what JSON holds."""
    leaves = []
    for path, leaf in chosen.leaves.items():
        shown: dict[str, Any] = {"path": show_path(path), "kind": leaf.kind.value, "shape": leaf.shape}
        shown |= {"dtype": leaf.dtype, "nbytes": leaf.nbytes, "sharding": chosen.shardings.get(path)}
        if chosen.stats is not None:
            shown["stats"] = chosen.stats.get(path)
        leaves.append(shown)
    empty = {show_path(path): what for path, what in chosen.empty.items()}
    found = {"path": chosen.path, "format": chosen.format, "stored": chosen.stored, "nbytes": chosen.nbytes}
    return {**found, "leaves": for_json(leaves), "empty": empty, "dtypes": _by_dtype(chosen)}


def treemap(chosen: ChosenLeaves) -> str:
    """Return a treemap of sizes as HTML: a click zooms, and each box says its path, type and size."""
    try:
        from plotly import graph_objects
    except ImportError:
        message = "the treemap needs plotly: python -m pip install 'flax-ckpt-compat[plots]'"
        raise SettingError(message) from None
    root, *rows = _rows(chosen, folds=len(chosen.leaves) > _MAX_BOXES)
    boxes = [root, *(row for row in rows if row.nbytes)]
    drawn = graph_objects.Treemap(
        ids=[row.path for row in boxes],
        parents=["", *(row.path[: -len(row.name) - 1] or root.path for row in boxes[1:])],
        labels=[_escaped(row.name) for row in boxes],
        values=[row.nbytes for row in boxes],
        text=list(map(_text_of_box, boxes)),
        branchvalues="total",
        hovertemplate="%{text}<extra></extra>",
        texttemplate="%{label} %{value:.3s}B",
        maxdepth=_MAX_DEPTH,
    )
    figure = graph_objects.Figure(drawn, layout={"margin": {"t": 30, "l": 0, "r": 0, "b": 0}})
    return str(figure.to_html(full_html=False, include_plotlyjs=True, config={"displayModeBar": False}))


def _text_of_box(row: _Row) -> str:
    what = f"{row.count} of {row.type}" if row.type and row.count > 1 else row.type or counted(row.count, "leaf")
    return "<br>".join((_escaped(row.path), _escaped(what), format_size(row.nbytes)))


def _escaped(text: str) -> str:
    """Return text without tags: plotly's labels have some."""
    return html.escape(printable(text, one_line=True), quote=False)
