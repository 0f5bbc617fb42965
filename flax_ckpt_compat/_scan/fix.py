"""Change the imports of a program to those of flax_ckpt_compat; every other character stays."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .source_modules import API, OURS

_PACKAGE, _OUR_PACKAGE = "flax.training", "flax_ckpt_compat"

Place = tuple[int, int]  # of a byte: line from 0, column
Change = tuple[Place, Place, str]  # from, to, the new text


def fix(code: str) -> str:
    """Return the code with `flax_ckpt_compat.checkpoints` for `flax.training.checkpoints`, where imports bind it.

    Our module has all names of Flax's, also underscored ones."""
    lines = [line.encode() for line in code.split("\n")]
    changes = [change for node in ast.walk(ast.parse(code)) for change in _changes(node, lines)]
    for (line, column), (last, end), text in sorted(changes, reverse=True):
        lines[line : last + 1] = [lines[line][:column] + text.encode() + lines[last][end:]]
    return b"\n".join(lines).decode()


def _changes(node: ast.AST, lines: list[bytes]) -> Iterator[Change]:
    """Yield what to write in place of which bytes."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name == API and alias.asname:  # without, it binds `flax`, which other code may need
                yield _start(alias), (alias.lineno - 1, alias.col_offset + len(API)), OURS
    elif isinstance(node, ast.ImportFrom) and not node.level:
        at = next((at for at, alias in enumerate(node.names) if alias.name == "checkpoints"), None)
        if node.module == API:
            yield from _in_statement(node, lines, API, OURS)
        elif node.module == _PACKAGE and at is not None and len(node.names) == 1:
            yield from _in_statement(node, lines, _PACKAGE, _OUR_PACKAGE)
        elif node.module == _PACKAGE and at is not None:  # into two statements
            is_last = at == len(node.names) - 1
            start = _end(node.names[at - 1]) if is_last else _start(node.names[at])
            yield start, _end(node.names[at]) if is_last else _start(node.names[at + 1]), ""
            # On the next line, or on the same where others stand before.
            before = lines[node.lineno - 1][: node.col_offset].decode()
            joint = "; " if before.strip() else f"\n{before}"
            yield _end(node), _end(node), f"{joint}from {_OUR_PACKAGE} import {ast.unparse(node.names[at])}"


def _in_statement(node: ast.ImportFrom, lines: list[bytes], old: str, new: str) -> Iterator[Change]:
    column = lines[node.lineno - 1].find(old.encode(), node.col_offset)
    if column >= 0:  # else it is written with spaces or over several lines
        yield (node.lineno - 1, column), (node.lineno - 1, column + len(old)), new


def _start(node: ast.alias) -> Place:
    return node.lineno - 1, node.col_offset


def _end(node: ast.stmt | ast.alias) -> Place:
    return (node.end_lineno or node.lineno) - 1, node.end_col_offset or 0
