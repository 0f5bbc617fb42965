"""Show what is in one checkpoint: leaves with types, sizes, shardings and statistics, as a tree or a treemap."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import html
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, SupportsFloat

import numpy as np

from flax_ckpt_compat._core import backend
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import MissingLeavesError, SettingError
from flax_ckpt_compat._core.location import Location, as_text
from flax_ckpt_compat._core.text_formatting import Row, count_of_leaves, fold_with_members, format_size, printable
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Path, from_leaves, show_path
from flax_ckpt_compat._discovery import locating, opening, saved_steps
from flax_ckpt_compat._trees import depth
from flax_ckpt_compat._view.array_values import Stats, is_numeric
from flax_ckpt_compat._view.metadata import (
    Begin,
    StoredLeaves,
    describe,
    leaves_of,
    uncounted,
    wait_for_pending_saves,
)
from flax_ckpt_compat._view.report import Line, Report, Table

_AT_ONCE = 2
_HEADINGS = ("leaf", "type", "leaves", "size", "min", "max", "mean", "NaN", "inf", "sharding")
_LEFT = ("leaf", "type", "sharding")
_MAX_NAME = 100
_MAX_ROWS = 200  # of a notebook
_MAX_BOXES, _MAX_DEPTH = 500, 6  # of more leaves, equal numbered subtrees are one box; levels that are drawn at once
# Black text is legible on all of them; the last is that of all further dtypes.
_FILLS, _GREY = ("#8ecae6", "#ffb703", "#95d5b2", "#f4a3b4", "#cdb4db", "#e9c46a", "#a8dadc", "#d4d4d4"), "#eeeeee"


@dataclasses.dataclass(frozen=True, slots=True)
class ShownLeaf:
    """One leaf, or an empty node."""

    path: Path
    type: str  # ``float32[3,4]``, ``key uint32[2]``, ``int``; of an empty node ``None``, ``{}`` or ``[]``
    kind: str = ""  # name of its `LeafKind`; empty for an empty node
    shape: tuple[int, ...] = ()  # of the array, or of the key data of a PRNG key
    dtype: str | None = None  # of the array, numpy scalar or key data; None for others
    nbytes: int = 0  # size in memory, in bytes; 0 if the format does not store it
    sharding: str | None = None  # saved sharding as Orbax's JSON text, or None
    stats: Stats | None = None  # of its values, if they were asked for and are numbers

    @property
    def dtype_or_kind(self) -> str:
        """Return what totals are counted by: the dtype, the kind of a Python value, or ``prng key``."""
        return self.kind if self.dtype is None or self.kind == LeafKind.PRNG_KEY.value else self.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """Leaves of a checkpoint."""

    path: str  # absolute path, or URL
    format: str  # ``msgpack`` or ``orbax``
    leaves: tuple[ShownLeaf, ...]  # the leaves that were asked for
    empty: tuple[ShownLeaf, ...]  # None and empty containers, likewise
    stored: int  # number of all leaves
    has_stats: bool  # statistics were asked for

    @property
    def nbytes(self) -> int:
        """Return the size of the leaves in memory, in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)


@depth.limited("shown")
def contents(
    path: str | os.PathLike[str],
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    item: str | None = None,
    pattern: str | None = None,
    stats: bool = False,
    begin: Begin = uncounted,
) -> Contents:
    """Return what is in a checkpoint. Arrays are read for statistics alone, in bounded memory.

    Only leaves are returned that the regular expression ``pattern`` matches, in whole names, anywhere in their key
    paths, or from the root if it begins with ``^``. ``begin`` is that of `metadata`."""
    checkpoint_dir = saved_steps.checkpoint_dir(as_text(path), as_text(prefix, "prefix"))
    wait_for_pending_saves(checkpoint_dir)

    def read(found: Location) -> Contents:
        with locating.unchanged(found), closing(opening.Opened(found, verify=True, item=item)) as opened:
            return contents_of(opened, pattern=pattern, stats=stats, begin=begin)

    return locating.read_found(checkpoint_dir, step, read, doing="show")


def contents_of(
    opened: opening.Opened,
    *,
    pattern: str | None = None,
    stats: bool = False,
    begin: Begin = uncounted,
) -> Contents:
    """Return what is in an open checkpoint; the arguments are those of `contents`."""
    stored = leaves_of(opened)
    chosen, empty = _chosen(stored, pattern)
    values = _stats(chosen, begin) if stats else {}
    leaves = tuple(_shown(path, handle, values.get(handle)) for path, handle in chosen.items())
    nodes = tuple(ShownLeaf(path, what) for path, what in empty.items())
    return Contents(stored.path, stored.format, leaves, nodes, len(stored.leaves), stats)


