"""Show what is in one checkpoint: leaves with types, sizes, shardings and statistics, as a tree or a treemap."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import os
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
from flax_ckpt_compat._view import metadata
from flax_ckpt_compat._view.array_values import Stats, is_numeric
from flax_ckpt_compat._view.report import Line, Report, Table, json_number

_AT_ONCE = 2
_HEADINGS = ("leaf", "type", "leaves", "size", "min", "max", "mean", "NaN", "inf", "sharding")
_NUMBERS = ("min", "max", "mean", "nan", "inf")  # in JSON
_LEFT = ("leaf", "type", "sharding")
_MAX_NAME = 100
_MAX_ROWS = 200  # of a notebook
_MAX_BOXES, _MAX_DEPTH = 500, 6  # of more leaves, equal numbered subtrees are one box; levels that are drawn at once


@dataclasses.dataclass(slots=True)
class Contents:
    """Leaves of a checkpoint; its files may be closed."""

    path: str  # absolute path, or URL
    format: str
    leaves: dict[Path, LeafHandle]  # those that were asked for
    empty: dict[Path, str]  # None and empty containers, likewise
    stored: int  # number of all leaves
    shardings: dict[Path, str]  # Orbax's JSON text of those that are saved
    stats: dict[Path, Stats] | None  # of those that are numbers; None if they were not asked for

    @property
    def nbytes(self) -> int:
        """Return the size of the leaves in memory, in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves.values())


@depth.limited("shown")
def contents(
    path: str | os.PathLike[str],
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    item: str | None = None,
    pattern: str | None = None,
    stats: bool = False,
    begin: metadata.Begin = metadata.uncounted,
) -> Contents:
    """Return what is in a checkpoint. Arrays are read for statistics alone, in bounded memory.

    Only leaves are returned that the regular expression ``pattern`` matches, in whole names, anywhere in their key
    paths, or from the root if it begins with ``^``. ``begin`` is that of `metadata`."""
    checkpoint_dir = saved_steps.checkpoint_dir(as_text(path), as_text(prefix, "prefix"))
    metadata.wait_for_pending_saves(checkpoint_dir)

    def read(found: Location) -> Contents:
        with locating.unchanged(found), closing(opening.Opened(found, verify=True, item=item)) as opened:
            return contents_of(opened, pattern=pattern, stats=stats, begin=begin)

    return locating.read_found(checkpoint_dir, step, read, doing="show")


def contents_of(
    opened: opening.Opened,
    *,
    pattern: str | None = None,
    stats: bool = False,
    begin: metadata.Begin = metadata.uncounted,
) -> Contents:
    """Return what is in an open checkpoint; the arguments are those of `contents`."""
    stored = metadata.leaves_of(opened)
    chosen = {*stored.leaves, *stored.empty} if pattern is None else _matching(stored, pattern)
    leaves = {path: handle for path, handle in stored.leaves.items() if path in chosen}
    empty = {path: what for path, what in stored.empty.items() if path in chosen}
    shardings = {path: text for path, handle in leaves.items() if (text := handle.sharding) is not None}
    found = _stats(leaves, begin) if stats else None
    return Contents(stored.path, stored.format, leaves, empty, len(stored.leaves), shardings, found)


def _matching(stored: metadata.StoredLeaves, pattern: str) -> set[Path]:
    """Return the key paths that a pattern matches."""
    from flax_ckpt_compat.rules import _patterns, _rule  # which take a tenth of the start, and few calls filter

    with _rule.named("--filter"):
        compiled = [_patterns.whole_names(pattern)]
    matching = {path for path in (*stored.leaves, *stored.empty) if any(_patterns.matches(compiled, path))}
    if not matching:
        near = _patterns.near_names(pattern, from_leaves(stored.leaves))
        message = f"{stored.path}: no leaf matches {pattern!r}, which must match whole names of key paths; {near}"
        raise MissingLeavesError(message, path=stored.path, missing=(pattern,))
    return matching


