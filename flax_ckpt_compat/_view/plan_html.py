"""Render a plan for notebooks: a tree of its leaves that can be folded and searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from flax_ckpt_compat._core.text_formatting import count_of_leaves, printable
from flax_ckpt_compat._view.plan_rows import PlannedLeaf, cells_of, row_of
from flax_ckpt_compat._view.tree_html import COLORS, MAX_OPEN, STYLE, folder_item, leaf_item, search_box


def render(head: str, leaves: Sequence[PlannedLeaf], unused: Sequence[str]) -> str:
    """Return text, and the leaves of a plan as a tree; names from the checkpoint are escaped."""
    tree: dict[str, Any] = {}
    for leaf in leaves:
        node = tree
        for name in leaf.path.split("/")[:-1]:
            node = node.setdefault(f"{name}/", {})
        node[leaf.path.rpartition("/")[2]] = leaf
    paths = "".join(leaf_item(path, _text(path)) for path in unused)
    rest = f"<details><summary>Stored, but not used: {len(unused)}</summary><ul>{paths}</ul></details>"
    body = f"<ul>{_items(tree, is_open=len(leaves) <= MAX_OPEN)}</ul>{rest if unused else ''}"
    return f'<div class="ckpt-plan"><style>{STYLE}</style><pre>{_text(head)}</pre>{search_box()}{body}</div>'


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
