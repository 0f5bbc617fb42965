"""Find the uses of the legacy API in a module."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator

from .binding import argument
from .names import CHECKPOINT_API, Names, last_name

_API = "flax.training.checkpoints"
_UTILS = "flax.training.orbax_utils"
_FLAG = "flax_use_orbax_checkpointing"

TextsOf = Callable[[ast.expr | None], list[str]]
Found = Iterator[tuple[str, ast.expr | ast.stmt | ast.ExceptHandler]]


def api_uses(
    nodes: Iterable[ast.AST],
    names: Names,
    dotted_of: Callable[[ast.expr], str | None] | None = None,
    texts_of: TextsOf = lambda _: [],
) -> Found:
    """Give each use, as the kind of finding and the node.

    Once values are known, ``dotted_of`` gives the name of a called function, ``texts_of`` what an expression may be."""
    for node in nodes:
        if isinstance(node, ast.expr) and names.is_flax_by_value(node):
            yield "import", node
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(node)
        elif isinstance(node, ast.Call):
            yield from _api_calls(node, names, (dotted_of or names.of)(node.func) or "", texts_of)
        elif isinstance(node, ast.If) and _is_guard(node.test):
            yield from (("process-guard", call) for call in _calls_in(node.body, names, "save_checkpoint"))
        elif isinstance(node, ast.Try) and any(_calls_in(node.body, names, "restore_checkpoint")):
            yield from (("caught-error", handler) for handler in node.handlers)
        elif isinstance(node, ast.keyword) and node.arg == _FLAG:
            yield "flag", node.value
        elif isinstance(node, ast.Attribute | ast.Constant) and _names_flag(node):
            yield "flag", node


def _names_flag(node: ast.Attribute | ast.Constant) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.value
    return isinstance(name, str) and name.lower() == _FLAG


def _imports(node: ast.Import | ast.ImportFrom) -> Found:
    if isinstance(node, ast.Import):
        found = {alias.name for alias in node.names}
    else:
        found = {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    if _API in found:
        yield "import", node
    if _UTILS in found:
        yield "orbax-utils", node


def _api_calls(node: ast.Call, names: Names, dotted: str, texts_of: TextsOf) -> Found:
    if dotted.startswith(f"{_UTILS}."):
        yield "orbax-utils", node
    name = dotted.removeprefix(f"{_API}.")
    if dotted == "functools.partial" and node.args:
        name = (names.of(node.args[0]) or "").removeprefix(f"{_API}.")
    if not dotted.startswith(f"{_API}.") and name not in CHECKPOINT_API:
        return
    yield CHECKPOINT_API.get(name, "other-api"), node
    if name.startswith(("save", "restore")) and _is_relative(texts_of(argument(node, "ckpt_dir", 0))):
        yield "relative-path", node
    if name == "restore_checkpoint":
        target = argument(node, "target", 1)
        if isinstance(target, ast.Constant) and target.value is None:
            yield "untyped-restore", node
        if argument(node, "orbax_transforms", 99) is not None:
            yield "transforms", node


def _is_guard(test: ast.expr) -> bool:
    """Return whether a condition asks for the number of this process."""
    calls = {last_name(node.func) for node in ast.walk(test) if isinstance(node, ast.Call)}
    return bool(calls & {"process_index", "host_id"})


def _calls_in(body: list[ast.stmt], names: Names, function: str) -> Iterator[ast.Call]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and names.of(node.func) == f"{_API}.{function}":
                yield node


def _is_relative(texts: list[str]) -> bool:
    """Return whether a path may be a text without a root; nobody knows what stands before an unknown part.

    An empty text is the default of an option that was not given."""
    return any(one and not re.match(r"/|~|\{|\w+://", one) for one in texts)