def _stats(leaves: dict[Path, LeafHandle], begin: metadata.Begin) -> dict[Path, Stats]:
    """Read leaves, and return the statistics of those that are numbers."""
    by_reader: dict[Reader, list[LeafHandle]] = {}
    for handle in leaves.values():
        if handle.kind not in (LeafKind.STR, LeafKind.BYTES, LeafKind.PRNG_KEY):
            by_reader.setdefault(handle.reader, []).append(handle)
    found: dict[LeafHandle, Stats] = {}
    count = begin(lambda: sum(handle.nbytes for handles in by_reader.values() for handle in handles))

    def read(batch: Sequence[LeafHandle]) -> None:
        reader, alone = batch[0].reader, len(batch) == 1
        parts = ((batch[0], reader.read([part])[0]) for part in backend.pieces(batch[0]))
        for handle, value in parts if alone else zip(batch, reader.read(batch), strict=True):
            array = np.asarray(value)
            if is_numeric(array):
                found.setdefault(handle, Stats()).add(array)
            count(array.nbytes)

    in_parallel(read, [batch for handles in by_reader.values() for batch in backend.batches(handles)], _AT_ONCE)
    return {path: found[handle] for path, handle in leaves.items() if handle in found}


@dataclasses.dataclass(slots=True)
class _Subtree:
    """A subtree, or a leaf."""

    name: str  # the last name of its key path, as messages show it: a slash within it is ``\\/``
    children: dict[str, _Subtree] = dataclasses.field(default_factory=dict)
    leaf: LeafHandle | str | None = None  # a leaf, or what an empty node is
    sharding: str = ""
    stats: Stats | None = None
    count: int = 0  # number of leaves
    nbytes: int = 0  # their size in memory, in bytes
    form: Any = None  # equal for subtrees of equal names, types and shardings

    @property
    def type(self) -> str:
        """Return the type of a leaf."""
        return metadata.describe(self.leaf)


def _tree_of(contents: Contents) -> _Subtree:
    """Return the leaves as a tree, with the totals of its subtrees."""
    root = _Subtree(show_path(()))
    leaves: dict[Path, LeafHandle | str] = {**contents.leaves, **contents.empty}
    for path, leaf in leaves.items():
        node = root
        for name in path:
            shown = show_path((name,))
            node = node.children.get(shown) or node.children.setdefault(shown, _Subtree(shown))
        node.leaf, node.sharding = leaf, _sharding(contents.shardings.get(path))
        node.stats = (contents.stats or {}).get(path)
    _add_up(root, {})
    return root


def _add_up(node: _Subtree, forms: dict[Any, str]) -> None:
    if all(name.isascii() and name.isdecimal() for name in node.children):
        # Items of lists and tuples: empty ones came last.
        node.children = dict(sorted(node.children.items(), key=lambda one: (len(one[0]), one[0])))
    if isinstance(node.leaf, LeafHandle):
        node.count, node.nbytes = 1, node.leaf.nbytes
    for child in node.children.values():
        _add_up(child, forms)
        node.count += child.count
        node.nbytes += child.nbytes
    key = node.type, node.sharding, tuple((name, child.form) for name, child in node.children.items())
    node.form = forms.setdefault(key, str(len(forms)))


def _folded(members: Sequence[_Subtree], name: str) -> _Subtree:
    """Return subtrees of one form as one, with the sums of their leaves and sizes; those below are folded likewise."""
    first, stats = members[0], Stats()
    for one in members if first.stats else ():
        stats.merge(one.stats or Stats())
    count, nbytes = sum(one.count for one in members), sum(one.nbytes for one in members)
    result = _Subtree(name, {}, first.leaf, first.sharding, first.stats and stats, count, nbytes)
    for row, alike in fold_with_members([Row((key,), (one.form,)) for key, one in first.children.items()]):
        below = [member.children[one.names[0]] for member in members for one in alike]
        result.children[row.names[0]] = _folded(below, row.names[0])
    return result


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
    above = sorted(above for _, above in _nodes(_folded_tree(contents), None))
    return report(contents, max(1, above[_MAX_ROWS]) if len(above) > _MAX_ROWS else None)


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
    totals = _by_dtype(contents).items()
    sizes = [(name, str(one["leaves"]), format_size(one["nbytes"]) if one["nbytes"] else "") for name, one in totals]
    yield Table(("dtype", "leaves", "size"), sizes, {1, 2})