def _chosen(stored: StoredLeaves, pattern: str | None) -> tuple[dict[Path, LeafHandle], dict[Path, str]]:
    """Return the leaves and empty nodes that a pattern matches."""
    if pattern is None:
        return stored.leaves, stored.empty
    from flax_ckpt_compat.rules import _patterns, _rule  # which take a tenth of the start, and few calls filter

    with _rule.named("--filter"):
        compiled = [_patterns.whole_names(pattern)]
    matching = {path for path in (*stored.leaves, *stored.empty) if any(_patterns.matches(compiled, path))}
    if not matching:
        near = _patterns.near_names(pattern, from_leaves(stored.leaves))
        message = f"{stored.path}: no leaf matches {pattern!r}, which must match whole names of key paths; {near}"
        raise MissingLeavesError(message, path=stored.path, missing=(pattern,))
    leaves = {path: handle for path, handle in stored.leaves.items() if path in matching}
    return leaves, {path: what for path, what in stored.empty.items() if path in matching}


def _shown(path: Path, handle: LeafHandle, stats: Stats | None) -> ShownLeaf:
    dtype = None if handle.dtype is None else str(handle.dtype)
    return ShownLeaf(
        path, describe(handle), handle.kind.value, handle.shape, dtype, handle.nbytes, handle.sharding, stats
    )


def _stats(chosen: dict[Path, LeafHandle], begin: Begin) -> dict[LeafHandle, Stats]:
    """Read leaves, and return the statistics of those that are numbers."""
    by_reader: dict[Reader, list[LeafHandle]] = {}
    for handle in chosen.values():
        if handle.kind not in (LeafKind.STR, LeafKind.BYTES, LeafKind.PRNG_KEY):
            by_reader.setdefault(handle.reader, []).append(handle)
    found: dict[LeafHandle, Stats] = {}
    count = begin(lambda: sum(handle.nbytes for handles in by_reader.values() for handle in handles))

    def read(batch: Sequence[LeafHandle]) -> None:
        for handle, value in _values(batch):
            array = np.asarray(value)
            if is_numeric(array):
                found.setdefault(handle, Stats()).add(array)
            count(array.nbytes)

    in_parallel(read, [batch for handles in by_reader.values() for batch in backend.batches(handles)], _AT_ONCE)
    return found


def _values(batch: Sequence[LeafHandle]) -> Any:
    """Yield the leaves of a batch with their values, or the slices of one that is large."""
    reader = batch[0].reader
    if len(batch) > 1:
        yield from zip(batch, reader.read(batch), strict=True)
    else:
        for part in backend.pieces(batch[0]):
            yield batch[0], reader.read([part])[0]


@dataclasses.dataclass(slots=True)
class _Subtree:
    """A subtree, or a leaf."""

    name: str  # the last name of its key path, as messages show it: a slash within it is ``\\/``
    children: dict[str, _Subtree] = dataclasses.field(default_factory=dict)
    leaf: ShownLeaf | None = None
    count: int = 0  # number of leaves
    nbytes: int = 0  # their size in memory, in bytes
    form: str = ""  # equal for subtrees of equal names, types and shardings
    stats: Stats | None = None  # of a leaf


def _tree_of(contents: Contents) -> _Subtree:
    """Return the leaves as a tree, with the totals of its subtrees."""
    root = _Subtree(show_path(()))
    for leaf in (*contents.leaves, *contents.empty):
        node = root
        for name in leaf.path:
            shown, parent = show_path((name,)), node
            child = parent.children.get(shown)
            node = parent.children.setdefault(shown, _Subtree(shown)) if child is None else child
        node.leaf, node.stats = leaf, leaf.stats
    _add_up(root, {})
    return root


def _add_up(node: _Subtree, forms: dict[Any, str]) -> None:
    if all(name.isascii() and name.isdecimal() for name in node.children):
        # Items of lists and tuples: empty ones came last.
        node.children = dict(sorted(node.children.items(), key=lambda one: (len(one[0]), one[0])))
    if node.leaf is not None:
        node.count, node.nbytes = int(bool(node.leaf.kind)), node.leaf.nbytes
    for child in node.children.values():
        _add_up(child, forms)
        node.count += child.count
        node.nbytes += child.nbytes
    own = (node.leaf.type, _sharding(node.leaf.sharding)) if node.leaf is not None else ()
    key = own, tuple((name, child.form) for name, child in node.children.items())
    node.form = forms.setdefault(key, str(len(forms)))


def _folded(members: Sequence[_Subtree], name: str) -> _Subtree:
    """Return subtrees of one form as one, with the sums of their leaves and sizes; those below are folded likewise."""
    first = members[0]
    count, nbytes = sum(one.count for one in members), sum(one.nbytes for one in members)
    result = _Subtree(name, {}, first.leaf, count, nbytes, stats=_merged([one.stats for one in members]))
    for row, alike in fold_with_members([Row((key,), (one.form,)) for key, one in first.children.items()]):
        below = [member.children[one.names[0]] for member in members for one in alike]
        result.children[row.names[0]] = _folded(below, row.names[0])
    return result


