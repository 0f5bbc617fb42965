"""Tell the names of a module that are paths of checkpoints by their spelling, as ``ckpt_path``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .binding import argument
from .library import API
from .modules import Module
from .names import last_name

_PATH_NAME = re.compile(r"(^|_)(ckpt|checkpoint)_?(path|file|filename|filepath|fname)$", re.IGNORECASE)
_TAKE_DIRECTORIES = {"makedirs", "mkdir", "listdir", "scandir", "iterdir", "walk", "rmtree", "copytree", "MakeDirs"}
_WRITE = {"write_bytes", "write_text", "save", "savez", "savez_compressed", "dump", "touch"}


def paths_by_spelling(module: Module) -> set[str]:
    """Return such names, but for those that the module uses as a directory, or as a file that it writes itself."""
    names = {_name(node) for node in module.nodes if isinstance(node, ast.Name | ast.Attribute | ast.arg)}
    spelled = {name for name in names if _PATH_NAME.search(name)}
    return spelled - set(_others(module)) if spelled else spelled


def _others(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
            goes_on = isinstance(node.op, ast.Div) or _is_below(node.right)
            yield from [_name(node.left)] if goes_on else []
        elif isinstance(node, ast.JoinedStr):
            pairs = zip(node.values, node.values[1:], strict=False)
            yield from (
                _name(part.value) for part, after in pairs if isinstance(part, ast.FormattedValue) and _is_below(after)
            )
        elif isinstance(node, ast.Call):
            yield from _of_call(module, node)


def _of_call(module: Module, node: ast.Call) -> Iterator[str]:
    name = last_name(node.func)
    receiver = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    first = _name(node.args[0]) if node.args else ""
    if name == "join" and len(node.args) > 1:
        yield first
    elif name in _TAKE_DIRECTORIES:
        yield from (first, receiver)
    elif name == "joinpath" or name in _WRITE:
        yield from (receiver, first)
    elif name == "open" and any(_is_mode_to_write(one) for one in (*node.args, *(key.value for key in node.keywords))):
        yield from (first, receiver)
    elif (module.names.of(node.func) or "").startswith(f"{API}.save"):
        yield _name(argument(node, "ckpt_dir", 0))


def _name(node: ast.AST | None) -> str:
    return getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or ""


def _is_below(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/")


def _is_mode_to_write(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and bool(re.fullmatch(r"[wax][bt+]*", node.value))
    )