def _nodes(node: _Subtree, levels: int | None, above: int = 0) -> Iterator[tuple[_Subtree, int]]:
    """Yield what is below a node, with the number of levels above it."""
    for child in node.children.values():
        yield child, above
        if levels != above + 1:
            yield from _nodes(child, levels, above + 1)


def _cells(node: _Subtree, above: int) -> tuple[str, ...]:
    name, size = f"{'  ' * above}{_short(node.name)}", format_size(node.nbytes) if node.nbytes else ""
    numbers = ("",) * len(_NUMBERS) if node.stats is None else map(_number, _five(node.stats))
    return name, node.type, str(node.count), size, *numbers, node.sharding


def _short(text: str) -> str:
    """Cut off names that no line has room for: the column is as wide as the longest."""
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 1]}…"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _five(stats: Stats) -> tuple[float | None, ...]:
    return stats.min, stats.max, stats.mean, stats.nan, stats.inf


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


def _by_dtype(contents: Contents) -> dict[str, dict[str, int]]:
    """Return numbers and sizes of leaves by dtype, or by the kind of Python values and keys, the largest first."""
    found: dict[str, dict[str, int]] = {}
    for leaf in contents.leaves.values():
        has_dtype = leaf.dtype is not None and leaf.kind is not LeafKind.PRNG_KEY
        one = found.setdefault(str(leaf.dtype) if has_dtype else leaf.kind.value, {"leaves": 0, "nbytes": 0})
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
        "leaves": [_leaf_to_json(contents, path) for path in contents.leaves],
        "empty": {show_path(path): what for path, what in contents.empty.items()},
        "dtypes": _by_dtype(contents),
        "subtrees": dict(_subtrees(_tree_of(contents), levels)),
    }


def _leaf_to_json(contents: Contents, path: Path) -> dict[str, Any]:
    leaf = contents.leaves[path]
    dtype = None if leaf.dtype is None else str(leaf.dtype)
    shown: dict[str, Any] = {"path": show_path(path), "kind": leaf.kind.value, "shape": leaf.shape, "dtype": dtype}
    shown |= {"nbytes": leaf.nbytes, "sharding": contents.shardings.get(path)}
    if contents.stats is not None:
        stats = contents.stats.get(path)
        shown["stats"] = stats and dict(zip(_NUMBERS, map(json_number, _five(stats)), strict=True))
    return shown


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
    whole = len(contents.leaves) <= _MAX_BOXES
    boxes = _boxes(_tree_of(contents) if whole else _folded_tree(contents))
    paths, parents, labels, sizes, texts = zip(*boxes, strict=True)
    drawn = graph_objects.Treemap(
        ids=paths,
        parents=parents,
        labels=labels,
        values=sizes,
        text=texts,
        branchvalues="total",
        hovertemplate="%{text}<extra></extra>",
        texttemplate="%{label} %{value:.3s}B",
        maxdepth=_MAX_DEPTH,
    )
    figure = graph_objects.Figure(drawn, layout={"margin": {"t": 30, "l": 0, "r": 0, "b": 0}})
    page: str = figure.to_html(full_html=False, include_plotlyjs=True, config={"displayModeBar": False})
    return page


def _boxes(node: _Subtree, path: str = "", parent: str = "") -> Iterator[tuple[str, str, str, int, str]]:
    """Yield path, parent, label, size, and text under the mouse of each box."""
    path = path or node.name
    what = f"{node.count} of {node.type}" if node.type and node.count > 1 else node.type or count_of_leaves(node.count)
    text = "<br>".join((_escaped(path), _escaped(what), format_size(node.nbytes)))
    yield path, parent, _escaped(node.name), node.nbytes, text
    for name, child in node.children.items():
        if child.nbytes:
            yield from _boxes(child, f"{path}/{name}" if parent else name, path)


def _escaped(text: str) -> str:
    """Return text without tags: plotly's labels have some."""
    return html.escape(printable(text, one_line=True), quote=False)
