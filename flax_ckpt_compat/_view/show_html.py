"""Render what is in a checkpoint as HTML: a searchable tree for notebooks; or a page, with a treemap of sizes too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from flax_ckpt_compat._core.text_formatting import count_of_leaves, format_size, printable
from flax_ckpt_compat._trees import depth
from flax_ckpt_compat._view import show_report
from flax_ckpt_compat._view.show import Contents
from flax_ckpt_compat._view.show_report import Subtree
from flax_ckpt_compat._view.tree_html import (
    MAX_OPEN,
    MOST_STATIC,
    STYLE,
    folder_item,
    leaf_item,
    listed_by_script,
    quoted,
    search_box,
)

Box = tuple[float, float, float, float]  # left, top, width, height
DOCTYPE = "<!doctype html>"
_WIDTH, _HEIGHT = 1200, 600
# Smaller boxes, in square units, are one; this also limits the page.
_LEAST_AREA, _MOST_BOXES = 40.0, 3000
_HEADER, _MARGIN = 15.0, 7.0
# Font sizes and widths of a letter, the largest that fits is taken; of a name that is cut off, so many letters stay.
_FONTS, _LEAST_LETTERS = ((11, 6.7), (9, 5.5)), 4
# Black text is legible on all of them.
_FILLS = ("#8ecae6", "#ffb703", "#95d5b2", "#f4a3b4", "#cdb4db", "#e9c46a", "#a8dadc", "#d4d4d4")
# Of more leaves, equal numbered subtrees are one box of the treemap, which then has a label.
_MAX_UNFOLDED = 500
_PAGE_STYLE = (
    ":root { color-scheme: light dark } body { margin: 16px; font: 13px/1.5 ui-monospace, monospace }"
    "h1 { font-size: 15px; overflow-wrap: anywhere }"
    # On a phone the map scrolls, so that its text stays legible.
    ".map { overflow-x: auto } svg { width: 100%; min-width: 1000px; height: auto; display: block }"
    "svg text { font: 11px ui-monospace, monospace; fill: #000; pointer-events: none } svg text.s { font-size: 9px }"
    "svg rect { stroke: #fff; cursor: pointer } svg rect.group { fill: #eee; stroke: #888 }"
    "@media (prefers-color-scheme: dark) { svg rect { stroke: #111 } svg rect:not(.group) { filter: brightness(0.8) }"
    "svg rect.group { fill: #24272b; stroke: #777 } svg text.g { fill: #ddd } }"
    "ul.legend { padding: 0; display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none }"
    "i { display: inline-block; width: 12px; height: 12px; margin-right: 6px }"
    ".ckpt-plan { margin-top: 12px } b { font-weight: normal; color: #d33 }"
)
_SCRIPT = (
    "document.querySelector('svg').addEventListener('click', event => {"
    "const path = event.target.dataset.at, box = document.querySelector('input');"
    "if (path !== undefined) { box.value = path; box.dispatchEvent(new Event('input')); box.scrollIntoView(); } });"
)


@depth.limited("shown")
def render(contents: Contents) -> str:
    """Return the page; names from the checkpoint are escaped."""
    root = show_report.tree_of(contents)
    totals = show_report.by_dtype(contents)
    fills = {name: _FILLS[min(number, len(_FILLS) - 1)] for number, name in enumerate(totals)}
    legend = "".join(
        f'<li><i style="background: {fills[name]}"></i>{_text(name)}: {format_size(one["nbytes"])}'
        f" in {count_of_leaves(one['leaves'])}</li>"
        for name, one in totals.items()
    )
    mapped = show_report.folded(root) if root.count > _MAX_UNFOLDED else root
    boxes = "".join(_boxes(mapped, (0.0, 0.0, float(_WIDTH), float(_HEIGHT)), "", fills)) if root.nbytes else ""
    listed = _listed(root, contents)
    title = _text(show_report.title(contents))
    return (
        f'{DOCTYPE}\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width"><style>'
        f"{STYLE}{_PAGE_STYLE}</style></head><body><h1>{title}</h1>"
        f'<ul class="legend">{legend}</ul><div class="map">'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="sizes">{boxes}</svg></div>'
        f'<div class="ckpt-plan">{listed}</div>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


@depth.limited("shown")
def fragment(contents: Contents) -> str:
    """Return the tree without the page around it; names from the checkpoint are escaped."""
    title, listed = _text(show_report.title(contents)), _listed(show_report.tree_of(contents), contents)
    return f'<div class="ckpt-plan"><style>{STYLE}</style><pre>{title}</pre>{listed}</div>'


def _listed(root: Subtree, contents: Contents) -> str:
    if root.count <= MOST_STATIC:
        return _tree(root)
    return search_box() + listed_by_script(root, has_stats=contents.has_stats)


def _tree(root: Subtree) -> str:
    children = [root] if root.leaf else root.children.values()
    items = "".join(_item(child, "", root.count <= MAX_OPEN) for child in children)
    return f"{search_box()}<ul>{items}</ul>"


def _boxes(node: Subtree, box: Box, path: str, fills: dict[str, str]) -> Iterator[str]:
    """Yield the rectangles of a subtree: its own with its name, then those of what is in it."""
    _, _, width, height = box
    if node.leaf is not None:
        fill = fills[node.leaf.dtype_or_kind]
        yield _rect(node, box, path, f'fill="{fill}"', node.leaf.type)
        return
    # A chain of subtrees with one child needs one header.
    name = node.name
    while len(node.children) == 1 and (child := next(iter(node.children.items())))[1].leaf is None:
        key, node = child
        name, path = f"{name}/{node.name}" if path else node.name, f"{path}{key}/"
    # Boxes within one that has no room for its name are anybody's: it has the colour of most of what is in it.
    has_header = height > 2 * _HEADER and bool(_label(name, node.nbytes, width))
    what = count_of_leaves(node.count)
    if path and not has_header:
        yield _rect(node, box, path.removesuffix("/"), f'fill="{fills[_main_dtype(node)]}"', what, name)
        return
    yield _rect(node, box, path.removesuffix("/"), 'class="group"', what, name)
    least = max(_LEAST_AREA, _WIDTH * _HEIGHT / _MOST_BOXES if node.count > _MAX_UNFOLDED else 0.0)
    if width * height < 2 * least:
        return
    left, top = box[0] + 1, box[1] + 1
    width, height = max(0.0, width - 2), max(0.0, height - 2)
    if path:
        top, height = top + _HEADER, height - _HEADER
    children = sorted((one for one in node.children.items() if one[1].nbytes), key=lambda one: -one[1].nbytes)
    scale = width * height / node.nbytes
    shown = [(key, one) for key, one in children if one.nbytes * scale >= least]
    rest = node.nbytes - sum(one.nbytes for _, one in shown)  # stays grey, as the last box
    sizes = [float(one.nbytes) for _, one in shown] + ([float(rest)] if rest else [])
    places = list(squarified(sizes, (left, top, width, height)))
    for (key, one), inner in zip(shown, places, strict=False):
        end = "" if one.leaf is not None else "/"
        yield from _boxes(one, inner, f"{path}{key}{end}", fills)
    if rest:
        yield _text_in(places[-1], f"{len(children) - len(shown)} more", rest, " g")


def _rect(node: Subtree, box: Box, path: str, style: str, what: str, name: str | None = None) -> str:
    left, top, width, height = box
    is_folded = path.rpartition("/")[2] != node.name  # its path is that of the first one
    tip = f"{path or node.name}{f' and its like, {node.name}' if path and is_folded else ''}: {what}"
    tip = f"{tip}, {format_size(node.nbytes)}"
    place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    rect = f'<rect {place} {style} data-at="{quoted(path)}"><title>{_text(tip)}</title></rect>'
    is_grey = style.startswith("class")
    return rect + (_text_in(box, name or node.name, node.nbytes, " g" if is_grey else "") if path else "")


def _text_in(box: Box, name: str, nbytes: int, kind: str) -> str:
    """Return a name at the top of a box, with the size if there is room for both; empty if there is none."""
    left, top, width, height = box
    label, is_small = _label(name, nbytes, width) or ("", False)
    if not label or height < _HEADER:
        return ""
    names = f"{kind}{' s' if is_small else ''}".strip()
    kind = f' class="{names}"' if names else ""
    return f'<text{kind} x="{left + 4:.1f}" y="{top + 12:.1f}">{escape(label)}</text>'


def _label(name: str, nbytes: int, width: float) -> tuple[str, bool] | None:
    """Return the label of a box, and whether its letters are small; None if there is no room for a useful one."""
    name = printable(name, one_line=True)
    sized = f"{name} {format_size(nbytes)}"
    rooms = [int(max(0.0, width - _MARGIN) / letter) for _, letter in _FONTS]
    for label in (sized, name):
        for number, room in enumerate(rooms):
            # Small letters are for names, not for sizes.
            if len(label) <= room and (number == 0 or label == name):
                return label, number > 0
    return (f"{name[: rooms[-1] - 1]}…", True) if rooms[-1] >= _LEAST_LETTERS else None


def _main_dtype(node: Subtree) -> str:
    """Return the dtype, or kind, of most bytes of a subtree."""
    sizes = Counter[str]()
    below = [node]
    while below:
        one = below.pop()
        if one.leaf is not None:
            sizes[one.leaf.dtype_or_kind] += one.nbytes
        below += one.children.values()
    return sizes.most_common(1)[0][0]


def _item(node: Subtree, path: str, is_open: bool) -> str:
    here = f"{path}{node.name}"
    size = f" <small>{format_size(node.nbytes)}</small>" if node.nbytes else ""
    if node.leaf is not None:
        sharding = show_report.sharding(node.leaf.sharding)
        shown = f"{_text(node.name)} <small>{_text(node.leaf.type)}</small>{size} <small>{_text(sharding)}</small>"
        values, bad = show_report.stats_words(node.leaf.stats)
        shown += (f" <small>{values}</small>" if values else "") + (f" <b>{bad}</b>" if bad else "")
        return leaf_item(here, shown)
    inner = "".join(_item(child, f"{here}/", is_open) for child in node.children.values())
    summary = f"{_text(node.name)}/ <small>{count_of_leaves(node.count)}</small>{size}"
    return folder_item(summary, inner, is_open=is_open)


def _text(text: str) -> str:
    return escape(printable(text, one_line=True))


def squarified(sizes: Sequence[float], box: Box) -> Iterator[Box]:
    """Yield a box for each size, positive and best in descending order; together they fill ``box``."""
    left, top, width, height = box
    area = width * height / sum(sizes) if sizes else 0.0
    areas = [size * area for size in sizes]
    start = 0
    while start < len(areas):
        side = min(width, height)
        end, total = start + 1, areas[start]
        # Another one joins the row as long as that makes the worst of them more like a square.
        while end < len(areas) and _worst(areas[start], areas[end], total + areas[end], side) <= _worst(
            areas[start], areas[end - 1], total, side
        ):
            total += areas[end]
            end += 1
        thickness = total / side if side else 0.0
        at = 0.0
        for one in areas[start:end]:
            length = one / thickness if thickness else 0.0
            across = width < height
            yield (left + at, top, length, thickness) if across else (left, top + at, thickness, length)
            at += length
        if width < height:
            top, height = top + thickness, max(0.0, height - thickness)
        else:
            left, width = left + thickness, max(0.0, width - thickness)
        start = end


def _worst(largest: float, smallest: float, total: float, side: float) -> float:
    """Return the largest ratio of the sides of a row's boxes."""
    if not smallest or not side:
        return float("inf")
    return max(side * side * largest / (total * total), total * total / (side * side * smallest))
