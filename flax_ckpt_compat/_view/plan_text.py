"""Render a plan as plain text, and as a rich table with the same rows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from flax_ckpt_compat._core.folding import Row, fold, one_line
from flax_ckpt_compat._core.printable import printable

Plan = Any  # flax_ckpt_compat._view.plan.Plan, which imports this module
PlannedLeaf = Any
# Beyond this, rows of numbered layers are folded, then omitted and counted, simple ones first.
_MAX_ROWS = 24
_MAX_STEPS = 12
_HEADINGS = ("leaf", "comes from", "shape and dtype")
_SAME = "same name"
_STYLES = {"missing": "bold red", "computed": "cyan", "target": "yellow", "checkpoint": ""}


def plain(plan: Plan) -> str:
    """Render the plan as text, with aligned columns and no colours."""
    rows = [_HEADINGS, *(_cells(row) for row in _shown(plan)[0])]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]
    return "\n".join([_title(plan), *lines, *map(printable, _notes(plan))])


def rich(plan: Plan, width: int) -> Iterator[Any]:
    """Render the plan with rich.

    Args:
        plan: the plan.
        width: of the console, in characters.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(_title(plan)), title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in _shown(plan)[0]:
        table.add_row(*map(Text, _cells(row)), style=row.detail[0])
    yield table
    for note in _notes(plan):
        yield Text("\n".join(_narrow(line, width) for line in printable(note).splitlines()))


def _narrow(line: str, width: int) -> str:
    """Put the comment of a long line of Python above it: wrapped code cannot be pasted."""
    code, sign, comment = line.partition("  # ")
    if not sign or len(line) <= width:
        return line
    indent = " " * (len(code) - len(code.lstrip()))
    return "\n".join(
        [*textwrap.wrap(comment, width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "), code]
    )


def _title(plan: Plan) -> str:
    counts = {origin: sum(leaf.origin == origin for leaf in plan.leaves) for origin in _STYLES}
    words = [
        f"{counts['checkpoint']} from the checkpoint",
        f"{counts['computed']} computed",
        f"{counts['target']} kept from the target",
        f"{counts['missing']} missing",
    ]
    summary = ", ".join(word for word in words if not word.startswith("0 "))
    path = printable(plan.path, one_line=True)
    return f"{path} ({plan.format}): {summary or 'no leaves'}; {_bytes(plan.nbytes)} to read"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def _shown(plan: Plan) -> tuple[list[Row], str]:
    """Return the rows to show, and a line that counts the leaves they leave out; empty if none."""
    rows = [_row(leaf) for leaf in plan.leaves]
    if len(rows) <= _MAX_ROWS:
        return rows, ""
    rows = fold(rows)
    # Leaves that simply come from the stored leaf of the same name come second.
    kept = sorted(range(len(rows)), key=lambda at: (_is_simple(rows[at]), at))[:_MAX_ROWS]
    left_out = [row for at, row in enumerate(rows) if at not in set(kept)]
    more = sum(row.count for row in left_out)
    what = "each from the stored leaf of the same name" if all(map(_is_simple, left_out)) else "all in plan.leaves"
    return [rows[at] for at in sorted(kept)], f"  … and {more} more, {what}" if more else ""


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
    return printable(path, one_line=True), printable(source, one_line=True), f"{what}{row.note}"


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
    shape = f"{leaf.shape}, target {leaf.target_shape}" if leaf.is_reshaped else str(leaf.shape)
    dtype = f"{leaf.dtype}, target {leaf.target_dtype}" if leaf.is_retyped else str(leaf.dtype)
    return f"{shape} {dtype}"


def _notes(plan: Plan) -> Iterator[str]:
    if more := _shown(plan)[1]:
        yield more
    if plan.unused:
        yield f"Stored, but not used: {one_line(plan.unused)}"
    if any(leaf.is_reshaped for leaf in plan.leaves) and plan.raises is None:
        yield "Where shapes differ, the result has the stored shape."
    if plan.raises is not None:
        yield f"A restore raises {plan.raises}" + (f": {plan.why}" if plan.why else ".")
    if plan.missing and plan.suggestion is None:
        yield "Nothing that is stored resembles what is missing."
    if plan.suggestion is not None:
        sure = "These rules would map it"
        if not plan.suggestion.confident:
            doubt = f" ({plan.suggestion.doubts[0]})" if plan.suggestion.doubts else ""
            sure = f"A guess, to be checked leaf by leaf{doubt}"
        is_long = len(plan.suggestion.steps) > _MAX_STEPS
        yield f"{sure}:\n{'print(plan.suggestion)' if is_long else plan.suggestion}"
