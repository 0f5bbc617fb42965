"""Render trees of leaves as HTML that can be folded and searched; those of many leaves as data, listed by a script."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from flax_ckpt_compat._core.text_formatting import count_of_leaves, format_size, printable
from flax_ckpt_compat._core.tree import shown_names
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
# Of items that are HTML; lists that a script fills are searched by it. A slash within a name is found as "/", too.
_SEARCH = (
    r"const words = this.value.toLowerCase().replaceAll('\\/', '/'), root = this.parentNode;"
    "root.querySelectorAll('li[data-path]').forEach(one => "
    'one.hidden = !one.dataset.path.includes(words) && !one.querySelector(`[data-path*="${CSS.escape(words)}"]`));'
    "if (words) root.querySelectorAll('details').forEach("
    "one => { if (one.querySelector('li[data-path]:not([hidden])')) one.open = true; });"
    "this.nextElementSibling.hidden = !words || !!root.querySelector('li:not([hidden])');"
)
# Beyond so many leaves, a list is data.
MOST_STATIC = 2000
_LISTING = """
for (const list of document.querySelectorAll("ul.ckpt-leaves:not([data-filled])")) {
list.dataset.filled = "";
const data = list.parentNode.querySelector("script[type='application/json']"), all = list.closest(".ckpt-plan");
const {types, forms, root, starts, stats} = JSON.parse(data.textContent);
const box = all.querySelector("input"), note = box.nextElementSibling, outer = list.closest("details");
const make = (name, text = "") => Object.assign(document.createElement(name), {textContent: text});
const leafItem = (path, row, at, shown = row[0]) => {
  const [, ref, start, names] = row, [kind, ...texts] = types[ref], item = make("li", shown);
  item.className = kind;
  if (start !== undefined) {
    const end = names ? path.split(SPLIT).slice(-names).join("/") : "", numbers = path.match(/[0-9]+/g);
    const text = starts[start].replace(/MARK([0-9]+)MARK/g, (_, number) => numbers[number]);
    item.append(" ", make("small", "←"), " ", text + end);
  }
  for (const text of [...texts, ...(stats ? [stats[at]] : [])]) if (text) item.append(" ", make("small", text));
  return item;
};
const fill = (ul, form, at, above) => {
  for (const row of forms[form][3]) {
    const [name, ref] = row, path = above + name;
    if (ref >= 0) { ul.append(leafItem(path, row, at)); at += 1; continue; }
    const [count, notes, leaves] = forms[~ref], item = make("li"), details = make("details"), inner = make("ul");
    const summary = make("summary", `${name}/`), first = at;
    summary.append(" ", make("small", count));
    for (const [kind, text] of notes) summary.append(" ", Object.assign(make("small", text), {className: kind}));
    details.append(summary, inner);
    details.ontoggle = () => { if (details.open && !inner.childElementCount) fill(inner, ~ref, first, `${path}/`); };
    item.append(details);
    ul.append(item);
    at += leaves;
  }
};
const matches = (words, form, at, above, found) => {
  for (const row of forms[form][3]) {
    const [name, ref] = row, path = above + name;
    if (ref < 0) { matches(words, ~ref, at, `${path}/`, found); at += forms[~ref][2]; continue; }
    if (path.toLowerCase().replaceAll("\\\\/", "/").includes(words)) found.push([path, row, at, path]);
    at += 1;
  }
  return found;
};
const show = () => { if (!outer || outer.open) fill(list, root, 0, ""); };
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().replaceAll("\\\\/", "/"), found = words ? matches(words, root, 0, "", []) : [];
  list.replaceChildren();
  if (!words) show();
  found.slice(0, MOST).forEach(one => list.append(leafItem(...one)));
  if (found.length > MOST) list.append(make("li", `… and ${found.length - MOST} more`));
  if (outer && found.length) outer.open = true;
  note.hidden = !words || !!all.querySelector("li:not([hidden])");
});
show();
if (outer) outer.ontoggle = () => { if (!box.value && !list.childElementCount) show(); };
}
"""
_MOST_FOUND = 500
# A slash that parts names: one within a name follows a backslash.
_NUMBERS = re.compile("[0-9]+")
_MARK = "\ue000"  # around the place of a number among those of the leaf's own path
_SPLIT = r"/(?<!\\)\//"


def leaf_item(path: str, shown: str, kind: str = "") -> str:
    """Return a list item of a leaf, which a search finds by its path; ``kind`` is one of `COLORS`."""
    style = f' class="{kind}"' if kind else ""
    return f'<li data-path="{quoted(path)}"{style}>{shown}</li>'


def folder_item(summary: str, items: str, *, is_open: bool) -> str:
    """Return a list item that is folded unless ``is_open``."""
    opened = " open" if is_open else ""
    return f'<li data-path=""><details{opened}><summary>{summary}</summary><ul>{items}</ul></details></li>'


def quoted(path: str) -> str:
    """Return a key path as the value of an attribute, in the form in which it is searched: ``\\/`` is a slash there."""
    return escape(printable(path, one_line=True).lower().replace(r"\/", "/"))


def search_box() -> str:
    """Return an input that searches the list items beside it, by their ``data-path``, in lower case."""
    box = f'<input type="search" aria-label="search" placeholder="search leaves" oninput="{escape(_SEARCH)}">'
    return f'{box}<p hidden="">No leaf has this in its path.</p>'


@dataclasses.dataclass
class TreeData:
    """The data that the script lists: each text once, and equal subtrees once."""

    types: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)  # class, then texts, of a leaf
    starts: dict[str, int] = dataclasses.field(default_factory=dict)  # beginnings of the paths of sources
    # Of a subtree: number of leaves, in words; notes, each a class and a text; number of lines; and a row for each
    # child: name, number of its type or ~number of its form, and, of leaves with a source, number of its start and how
    # many names of the leaf's own path follow.
    forms: list[list[Any]] = dataclasses.field(default_factory=list)
    stats: list[str] | None = None  # of each leaf

    def type_of(self, *texts: str) -> int:
        """Return the number of a type."""
        return self.types.setdefault(texts, len(self.types))

    def source_of(self, source: str, names: Sequence[str]) -> list[int]:
        """Return what a leaf's row holds of its source; ``names`` are those of the leaf's own path."""
        ends, count = source.split("/"), 0
        while count < min(len(ends), len(names)) - 1 and ends[-1 - count] == names[-1 - count]:
            count += 1
        start = source[: len(source) - len("/".join(names[len(names) - count :]))] if count else source
        own = _NUMBERS.findall("/".join(names))
        # Layers that got another name have one form, too: their numbers are those of the leaf's own path.
        start = _NUMBERS.sub(
            lambda match: f"{_MARK}{own.index(match[0])}{_MARK}" if match[0] in own else match[0], start
        )
        return [self.starts.setdefault(start, len(self.starts)), count]

    def html(self, root: int, without_scripts: str) -> str:
        """Return the list, empty at first, its data, and the script that fills and searches it."""
        fields = {
            "types": list(self.types),
            "starts": list(self.starts),
            "forms": self.forms,
            "root": root,
            "stats": self.stats,
        }
        # "<" ends a script only as "</script", but begins a comment in it, too.
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        script = _LISTING.replace("MOST", str(_MOST_FOUND)).replace("SPLIT", _SPLIT).replace("MARK", _MARK)
        return (
            f'<ul class="ckpt-leaves"></ul><noscript>{without_scripts}</noscript>'
            f'<script type="application/json">{text}</script><script>{script}</script>'
        )


def listed_by_script(root: Subtree, *, has_stats: bool) -> str:
    """Return a tree of many leaves as an empty list, its data, and the script that fills and searches it.

    As HTML, 50,000 leaves take 7 MB, in each output of a notebook. As data, equal subtrees are one *form* (names, types
    and shardings), and equal types one entry, so it takes a few bytes a leaf, and the browser has only those elements
    that somebody looks at."""
    data, known = TreeData(), dict[str, int]()

    def reference(node: Subtree) -> int:
        """Return the number of a leaf's type, or ``~number`` of a subtree's form."""
        size = format_size(node.nbytes) if node.nbytes else ""
        if node.leaf is not None:
            sharding = printable(show_report.sharding(node.leaf.sharding), one_line=True)
            return data.type_of("", node.leaf.type, size, sharding)
        if node.form not in known:
            rows: list[Any] = []
            known[node.form] = len(data.forms)
            data.forms.append([count_of_leaves(node.count), [["", size]], _places(node), rows])
            rows += [[printable(name, one_line=True), reference(child)] for name, child in node.children.items()]
        return ~known[node.form]

    def add_stats(node: Subtree, stats: list[str]) -> None:
        if node.leaf is not None:
            stats.append(", ".join(filter(None, show_report.stats_words(node.leaf.stats))))
        for child in node.children.values():
            add_stats(child, stats)

    number = ~reference(root)
    if has_stats:
        data.stats = []
        add_stats(root, data.stats)
    return data.html(number, "Without scripts, `flax-ckpt show` lists the leaves.")


def paths_by_script(paths: Sequence[str]) -> str:
    """Return a tree of many key paths as `listed_by_script` does."""
    data, known = TreeData(), dict[Any, int]()
    tree: dict[str, Any] = {}
    for path in paths:
        node = tree
        *above, last = shown_names(path)
        for name in above:
            node = node.setdefault(f"{name}/", {})
        node[last] = {}

    def form(node: dict[str, Any]) -> tuple[int, int]:
        """Return the number of a subtree's form, and of its leaves."""
        rows, count = list[Any](), 0
        for name, child in node.items():
            shown = printable(name.removesuffix("/"), one_line=True)
            ref, leaves = form(child) if child else (~data.type_of(""), 1)
            rows.append([shown, ~ref])
            count += leaves
        key = tuple(map(tuple, rows))
        if key not in known:
            known[key] = len(data.forms)
            data.forms.append([count_of_leaves(count), [], count, rows])
        return known[key], count

    return data.html(form(tree)[0], "Without scripts, print the plan.")


def _places(node: Subtree) -> int:
    """Return how many leaves, and empty nodes, are listed below a node."""
    return sum(map(_places, node.children.values())) if node.leaf is None else 1
