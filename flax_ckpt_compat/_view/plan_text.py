"""Render a plan as plain text, and as a rich table with the same rows."""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from flax_ckpt_compat._core.fold_names import Row, fold, one_line
from flax_ckpt_compat._core.text_formatting import aligned, format_size, printable

Plan = Any  # flax_ckpt_compat._view.plan.Plan, which imports this module
PlannedLeaf = Any
# Beyond this, rows of numbered layers are folded, then whole subtrees, then omitted and counted, simple ones first.
_MAX_ROWS = 24
_MAX_STEPS = 12
_MAX_WIDTH = 80
_FRAME = 10  # characters of a table of three columns
_HEADINGS = ("leaf", "comes from", "shape and dtype")
_SAME = "same name"
_STYLES = {"missing": "bold red", "computed": "cyan", "target": "yellow", "checkpoint": ""}


def plain(plan: Plan) -> str:
    """Render the plan as text, without colours: what a restore does, proposed rules, and a table of the leaves."""
    rows, more = _shown(plan)
    cells = [_HEADINGS, *map(_cells, rows)]
    lines = [f"  {line}" for line in aligned(cells, right=())]
    if any(row.names[0].endswith("/…") for row in rows) and max(map(len, lines)) > _MAX_WIDTH:
        width = max(len(path) for path, _, _ in cells)
        lines = [line for row in cells for line in _on_two_lines(row, width)]
    return "\n".join([title(plan), *map(printable, verdict(plan)), *lines, *map(printable, _rest(plan, more))])


def _on_two_lines(cells: tuple[str, str, str], width: int) -> list[str]:
    """Return a row as a line, or with its source below if that is too long."""
    path, source, what = cells
    start, column = f"  {path:<{width}}", len(_HEADINGS[1])
    line = f"{start}  {source:<{column}}  {what}".rstrip()
    return [line] if len(line) <= _MAX_WIDTH else [f"{start}  {'':<{column}}  {what}".rstrip(), f"    ← {source}"]


def rich(plan: Plan, width: int) -> Iterator[Any]:
    """Render the plan with rich, for a console of ``width`` characters."""
    from rich.table import Table
    from rich.text import Text

    def text(note: str) -> Any:
        lines = (_narrow(line, width) for line in printable(note).splitlines())
        return Text("\n".join(" ".join(_at_slashes(word, width) for word in line.split(" ")) for line in lines))

    rows, more = _shown(plan)
    table = Table()
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    all_cells = [_cells(row) for row in rows]
    widths = _column_widths([_HEADINGS, *all_cells], width)
    for row, cells in zip(rows, all_cells, strict=True):
        names = [_at_slashes(cell, widths[column]) for column, cell in enumerate(cells[:2])]
        table.add_row(*map(Text, (*names, cells[2])), style=row.detail[0])
    # On a terminal, what stands last is seen first.
    yield Text(title(plan))
    yield table
    yield from map(text, _rest(plan, more))
    yield from map(text, verdict(plan))


