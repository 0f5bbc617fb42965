"""How a plan prints: as plain text, and as a rich table with the same rows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from flax_ckpt_compat._core.printable import printable
from flax_ckpt_compat.similar import shorten

Plan = Any  # flax_ckpt_compat.plan.Plan, which imports this module
PlannedLeaf = Any
# Leaves that simply come from the stored leaf of the same name are listed up to this many, then only counted.
_MAX_PLAIN = 30
_HEADINGS = ("leaf", "comes from", "shape and dtype")
_STYLES = {"missing": "bold red", "computed": "cyan", "target": "yellow", "checkpoint": ""}


def plain(plan: Plan) -> str:
    """The plan as text, with aligned columns and no colours."""
    rows = [_HEADINGS, *(_row(leaf) for leaf in _shown(plan))]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]
    return "\n".join([_title(plan), *lines, *map(printable, _notes(plan))])


def rich(plan: Plan, width: int) -> Iterator[Any]:
    """The plan as rich renderables.

    Args:
        plan: the plan.
        width: of the console, in characters.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(_title(plan)), title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for leaf in _shown(plan):
        style = "magenta" if leaf.is_reshaped else _STYLES[leaf.origin]
        table.add_row(*map(Text, _row(leaf)), style=style)
    yield table
    for note in _notes(plan):
        yield Text("\n".join(_narrow(line, width) for line in printable(note).splitlines()))


def _narrow(line: str, width: int) -> str:
    """A line of Python with its comment above it, if both do not fit: what wraps cannot be pasted."""
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
    told = ", ".join(word for word in words if not word.startswith("0 "))
    path = printable(plan.path, one_line=True)
    return f"{path} ({plan.format}): {told or 'no leaves'}; {_bytes(plan.nbytes)} to read"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def _shown(plan: Plan) -> list[PlannedLeaf]:
    simple = [leaf for leaf in plan.leaves if _is_simple(leaf)]
    if len(simple) <= _MAX_PLAIN:
        return list(plan.leaves)
    left_out = {id(leaf) for leaf in simple[_MAX_PLAIN:]}
    return [leaf for leaf in plan.leaves if id(leaf) not in left_out]


def _is_simple(leaf: PlannedLeaf) -> bool:
    same_name = leaf.origin == "checkpoint" and leaf.sources == (leaf.path,)
    return same_name and not leaf.is_reshaped and not leaf.is_retyped


def _row(leaf: PlannedLeaf) -> tuple[str, str, str]:
    path, source = (printable(text, one_line=True) for text in (leaf.path, _source(leaf)))
    return path, source, _what(leaf)


def _source(leaf: PlannedLeaf) -> str:
    if leaf.origin == "missing":
        return "MISSING"
    if leaf.origin == "target":
        return f"target ({leaf.how})"
    if leaf.sources == (leaf.path,) and not leaf.how:
        return "same name"
    names = ", ".join(leaf.sources) if len(leaf.sources) < 3 else f"{leaf.sources[0]} … {leaf.sources[-1]}"
    return f"{leaf.how}: {names}" if leaf.how else names or "None"


def _what(leaf: PlannedLeaf) -> str:
    if leaf.shape is None:
        return ""
    shape = f"{leaf.shape}, target {leaf.target_shape}" if leaf.is_reshaped else str(leaf.shape)
    dtype = f"{leaf.dtype}, target {leaf.target_dtype}" if leaf.is_retyped else str(leaf.dtype)
    return f"{shape} {dtype}"


def _notes(plan: Plan) -> Iterator[str]:
    more = sum(map(_is_simple, plan.leaves)) - _MAX_PLAIN
    if more > 0:
        yield f"  … and {more} more, each from the stored leaf of the same name"
    if plan.unused:
        yield f"Stored, but not used: {shorten(plan.unused)}"
    if any(leaf.is_reshaped for leaf in plan.leaves) and plan.raises is None:
        yield "Where shapes differ, restore_checkpoint gives what is stored, with a warning; restore refuses."
    if plan.raises is not None:
        yield f"A restore raises {plan.raises}."
    if plan.missing and plan.suggestion is None:
        yield "Nothing that is stored resembles what is missing."
    if plan.suggestion is not None:
        sure = "These rules would map it"
        if not plan.suggestion.confident:
            doubt = f" ({plan.suggestion.doubts[0]})" if plan.suggestion.doubts else ""
            sure = f"A guess, to be checked leaf by leaf{doubt}"
        yield f"{sure}:\n{plan.suggestion}"
