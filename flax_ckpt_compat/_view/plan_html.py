"""Render a plan for notebooks: a tree of its leaves that can be folded and searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from flax_ckpt_compat._core.text_formatting import count_of_leaves, printable
from flax_ckpt_compat._core.tree import shown_names
from flax_ckpt_compat._view.plan_rows import PlannedLeaf, cells_of, row_of
from flax_ckpt_compat._view.tree_html import (
    COLORS,
    MAX_OPEN,
    MOST_STATIC,
    STYLE,
    TreeData,
    folder_item,
    leaf_item,
    paths_by_script,
    search_box,
)


def render(head: str, leaves: Sequence[PlannedLeaf], unused: Sequence[str]) -> str:
    """Return text, and the leaves of a plan as a tree; names from the checkpoint are escaped."""
    tree: dict[str, Any] = {}
    for leaf in leaves:
        node = tree
        *above, last = shown_names(leaf.path)
        for name in above:
            node = node.setdefault(f"{name}/", {})
        node[last] = leaf
    is_large = len(leaves) > MOST_STATIC
    listed = _large(tree) if is_large else f"<ul>{_items(tree, is_open=len(leaves) <= MAX_OPEN)}</ul>"
    body = f"{listed}{_unused(unused)}"
    return f'<div class="ckpt-plan"><style>{STYLE}</style><pre>{_text(head)}</pre>{search_box()}{body}</div>'


def _unused(paths: Sequence[str]) -> str:
    """Return the list of what is stored and not used; of many, a tree that a script lists."""
    if not paths:
        return ""
    is_large = len(paths) > MOST_STATIC
    items = "".join(leaf_item(path, _text(path)) for path in ([] if is_large else paths))
    listed = paths_by_script(paths) if is_large else f"<ul>{items}</ul>"
    return f"<details><summary>Stored, but not used: {len(paths)}</summary>{listed}</details>"


def _large(tree: dict[str, Any]) -> str:
    """Return the list of many leaves, as data and a script."""
    data, known = TreeData(), dict[Any, int]()

    def row(name: str, node: Any, above: tuple[str, ...]) -> list[Any]:
        shown, names = printable(name.removesuffix("/"), one_line=True), (*above, name.removesuffix("/"))
        if isinstance(node, dict):
            return [shown, ~form(node, names)]
        _, source, what = cells_of(row_of(node))
        return [shown, data.type_of(_state(node), what), *data.source_of(source, names)]

    def form(node: dict[str, Any], above: tuple[str, ...]) -> int:
        rows = [row(name, child, above) for name, child in node.items()]
        states = Counter(map(_state, _leaves(node)))
        notes = [[state, f"{states[state]} {state}"] for state in COLORS if states[state]]
        key = (*map(tuple, rows), *states.items())
        if key not in known:
            known[key] = len(data.forms)
            data.forms.append([count_of_leaves(states.total()), notes, states.total(), rows])
        return known[key]

    return data.html(form(tree, ()), "Without scripts, print the plan.")


def _items(tree: dict[str, Any], *, is_open: bool) -> str:
    return "".join(_item(name, node, is_open) for name, node in tree.items())


def _item(name: str, node: Any, is_open: bool) -> str:
    if not isinstance(node, dict):
        _, source, what = cells_of(row_of(node))
        shown = f"{_text(name)} <small>←</small> {_text(source)} <small>{_text(what)}</small>"
        return leaf_item(node.path, shown, _state(node))
    states = Counter(map(_state, _leaves(node)))
    notes = "".join(f', <span class="{state}">{states[state]} {state}</span>' for state in COLORS if states[state])
    summary = f"{_text(name)} <small>({count_of_leaves(states.total())})</small>{notes}"
    is_mixed = len(states) > 1 and bool(states["missing"] or states["reshaped"])
    return folder_item(summary, _items(node, is_open=is_open), is_open=is_open or is_mixed)


def _state(leaf: PlannedLeaf) -> str:
    """Return the name of the leaf's colour: where it comes from, or that its shape differs."""
    origin = "kept" if leaf.origin == "target" else leaf.origin
    return "reshaped" if leaf.is_reshaped else origin


def _leaves(tree: dict[str, Any]) -> list[PlannedLeaf]:
    return [leaf for node in tree.values() for leaf in (_leaves(node) if isinstance(node, dict) else [node])]


def _text(text: str) -> str:
    return escape(printable(text))
