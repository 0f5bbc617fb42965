"""Render a plan for notebooks: a tree of its leaves that can be folded and searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from flax_ckpt_compat._core.text_formatting import count_of_leaves, printable
from flax_ckpt_compat._view.plan_rows import PlannedLeaf, cells_of, row_of

# Legible on white and on black: notebooks do not tell which they are.
_COLORS = {"missing": "#d33", "reshaped": "#c4b", "computed": "#07b", "kept": "#b60"}
# Beyond this number of leaves, only subtrees some of whose leaves differ are open at first.
_MAX_OPEN = 50
STYLE = (
    ".ckpt-plan, .ckpt-plan pre { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; text-align: left }"
    ".ckpt-plan pre { white-space: pre-wrap; margin: 0 0 8px }"
    ".ckpt-plan input { font: inherit; font-size: 16px; width: 100%; max-width: 32em; box-sizing: border-box }"
    ".ckpt-plan ul { list-style: none; margin: 0; padding-left: 1.2em }"
    ".ckpt-plan > ul { padding-left: 0; margin-top: 8px }"
    ".ckpt-plan summary { cursor: pointer }"
    ".ckpt-plan small { font-size: inherit; opacity: 0.65 }"
    + "".join(f".ckpt-plan .{name} {{ color: {color} }}" for name, color in _COLORS.items())
)
_SEARCH = (
    "const words = this.value.toLowerCase(), root = this.parentNode;"
    "root.querySelectorAll('li').forEach(one => "
    'one.hidden = !one.dataset.path.includes(words) && !one.querySelector(`[data-path*="${CSS.escape(words)}"]`));'
    "if (words) root.querySelectorAll('details').forEach(one => one.open = true);"
    "this.nextElementSibling.hidden = !words || !!root.querySelector('li:not([hidden])');"
)


def render(head: str, leaves: Sequence[PlannedLeaf], unused: Sequence[str]) -> str:
    """Return text, and the leaves of a plan as a tree; names from the checkpoint are escaped."""
    tree: dict[str, Any] = {}
    for leaf in leaves:
        node = tree
        for name in leaf.path.split("/")[:-1]:
            node = node.setdefault(f"{name}/", {})
        node[leaf.path.rpartition("/")[2]] = leaf
    paths = "".join(f"<li data-path={_quoted(path)}>{_text(path)}</li>" for path in unused)
    rest = f"<details><summary>Stored, but not used: {len(unused)}</summary><ul>{paths}</ul></details>"
    body = _list(tree, len(leaves) <= _MAX_OPEN) + (rest if unused else "")
    return f'<div class="ckpt-plan"><style>{STYLE}</style><pre>{_text(head)}</pre>{search_box()}{body}</div>'


def search_box() -> str:
    """Return an input that searches the list items beside it, by their ``data-path``, in lower case."""
    box = f'<input type="search" aria-label="search" placeholder="search leaves" oninput="{escape(_SEARCH)}">'
    return f'{box}<p hidden="">No leaf has this in its path.</p>'


def _list(tree: dict[str, Any], is_open: bool) -> str:
    return f"<ul>{''.join(_item(name, node, is_open) for name, node in tree.items())}</ul>"


def _item(name: str, node: Any, is_open: bool) -> str:
    if not isinstance(node, dict):
        _, source, what = cells_of(row_of(node))
        shown = f"{_text(name)} <small>←</small> {_text(source)} <small>{_text(what)}</small>"
        return f'<li data-path={_quoted(node.path)} class="{_state(node)}">{shown}</li>'
    states = Counter(map(_state, _leaves(node)))
    notes = "".join(f', <span class="{state}">{states[state]} {state}</span>' for state in _COLORS if states[state])
    opened = " open" if is_open or (len(states) > 1 and (states["missing"] or states["reshaped"])) else ""
    summary = f"{_text(name)} <small>({count_of_leaves(states.total())})</small>{notes}"
    return f"<li data-path=''><details{opened}><summary>{summary}</summary>{_list(node, is_open)}</details></li>"


def _state(leaf: PlannedLeaf) -> str:
    """Return the name of the leaf's colour: where it comes from, or that its shape differs."""
    origin = "kept" if leaf.origin == "target" else leaf.origin
    return "reshaped" if leaf.is_reshaped else origin


def _leaves(tree: dict[str, Any]) -> list[PlannedLeaf]:
    return [leaf for node in tree.values() for leaf in (_leaves(node) if isinstance(node, dict) else [node])]


def _text(text: str) -> str:
    return escape(printable(text))


def _quoted(path: str) -> str:
    return f'"{escape(printable(path, one_line=True).lower())}"'