def _merged(all_stats: Sequence[Stats | None]) -> Stats | None:
    """Return the statistics of all elements of some leaves of one type."""
    merged = None
    for stats in filter(None, all_stats):
        merged = merged or Stats()
        merged.merge(stats)
    return merged


def title(contents: Contents) -> str:
    """Return the first line: path, format, leaves and size."""
    count = count_of_leaves(contents.stored)
    count = count if len(contents.leaves) == contents.stored else f"{len(contents.leaves)} of {count}"
    path = printable(contents.path, one_line=True)
    return f"{path} ({contents.format}): {count}, {format_size(contents.nbytes)}"


def report(contents: Contents, levels: int | None = None) -> Report:
    """Return what is shown of a checkpoint; ``levels`` is the number of levels of the tree, None for all."""
    return Report(_lines(contents, levels), functools.partial(_to_json, contents, levels))


def short_report(contents: Contents) -> Report:
    """Return the report with as many levels of the tree as a notebook has room for."""
    counts = Counter(above for _, above in _nodes(_folded_tree(contents), None))
    rows = list(itertools.accumulate(counts[level] for level in sorted(counts)))
    return report(contents, max(1, bisect.bisect_right(rows, _MAX_ROWS)))


@depth.limited("shown")
def _folded_tree(contents: Contents) -> _Subtree:
    root = _tree_of(contents)
    return _folded([root], root.name)


def _lines(contents: Contents, levels: int | None) -> Iterator[Line | Table]:
    """Yield a row for each subtree and leaf, those of numbered layers folded, red ones for NaN and infinity."""
    yield Line(title(contents), hang=2)
    root = _folded_tree(contents)
    with depth.limited("shown"):
        nodes = [(root, 0)] if root.leaf else list(_nodes(root, levels))
    rows = [_cells(node, above) for node, above in nodes]
    shown = [n for n, heading in enumerate(_HEADINGS) if heading in _LEFT[:2] or any(cells[n] for cells in rows)]
    yield Table(
        [_HEADINGS[n] for n in shown],
        [[printable(cells[n], one_line=True) for n in shown] for cells in rows],
        {at for at, n in enumerate(shown) if _HEADINGS[n] not in _LEFT},
        ["red" if node.stats and (node.stats.nan or node.stats.inf) else None for node, _ in nodes],
    )
    yield Line("")
    totals = by_dtype(contents).items()
    sizes = [(name, str(one["leaves"]), format_size(one["nbytes"]) if one["nbytes"] else "") for name, one in totals]
    yield Table(("dtype", "leaves", "size"), sizes, {1, 2})


def _nodes(node: _Subtree, levels: int | None, above: int = 0) -> Iterator[tuple[_Subtree, int]]:
    """Yield what is below a node, with the number of levels above it."""
    for child in node.children.values():
        yield child, above
        if levels != above + 1:
            yield from _nodes(child, levels, above + 1)


def _cells(node: _Subtree, above: int) -> tuple[str, ...]:
    what = ("", "") if node.leaf is None else (node.leaf.type, _sharding(node.leaf.sharding))
    size = format_size(node.nbytes) if node.nbytes else ""
    return f"{'  ' * above}{_short(node.name)}", what[0], str(node.count), size, *_numbers(node.stats), what[1]


def _short(text: str) -> str:
    """Cut off names that no line has room for: the column is as wide as the longest."""
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 1]}…"


def _numbers(stats: Stats | None) -> tuple[str, ...]:
    """Return min, max, mean, NaN and inf as text."""
    if stats is None:
        return ("",) * 5
    three = ["-" if one is None else f"{one:.4g}" if isinstance(one, float) else str(one) for one in _three(stats)]
    return (*three, str(stats.nan), str(stats.inf))


def _three(stats: Stats) -> tuple[Any, ...]:
    return stats.min, stats.max, stats.mean


@functools.lru_cache(maxsize=1024)
def _sharding(text: str | None) -> str:
    """Return a saved sharding in jax's words: partition spec, and shape of the mesh; nothing for a single device."""
    try:
        found = json.loads(text or "{}")
        kind = found.get("sharding_type", "")
        if kind != "NamedSharding":
            return "" if kind == "SingleDeviceSharding" else _short(str(kind))
        spec = ", ".join(map(_axis, found["partition_spec"]))
        mesh = ", ".join(f"{name}={size}" for name, size in zip(found["axis_names"], found["shape"], strict=True))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "?"
    return _short(f"P({spec}) of {mesh}")