def _column_widths(cells: Sequence[Sequence[str]], width: int) -> tuple[int, int]:
    """Return the widths of the two columns of names that fill a table of three."""
    leaf, source, what = (max(len(row[column]) for row in cells) for column in range(3))
    room = max(2, width - what - _FRAME)
    return (min(leaf, max(room - source, room // 2)), min(source, max(room - leaf, room // 2)))


def _at_slashes(name: str, width: int) -> str:
    """Break a key path that is longer than a line after its slashes, as far as that is possible."""
    lines = [""]
    for part in re.findall("[^/]*/|[^/]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _narrow(line: str, width: int) -> str:
    """Put the comment of a long line of Python above it: wrapped code cannot be pasted."""
    code, sign, comment = line.partition("  # ")
    if not sign or len(line) <= width:
        return line
    indent = " " * (len(code) - len(code.lstrip()))
    return "\n".join(
        [*textwrap.wrap(comment, width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "), code]
    )


def title(plan: Plan) -> str:
    """Return the checkpoint and the bytes to read; then, on lines of their own, how many leaves come from where."""
    path = printable(plan.path, one_line=True)
    read = f"{path} ({plan.format}): {format_size(plan.nbytes)} to read"
    origins = {"checkpoint": "from the checkpoint", "computed": "computed", "target": "kept from the target"}
    counts = Counter(leaf.origin for leaf in plan.leaves)
    words = [f"{counts[origin]} {what}" for origin, what in origins.items() if counts[origin]]
    differing = {
        "missing": [leaf for leaf in plan.leaves if leaf.origin == "missing"],
        "of another shape": [leaf for leaf in plan.leaves if leaf.is_reshaped],
        "of another dtype": [leaf for leaf in plan.leaves if leaf.is_retyped],
    }
    sizes = [(what, len(leaves), sum(map(_nbytes, leaves))) for what, leaves in differing.items()]
    sizes.append(("stored but not used", len(plan.unused), plan.unused_nbytes))
    words += [f"{count} {what} ({format_size(nbytes)})" for what, count, nbytes in sizes if count]
    # Lines break between the words, not within them.
    summary = ", ".join(word.replace(" ", "\xa0") for word in words) or "no leaves"
    lines = textwrap.wrap(summary, _MAX_WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([read, *lines]).replace("\xa0", " ")


def verdict(plan: Plan) -> Iterator[str]:
    """Yield what the function that is previewed does, and proposed rules."""
    if plan.raises is not None:
        yield f"{plan.function} raises {plan.raises}{_unlike(plan)}" + (f": {plan.why}" if plan.why else ".")
    elif plan.missing:
        yield f"{plan.function} succeeds, and what is missing keeps the target's values."
    elif any(leaf.is_reshaped for leaf in plan.leaves):
        yield f"{plan.function} succeeds. Where shapes differ, the result has the stored shape."
    else:
        yield f"{plan.function} succeeds."
    is_explained = bool(plan.why) and plan.raises in ("MissingLeavesError", "ShapeMismatchError")
    if plan.missing and plan.suggestion is None and not is_explained:
        yield "Nothing that is stored resembles what is missing."
    if plan.suggestion is not None and (plan.suggestion.confident or not is_explained):
        sure = "These rules would map it"
        if plan.suggestion.keeps_all:
            sure = "Nothing that is stored fits there. Where the target's own values are wanted"
        if not plan.suggestion.confident:
            doubt = f" ({plan.suggestion.doubts[0]})" if plan.suggestion.doubts else ""
            sure = f"A guess, to be checked leaf by leaf{doubt}"
        is_long = len(plan.suggestion.steps) > _MAX_STEPS
        yield f"{sure}:\n{'print(plan.suggestion)' if is_long else plan.suggestion}"


def _unlike(plan: Plan) -> str:
    """Return in which way ``restore_checkpoint``, whose defaults are milder, does something else; or empty."""
    is_mild = plan.raises in ("ShapeMismatchError", "KindMismatchError") and plan.function == "restore"
    return " (restore_checkpoint warns, and returns what is stored)" if is_mild else ""


def _rest(plan: Plan, more: str) -> Iterator[str]:
    """Yield what the table leaves out."""
    if more:
        yield more
    if len(plan.unused) > _MAX_ROWS:
        used = {source for leaf in plan.leaves for source in leaf.sources}
        keys = dict.fromkeys(used, True) | dict.fromkeys(plan.unused, False)
        names = _subtrees(keys)
        rows = fold(Row((names[path],)) for path in plan.unused)
        yield f"Stored, but not used: {one_line(' '.join(f'{row.names[0]} {row.note}'.split()) for row in rows)}"
    elif plan.unused:
        yield f"Stored, but not used: {one_line(plan.unused)}"


def _nbytes(leaf: PlannedLeaf) -> int:
    """Return the size of the target's array if it is missing, else of what is read."""
    if leaf.origin != "missing" or leaf.target_shape is None:
        return int(leaf.nbytes)
    return int(math.prod(leaf.target_shape) * getattr(leaf.target_dtype, "itemsize", 0))


def _shown(plan: Plan) -> tuple[list[Row], str]:
    """Return the rows to show, and a line that counts the leaves they leave out; empty if none."""
    rows = [_row(leaf) for leaf in plan.leaves]
    if len(rows) <= _MAX_ROWS:
        return rows, ""
    leaves, rows = rows, fold(rows)
    if len(rows) > _MAX_ROWS:
        rows = fold(_subtree_rows(leaves))
    # Leaves that simply come from the stored leaf of the same name come second.
    kept = sorted(range(len(rows)), key=lambda at: (_is_simple(rows[at]), at))[:_MAX_ROWS]
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
    names = _subtrees(keys)
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
    ours, theirs = path.split("/"), source.split("/")
    while len(ours) > 1 and len(theirs) > 1 and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    end = "/…" if len("/".join(ours)) < len(path) else ""
    return "/".join(ours) + end, "/".join(theirs) + end


def _subtrees(keys: dict[str, Any]) -> dict[str, str]:
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
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def cells(leaf: PlannedLeaf) -> tuple[str, str, str]:
    """Return a leaf's path, where it comes from, and its shape and dtype."""
    return _cells(_row(leaf))


def _row(leaf: PlannedLeaf) -> Row:
    """Return a leaf's row: names, then style, origin, and shape and dtype, which do not fold."""
    style = "magenta" if leaf.is_reshaped else _STYLES[leaf.origin]
    how, sources = _source(leaf)
    return Row((leaf.path, *sources), (style, how, _what(leaf)))


def _is_simple(row: Row) -> bool:
    return row.detail[:2] == (_STYLES["checkpoint"], _SAME) and ", target " not in row.detail[2]


def _cells(row: Row) -> tuple[str, str, str]:
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


def to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as what JSON holds; dtypes are texts."""
    fields = ("path", "format", "nbytes", "raises", "why", "missing", "unused", "unused_nbytes")
    leaves = [dataclasses.asdict(leaf) for leaf in plan.leaves]
    for leaf in leaves:
        leaf.update({name: None if leaf[name] is None else str(leaf[name]) for name in ("dtype", "target_dtype")})
    suggestion = None if plan.suggestion is None else str(plan.suggestion)
    return {**{name: getattr(plan, name) for name in fields}, "suggestion": suggestion, "leaves": leaves}
