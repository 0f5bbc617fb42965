"""Change the imports of a program to those of flax_ckpt_compat; all else stays, but for odd comments within them."""

from __future__ import annotations

import ast
import re
from contextlib import suppress

from .source_modules import API, OURS

_PACKAGE, _OUR_PACKAGE = "flax.training", "flax_ckpt_compat"
_NAME = r"\bcheckpoints\b(?:\s+as\s+\w+)?"
_NAME_IN_LIST = re.compile(rf",[\s\\]*{_NAME}|{_NAME}\s*,[\s\\]*|{_NAME}")


def fix(code: str) -> str:
    """Return the code with `flax_ckpt_compat.checkpoints` for `flax.training.checkpoints`, where imports bind it."""
    lines = [line.encode() for line in code.split("\n")]
    statements = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(statements, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        written = b"\n".join([*lines[first:last], lines[last][: node.end_col_offset]])[node.col_offset :].decode()
        lines[first : last + 1] = [before + _fixed(node, written, before.decode()).encode() + after]
    return b"\n".join(lines).decode()


def _fixed(node: ast.Import | ast.ImportFrom, written: str, before: str) -> str:
    """Return the text of an import statement; ``before`` is what stands before it on its line."""
    if isinstance(node, ast.Import):  # without a name of its own, it binds `flax`, which other code may need
        return re.sub(rf"(?<![\w.]){re.escape(API)}(?=\s+as\b)", OURS, written)
    ours = [alias for alias in node.names if alias.name == "checkpoints"]
    if node.level or (node.module != API and (node.module != _PACKAGE or not ours)):
        return written
    if node.module == API or ours == node.names:
        return written.replace(_PACKAGE, _OUR_PACKAGE, 1)
    rest = ast.ImportFrom(node.module, [alias for alias in node.names if alias not in ours], 0)
    cut, text = _NAME_IN_LIST.sub("", written, 1), ast.unparse(rest)
    with suppress(SyntaxError):  # the word may also be in a comment, or name something else
        text = cut if ast.dump(ast.parse(cut).body[0]) == ast.dump(rest) else text
    joint = "; " if before.strip() else f"\n{before}"  # on the same line where others stand before
    return f"{text}{joint}from {_OUR_PACKAGE} import {', '.join(map(ast.unparse, ours))}"