def _axis(name: Any) -> str:
    return f"({', '.join(map(_axis, name))})" if isinstance(name, list) else repr(name)


def by_dtype(contents: Contents) -> dict[str, dict[str, int]]:
    """Return numbers and sizes of leaves by dtype, the largest first."""
    found: dict[str, dict[str, int]] = {}
    for leaf in contents.leaves:
        one = found.setdefault(leaf.dtype_or_kind, {"leaves": 0, "nbytes": 0})
        one["leaves"] += 1
        one["nbytes"] += leaf.nbytes
    return dict(sorted(found.items(), key=lambda one: (-one[1]["nbytes"], -one[1]["leaves"], one[0])))


@depth.limited("shown")
def _to_json(contents: Contents, levels: int | None) -> dict[str, Any]:
    """Return all as what JSON holds: every leaf, and totals by dtype, and by subtree down to a level."""
    return {
        "path": contents.path,
        "format": contents.format,
        "stored": contents.stored,
        "nbytes": contents.nbytes,
        "leaves": [_leaf_to_json(leaf, has_stats=contents.has_stats) for leaf in contents.leaves],
        "empty": {show_path(node.path): node.type for node in contents.empty},
        "dtypes": by_dtype(contents),
        "subtrees": dict(_subtrees(_tree_of(contents), levels)),
    }


def _leaf_to_json(leaf: ShownLeaf, *, has_stats: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"path": show_path(leaf.path), "kind": leaf.kind, "shape": leaf.shape, "dtype": leaf.dtype}
    shown |= {"nbytes": leaf.nbytes, "sharding": leaf.sharding}
    if has_stats:
        shown["stats"] = None if leaf.stats is None else _stats_to_json(leaf.stats)
    return shown


def _stats_to_json(stats: Stats) -> dict[str, Any]:
    three = [str(one) if isinstance(one, float) and not math.isfinite(one) else one for one in _three(stats)]
    return dict(zip(("min", "max", "mean", "nan", "inf"), (*three, stats.nan, stats.inf), strict=True))


def _subtrees(node: _Subtree, levels: int | None, path: str = "") -> Iterator[tuple[str, dict[str, int]]]:
    for name, child in node.children.items() if levels != 0 else ():
        if child.children:
            here = f"{path}{name}"
            yield here, {"leaves": child.count, "nbytes": child.nbytes}
            yield from _subtrees(child, levels and levels - 1, f"{here}/")


@depth.limited("shown")
def treemap(contents: Contents) -> str:
    """Return a treemap of sizes as HTML: a click zooms, and each box says its path, type and size."""
    try:
        from plotly import graph_objects
    except ImportError:
        message = "the treemap needs plotly: python -m pip install 'flax-ckpt-compat[plots]'"
        raise SettingError(message) from None
    whole = _tree_of(contents)
    boxes = list(_boxes(_folded_tree(contents) if whole.count > _MAX_BOXES else whole))
    kinds = by_dtype(contents)
    fills = dict(zip(kinds, [*_FILLS, *_FILLS[-1:] * len(kinds)], strict=False)) | {"": _GREY}
    paths, parents, labels, sizes, texts, of_boxes = zip(*boxes, strict=True)
    drawn = graph_objects.Treemap(
        ids=paths,
        parents=parents,
        labels=labels,
        values=sizes,
        text=texts,
        marker_colors=[fills[kind] for kind in of_boxes],
        branchvalues="total",
        hovertemplate="%{text}<extra></extra>",
        texttemplate="%{label} %{value:.3s}B",
        maxdepth=_MAX_DEPTH,
    )
    figure = graph_objects.Figure(drawn, layout={"margin": {"t": 30, "l": 0, "r": 0, "b": 0}})
    page: str = figure.to_html(full_html=False, include_plotlyjs=True, config={"displayModeBar": False})
    return page


def _boxes(node: _Subtree, path: str = "", parent: str = "") -> Iterator[tuple[str, str, str, int, str, str]]:
    """Yield path, parent, label, size, text under the mouse and dtype of each box; '' is the dtype of subtrees."""
    path = path or node.name
    kind, what = (node.leaf.dtype_or_kind, node.leaf.type) if node.leaf else ("", "")
    what = f"{node.count} of {what}" if what and node.count > 1 else what or count_of_leaves(node.count)
    text = "<br>".join((_escaped(path), _escaped(what), format_size(node.nbytes)))
    yield path, parent, _escaped(node.name), node.nbytes, text, kind
    for name, child in node.children.items():
        if child.nbytes:
            yield from _boxes(child, f"{path}/{name}" if parent else name, path)


def _escaped(text: str) -> str:
    """Return text without tags: plotly's labels have some."""
    return html.escape(printable(text, one_line=True), quote=False)
