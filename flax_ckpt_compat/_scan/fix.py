"""Change the imports of a program to those of flax_ckpt_compat; every other character stays."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .source_modules import API, OURS

_PACKAGE, _OUR_PACKAGE = "flax.training", "flax_ckpt_compat"

Place = tuple[int, int]  # of a byte: line from 0, column
Change = tuple[Place, Place, str]  # from, to, the new text


def fix(code: str) -> str:
    """Return the code with `flax_ckpt_compat.checkpoints` for `flax.training.checkpoints`.

    Our module has all names of Flax's, also underscored ones."""
    lines = [line.encode() for line in code.split("\n")]
    nodes = list(ast.walk(ast.parse(code)))
    changes = {change for node in nodes for change in _changes(node, lines)}
    imports = [node for node in nodes if isinstance(node, ast.Import) and any(map(_binds_flax, node.names))]
    if imports and any(map(_is_api, nodes)):
        changes.add(_added(imports[0], lines, f"import {OURS}"))
    for (line, column), (last, end), text in sorted(changes, reverse=True):
        lines[line : last + 1] = [lines[line][:column] + text.encode() + lines[last][end:]]
    return b"\n".join(lines).decode()


def _changes(node: ast.AST, lines: list[bytes]) -> Iterator[Change]:
    """Yield what to write in place of which bytes."""
    if isinstance(node, ast.ImportFrom) and not node.level:
        if node.module == API:
            yield from _in_statement(node, lines, API, OURS)
        elif node.module == _PACKAGE and any(alias.name == "checkpoints" for alias in node.names):
            yield from _of_package(node, lines)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name == API and alias.asname:
                yield _start(alias), (alias.lineno - 1, alias.col_offset + len(API)), OURS
            elif alias.name == API:  # it binds `flax`, which other code may need
                yield _start(alias), _end(alias), _PACKAGE
                yield _added(node, lines, f"import {OURS}")
    elif isinstance(node, ast.Attribute) and _is_api(node):
        yield _start(node), _end(node), OURS


def _of_package(node: ast.ImportFrom, lines: list[bytes]) -> Iterator[Change]:
    """Change ``from flax.training import checkpoints``, into two statements where it imports other names as well."""
    if all(alias.name == "checkpoints" for alias in node.names):
        yield from _in_statement(node, lines, _PACKAGE, _OUR_PACKAGE)
        return
    for at, alias in enumerate(node.names):
        if alias.name == "checkpoints":
            is_last = at == len(node.names) - 1
            yield (
                _end(node.names[at - 1]) if is_last else _start(alias),
                _end(alias) if is_last else _start(node.names[at + 1]),
                "",
            )
            yield _added(node, lines, f"from {_OUR_PACKAGE} import {ast.unparse(alias)}")


def _in_statement(node: ast.ImportFrom, lines: list[bytes], old: str, new: str) -> Iterator[Change]:
    column = lines[node.lineno - 1].find(old.encode(), node.col_offset)
    if column >= 0:  # else it is written with spaces or over several lines
        yield (node.lineno - 1, column), (node.lineno - 1, column + len(old)), new


def _added(node: ast.stmt, lines: list[bytes], statement: str) -> Change:
    """Add a statement on the next line, or on the same where others stand before."""
    before = lines[node.lineno - 1][: node.col_offset].decode()
    return _end(node), _end(node), f"; {statement}" if before.strip() else f"\n{before}{statement}"


def _binds_flax(alias: ast.alias) -> bool:
    return alias.asname is None and alias.name.partition(".")[0] == "flax"


def _start(node: ast.expr | ast.alias) -> Place:
    return node.lineno - 1, node.col_offset


def _end(node: ast.expr | ast.stmt | ast.alias) -> Place:
    return (node.end_lineno or node.lineno) - 1, node.end_col_offset or 0


def _is_api(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "checkpoints" and ast.unparse(node) == API
