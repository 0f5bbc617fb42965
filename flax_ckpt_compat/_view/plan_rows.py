"""Define the leaves of a plan, and their rows: numbered layers are folded, then whole subtrees that come from alike."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core.fold_names import Row, fold
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat._core.tree import shown_names

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
