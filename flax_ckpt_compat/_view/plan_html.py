"""Render a plan for notebooks: a tree of its leaves that can be folded and searched."""

from __future__ import annotations

from html import escape
from typing import Any

from flax_ckpt_compat._core.escaping import printable
from flax_ckpt_compat._view import plan_text

Plan = Any  # flax_ckpt_compat._view.plan.Plan, which imports this module
_COLORS = {"missing": "#c00", "computed": "#07a", "target": "#a60", "checkpoint": "inherit"}
# Beyond this number of leaves, only subtrees with differences are open at first.
_MAX_OPEN = 50
_SEARCH = (
    "const words = this.value.toLowerCase(), root = this.parentNode;"
    "root.querySelectorAll('li').forEach(one => "
    'one.hidden = !one.dataset.path.includes(words) && !one.querySelector(`[data-path*="${CSS.escape(words)}"]`));'
    "if (words) root.querySelectorAll('details').forEach(one => one.open = true);"
)


def render(plan: Plan) -> str:
    """Return the plan as HTML; names from the checkpoint are escaped."""
    tree: dict[str, Any] = {}
    for leaf in plan.leaves:
        node = tree
        for name in leaf.path.split("/")[:-1]:
            node = node.setdefault(f"{name}/", {})
        node[leaf.path.rpartition("/")[2]] = leaf
    head = "\n".join([plan_text.title(plan), *plan_text.verdict(plan)])
    search = f'<input type="search" placeholder="search leaves" oninput="{escape(_SEARCH)}">'
    unused = "".join(f"<li data-path={_quoted(path)}>{_text(path)}</li>" for path in plan.unused)
    rest = f"<details><summary>Stored, but not used: {len(plan.unused)}</summary><ul>{unused}</ul></details>"
    is_open = len(plan.leaves) <= _MAX_OPEN
    return f"<div><pre>{_text(head)}</pre>{search}{_list(tree, is_open)}{rest if unused else ''}</div>"


def _list(tree: dict[str, Any], is_open: bool) -> str:
    return f"<ul>{''.join(_item(name, node, is_open) for name, node in tree.items())}</ul>"


def _item(name: str, node: Any, is_open: bool) -> str:
    if not isinstance(node, dict):
        _, source, what = plan_text.cells(node)
        style = f"color: {_COLORS[node.origin]}"
        shown = f"{_text(name)} ← {_text(source)} {_text(what)}"
        return f'<li data-path={_quoted(node.path)} style="{style}">{shown}</li>'
    leaves = _leaves(node)
    has_differences = any(leaf.origin == "missing" or leaf.is_reshaped for leaf in leaves)
    opened = " open" if is_open or has_differences else ""
    summary = f"{_text(name)} ({len(leaves)} leaves)"
    return f"<li data-path=''><details{opened}><summary>{summary}</summary>{_list(node, is_open)}</details></li>"


def _leaves(tree: dict[str, Any]) -> list[Any]:
    return [leaf for node in tree.values() for leaf in (_leaves(node) if isinstance(node, dict) else [node])]


def _text(text: str) -> str:
    return escape(printable(text))


def _quoted(path: str) -> str:
    return f'"{escape(path.lower())}"'
