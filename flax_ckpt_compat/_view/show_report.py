"""Report what is in a checkpoint: its tree, folded by numbered layers, and totals by dtype."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

from flax_ckpt_compat._core.fold_names import Row, fold_with_members
from flax_ckpt_compat._core.text_formatting import aligned, count_of_leaves, format_size, printable
from flax_ckpt_compat._core.tree import show_path
from flax_ckpt_compat._trees import depth
from flax_ckpt_compat._view.array_values import Stats
from flax_ckpt_compat._view.report import Line, Report
from flax_ckpt_compat._view.show import Contents, ShownLeaf

_HEADINGS = ("leaf", "type", "leaves", "size", "min", "max", "mean", "NaN", "inf", "sharding")
_LEFT = ("leaf", "type", "sharding")
_MAX_NAME = 100


@dataclasses.dataclass(slots=True)
class Subtree:
    """A subtree, or a leaf."""

    name: str  # the last name of its key path, as messages show it: a slash within it is ``\\/``
    children: dict[str, Subtree] = dataclasses.field(default_factory=dict)
    leaf: ShownLeaf | None = None
    count: int = 0  # number of leaves
    nbytes: int = 0  # their size in memory, in bytes
    form: str = ""  # equal for subtrees of equal names, types and shardings


@depth.limited("shown")
def tree_of(contents: Contents) -> Subtree:
    """Return the leaves as a tree, with the totals of its subtrees."""
    root = Subtree(show_path(()))
    for leaf in (*contents.leaves, *contents.empty):
        node = root
        for name in leaf.path:
            shown, parent = show_path((name,)), node
            child = parent.children.get(shown)
            node = parent.children.setdefault(shown, Subtree(shown)) if child is None else child
        node.leaf = leaf
    _add_up(root, {})
    return root


def _add_up(node: Subtree, forms: dict[Any, str]) -> None:
    if all(name.isascii() and name.isdecimal() for name in node.children):
        # Items of lists and tuples: empty ones came last.
        node.children = dict(sorted(node.children.items(), key=lambda one: (len(one[0]), one[0])))
    if node.leaf is not None:
        node.count, node.nbytes = int(bool(node.leaf.kind)), node.leaf.nbytes
    for child in node.children.values():
        _add_up(child, forms)
        node.count += child.count
        node.nbytes += child.nbytes
    own = (node.leaf.type, sharding(node.leaf.sharding)) if node.leaf is not None else ()
    key = own, tuple((name, child.form) for name, child in node.children.items())
    node.form = forms.setdefault(key, str(len(forms)))


def title(contents: Contents) -> str:
    """Return the first line: path, format, leaves and size."""
    count = count_of_leaves(contents.stored)
    count = count if len(contents.leaves) == contents.stored else f"{len(contents.leaves)} of {count}"
    path = printable(contents.path, one_line=True)
    return f"{path} ({contents.format}): {count}, {format_size(contents.nbytes)}"


def report(contents: Contents, levels: int | None = None) -> Report:
    """Return what is shown of a checkpoint; ``levels`` is the number of levels of the tree, None for all."""
    return Report(_lines(contents, levels), functools.partial(_to_json, contents, levels))


def _lines(contents: Contents, levels: int | None) -> Iterator[Line]:
    """Yield a line for each subtree and leaf, those of numbered layers folded, red ones for NaN and infinity."""
    yield Line(title(contents))
    root = tree_of(contents)
    with depth.limited("shown"):
        rows = [_row(root.name, [root])] if root.leaf else list(_rows([root], levels))
    keep = [n for n, heading in enumerate(_HEADINGS) if heading in _LEFT[:2] or any(cells[n] for cells, _ in rows)]
    table = [[printable(cells[n], one_line=True) for n in keep] for cells in (_HEADINGS, *(cells for cells, _ in rows))]
    right = {at for at, n in enumerate(keep) if _HEADINGS[n] not in _LEFT}
    for text, stats in zip(aligned(table, right), (None, *(stats for _, stats in rows)), strict=True):
        yield Line(text, "red" if stats is not None and (stats.nan or stats.inf) else None, hang=4)
    yield from map(Line, ["", *_totals(contents)])


_Cells = tuple[str, ...]


def _rows(members: list[Subtree], levels: int | None, indent: str = "") -> Iterator[tuple[_Cells, Stats | None]]:
    """Yield the rows of what is below some subtrees of one form."""
    for row, folded in fold_with_members([Row((name,), (child.form,)) for name, child in members[0].children.items()]):
        below = [member.children[one.names[0]] for member in members for one in folded]
        yield _row(f"{indent}{_short(row.names[0])}", below)
        if levels != 1:
            yield from _rows(below, levels and levels - 1, f"{indent}  ")


def folded(node: Subtree) -> Subtree:
    """Return the tree with equal numbered subtrees as one, with the sums of their leaves and sizes.

    Its name is that of all, its key in ``children`` that of the first."""
    return _folded(node.name, [node])


def _folded(name: str, members: list[Subtree]) -> Subtree:
    count, nbytes = sum(one.count for one in members), sum(one.nbytes for one in members)
    result = Subtree(name, leaf=members[0].leaf, count=count, nbytes=nbytes, form=members[0].form)
    for row, alike in fold_with_members([Row((key,), (one.form,)) for key, one in members[0].children.items()]):
        below = [member.children[one.names[0]] for member in members for one in alike]
        result.children[alike[0].names[0]] = _folded(row.names[0], below)
    return result


def _row(name: str, members: list[Subtree]) -> tuple[_Cells, Stats | None]:
    leaf = members[0].leaf
    count, nbytes = sum(one.count for one in members), sum(one.nbytes for one in members)
    what = ("", "") if leaf is None else (leaf.type, sharding(leaf.sharding))
    stats = _merged([one.leaf.stats for one in members if one.leaf])
    return (name, what[0], str(count), format_size(nbytes) if nbytes else "", *numbers(stats), what[1]), stats


def _merged(all_stats: list[Stats | None]) -> Stats | None:
    """Return the statistics of all elements of some leaves of one type."""
    merged = None
    for stats in filter(None, all_stats):
        merged = merged or Stats()
        merged.merge(stats)
    return merged


def _short(text: str) -> str:
    """Cut off names that no line has room for: the column is as wide as the longest."""
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 1]}…"


def numbers(stats: Stats | None) -> tuple[str, ...]:
    """Return min, max, mean, NaN and inf as text."""
    if stats is None:
        return ("",) * 5
    three = ["-" if one is None else f"{one:.4g}" if isinstance(one, float) else str(one) for one in _three(stats)]
    return (*three, str(stats.nan), str(stats.inf))


def stats_words(stats: Stats | None) -> tuple[str, str]:
    """Return what a line of text says of values, and what of NaN and infinities; empty if there is nothing to say."""
    if stats is None:
        return "", ""
    low, high, mean, nan, inf = numbers(stats)
    return f"min {low}, max {high}, mean {mean}", f"NaN {nan}, inf {inf}" if stats.nan or stats.inf else ""


def _three(stats: Stats) -> tuple[Any, ...]:
    return stats.min, stats.max, stats.mean


@functools.lru_cache(maxsize=1024)
def sharding(text: str | None) -> str:
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


def _totals(contents: Contents) -> list[str]:
    """Return a table of leaves and sizes by dtype."""
    rows = [
        (name, str(one["leaves"]), format_size(one["nbytes"]) if one["nbytes"] else "")
        for name, one in by_dtype(contents).items()
    ]
    return aligned([("dtype", "leaves", "size"), *rows], right={1, 2})


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
        "subtrees": dict(_subtrees(tree_of(contents), levels)),
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


def _subtrees(node: Subtree, levels: int | None, path: str = "") -> Iterator[tuple[str, dict[str, int]]]:
    for name, child in node.children.items() if levels != 0 else ():
        if child.children:
            here = f"{path}{name}"
            yield here, {"leaves": child.count, "nbytes": child.nbytes}
            yield from _subtrees(child, levels and levels - 1, f"{here}/")
