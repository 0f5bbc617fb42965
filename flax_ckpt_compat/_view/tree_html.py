"""Render trees of leaves as HTML that can be folded and searched; those of many leaves as data, listed by a script."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from flax_ckpt_compat._core.text_formatting import count_of_leaves, format_size, printable
from flax_ckpt_compat._view import show_report
from flax_ckpt_compat._view.show_report import Subtree

# Legible on white and on black: notebooks do not tell which they are.
COLORS = {"missing": "#d33", "reshaped": "#c4b", "computed": "#07b", "kept": "#b60"}
# Of more leaves, what nobody asks to see is closed at first.
MAX_OPEN = 50
STYLE = (
    ".ckpt-plan, .ckpt-plan pre { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; text-align: left }"
    ".ckpt-plan pre { white-space: pre-wrap; margin: 0 0 8px }"
    ".ckpt-plan input { font: inherit; font-size: 16px; width: 100%; max-width: 32em; box-sizing: border-box }"
    ".ckpt-plan ul { list-style: none; margin: 0; padding-left: 1.2em }"
    ".ckpt-plan > ul { padding-left: 0; margin-top: 8px }"
    ".ckpt-plan summary { cursor: pointer }"
    ".ckpt-plan small { font-size: inherit; opacity: 0.65 }"
    + "".join(f".ckpt-plan .{name} {{ color: {color} }}" for name, color in COLORS.items())
)
_SEARCH = (
    "const words = this.value.toLowerCase(), root = this.parentNode;"
    "root.querySelectorAll('li').forEach(one => "
    'one.hidden = !one.dataset.path.includes(words) && !one.querySelector(`[data-path*="${CSS.escape(words)}"]`));'
    "if (words) root.querySelectorAll('details').forEach(one => one.open = true);"
    "this.nextElementSibling.hidden = !words || !!root.querySelector('li:not([hidden])');"
)
_LISTING = """
const {types, forms, root, stats} = JSON.parse(document.getElementById("leaves").textContent);
const list = document.getElementById("tree"), box = document.querySelector("input"), note = box.nextElementSibling;
const make = (name, text = "") => Object.assign(document.createElement(name), {textContent: text});
const leafItem = (name, ref, at) => {
  const item = make("li", name);
  for (const text of [...types[ref], ...(stats ? [stats[at]] : [])]) if (text) item.append(" ", make("small", text));
  return item;
};
const fill = (ul, form, at) => {
  for (const [name, ref] of forms[form][3]) {
    if (ref >= 0) { ul.append(leafItem(name, ref, at)); at += 1; continue; }
    const [count, size, leaves] = forms[~ref], item = make("li"), details = make("details"), inner = make("ul");
    const summary = make("summary", `${name}/`), first = at;
    summary.append(" ", make("small", count), " ", make("small", size));
    details.append(summary, inner);
    details.ontoggle = () => { if (details.open && !inner.childElementCount) fill(inner, ~ref, first); };
    item.append(details);
    ul.append(item);
    at += leaves;
  }
};
const matches = (words, form, at, path, found) => {
  for (const [name, ref] of forms[form][3]) {
    const here = path + name;
    if (ref < 0) { matches(words, ~ref, at, `${here}/`, found); at += forms[~ref][2]; continue; }
    if (here.toLowerCase().includes(words)) found.push([here, ref, at]);
    at += 1;
  }
  return found;
};
box.oninput = () => {
  const words = box.value.toLowerCase(), found = words ? matches(words, root, 0, "", []) : [];
  list.replaceChildren();
  if (!words) fill(list, root, 0);
  found.slice(0, MOST).forEach(one => list.append(leafItem(...one)));
  if (found.length > MOST) list.append(make("li", `… and ${found.length - MOST} more`));
  note.hidden = !words || found.length > 0;
};
fill(list, root, 0);
"""
_MOST_FOUND = 500


def leaf_item(path: str, shown: str, kind: str = "") -> str:
    """Return a list item of a leaf, which a search finds by its path; ``kind`` is one of `COLORS`."""
    style = f' class="{kind}"' if kind else ""
    return f'<li data-path="{quoted(path)}"{style}>{shown}</li>'


def folder_item(summary: str, items: str, *, is_open: bool) -> str:
    """Return a list item that is folded unless ``is_open``."""
    opened = " open" if is_open else ""
    return f'<li data-path=""><details{opened}><summary>{summary}</summary><ul>{items}</ul></details></li>'


def quoted(path: str) -> str:
    """Return a key path as the value of an attribute, in the form in which it is searched."""
    return escape(printable(path, one_line=True).lower())


def search_box() -> str:
    """Return an input that searches the list items beside it, by their ``data-path``, in lower case."""
    box = f'<input type="search" aria-label="search" placeholder="search leaves" oninput="{escape(_SEARCH)}">'
    return f'{box}<p hidden="">No leaf has this in its path.</p>'


def listed_by_script(root: Subtree, *, has_stats: bool) -> str:
    """Return a tree of many leaves as an empty list, its data, and the script that fills and searches it.

    As HTML, 50,000 leaves take 7 MB. As data, equal subtrees are one *form* (names, types and shardings), and equal
    types one entry, so it takes a few bytes a leaf, and the browser has only those elements that somebody looks at."""
    data = _data(root, has_stats=has_stats)
    # "<" ends a script only as "</script", but begins a comment in it, too.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    script = _LISTING.replace("MOST", str(_MOST_FOUND))
    return (
        f'<ul id="tree"></ul><noscript>Without scripts, `flax-ckpt show` lists the leaves.</noscript>'
        f'<script type="application/json" id="leaves">{text}</script><script>{script}</script>'
    )


def _data(root: Subtree, *, has_stats: bool) -> dict[str, Any]:
    types: dict[tuple[str, ...], int] = {}
    forms: dict[str, int] = {}
    rows: list[list[Any]] = []
    stats: list[str] = []

    def reference(node: Subtree) -> int:
        """Return the number of a leaf's type, or ``~number`` of a subtree's form."""
        if node.leaf is not None:
            size = format_size(node.nbytes) if node.nbytes else ""
            key = (node.leaf.type, size, printable(show_report.sharding(node.leaf.sharding), one_line=True))
            return types.setdefault(key, len(types))
        if node.form not in forms:
            number = forms[node.form] = len(rows)
            size = format_size(node.nbytes) if node.nbytes else ""
            rows.append([count_of_leaves(node.count), size, _places(node), []])
            rows[number][3] = [
                [printable(name, one_line=True), reference(child)] for name, child in node.children.items()
            ]
        return ~forms[node.form]

    def add_stats(node: Subtree) -> None:
        if node.leaf is not None:
            stats.append(", ".join(filter(None, show_report.stats_words(node.leaf.stats))))
        for child in node.children.values():
            add_stats(child)

    number = ~reference(root)
    if has_stats:
        add_stats(root)
    return {"types": list(types), "forms": rows, "root": number, "stats": stats if has_stats else None}


def _places(node: Subtree) -> int:
    """Return how many leaves, and empty nodes, are listed below a node."""
    return sum(map(_places, node.children.values())) if node.leaf is None else 1
