"""Import a module of the standard library where people put such imports."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import libcst as cst
from libcst.helpers import get_full_name_for_node

_Line = cst.SimpleStatementLine | cst.BaseCompoundStatement


def with_standard_import(module: cst.Module, name: str) -> cst.Module:
    """Return the module with ``import name``: among the first imports of the standard library, in order, or above."""
    body = list(module.body)
    if any(("import", name) in _imported(line) for line in body):
        return module
    start = _after_head(body)
    block = list(itertools.takewhile(_imported, body[start:]))
    standard = [(start + at, _imported(line)[0]) for at, line in enumerate(block) if _is_standard(_imported(line)[0])]
    before = [at for at, (kind, other) in standard if kind == "import" and other < name]
    if before:
        return module.with_changes(body=_inserted(body, before[-1] + 1, name, own_block=False))
    at = standard[0][0] if standard else start
    return module.with_changes(body=_inserted(body, at, name, own_block=not standard))


def _imported(line: _Line) -> list[tuple[str, str]]:
    """Return ("import" or "from", module) of each module that a line imports; one with another name is "as"."""
    if not isinstance(line, cst.SimpleStatementLine):
        return []
    found = []
    for statement in line.body:
        if isinstance(statement, cst.Import):
            found += [("as" if one.asname else "import", one.evaluated_name) for one in statement.names]
        elif isinstance(statement, cst.ImportFrom):
            module = get_full_name_for_node(statement.module) if statement.module else None
            found.append(("from", "." * len(statement.relative) + (module or "")))
    return found


def _is_standard(imported: tuple[str, str]) -> bool:
    return imported[1].partition(".")[0] in sys.stdlib_module_names


def _is_future(line: _Line) -> bool:
    return ("from", "__future__") in _imported(line)


def _after_head(body: Sequence[_Line]) -> int:
    """Return the place after a docstring and imports from ``__future__``."""
    at = 0
    while at < len(body) and (_is_future(body[at]) or (at == 0 and _is_docstring(body[at]))):
        at += 1
    return at


def _is_docstring(line: _Line) -> bool:
    first = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    return isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString | cst.ConcatenatedString)


def _inserted(body: list[_Line], at: int, name: str, *, own_block: bool) -> list[_Line]:
    """Return the lines with an import; it takes the empty lines before the next line if it is the first of a block."""
    line = cst.SimpleStatementLine([cst.Import([cst.ImportAlias(cst.Name(name))])])
    follows_import = at > 0 and not own_block and bool(_imported(body[at - 1])) and not _is_future(body[at - 1])
    if at < len(body) and not follows_import:
        after = body[at]
        empty = list(itertools.takewhile(lambda one: one.comment is None, after.leading_lines))
        rest = after.leading_lines[len(empty) :]
        line = line.with_changes(leading_lines=empty or ([cst.EmptyLine(indent=False)] if at else []))
        gap = (empty or [cst.EmptyLine(indent=False)]) if own_block else []
        body[at] = after.with_changes(leading_lines=[*gap, *rest])
    return [*body[:at], line, *body[at:]]
