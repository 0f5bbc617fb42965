"""Find the uses of the legacy API in a module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .module import API, Module, last_name

_UTILS = "flax.training.orbax_utils"
_FLAG = "flax_use_orbax_checkpointing"
# Names of flax.training.checkpoints, and the kind of finding that a call of each is.
_KINDS = {
    "save_checkpoint": "save",
    "save_checkpoint_multiprocess": "multiprocess-save",
    "restore_checkpoint": "restore",
    "latest_checkpoint": "lookup",
    "available_steps": "lookup",
    "AsyncManager": "async-manager",
}
_SMALL = {"convert_pre_linen", "natural_sort", "safe_normpath"}

Found = Iterator[tuple[str, ast.AST]]


def argument(call: ast.Call, name: str, at: int) -> ast.expr | None:
    """Return an argument of a call by its name or place."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return named or (call.args[at] if at < len(call.args) else None)


def api_name(module: Module, node: ast.AST) -> str:
    """Return the name of the legacy API that an expression stands for, or ""."""
    dotted = module.dotted(node)
    name = dotted.removeprefix(f"{API}.")
    is_of_wildcard = bool(module.wildcards) and isinstance(node, ast.Name) and name not in {*_KINDS, *_SMALL}
    return name if dotted != name and "." not in name and not is_of_wildcard else ""


def api_uses(module: Module) -> Found:
    """Yield each use, as the kind of finding and the node."""
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(node)
        elif isinstance(node, ast.Call):
            yield from _calls(module, node)
        elif isinstance(node, ast.If) and _asks_for_process(node.test):
            yield from (("process-guard", call) for call in _calls_in(module, node.body, "save_checkpoint"))
        elif isinstance(node, ast.Try) and any(_calls_in(module, node.body, "restore_checkpoint")):
            yield from (("caught-error", handler) for handler in node.handlers)
        elif isinstance(node, ast.keyword) and node.arg == _FLAG:
            yield "flag", node.value
        elif str(getattr(node, "attr", getattr(node, "value", ""))).lower() == _FLAG:
            yield "flag", node
        if isinstance(node, ast.expr) and _gets_module(module, node):
            yield "import", node


def _imports(node: ast.Import | ast.ImportFrom) -> Found:
    found = {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        found = {node.module or "", *(f"{node.module}.{name}" for name in found)}
    yield from ((kind, node) for name, kind in ((API, "import"), (_UTILS, "orbax-utils")) if name in found)


def _gets_module(module: Module, node: ast.expr) -> bool:
    """Return whether an expression gets Flax's module in another way than an import, as ``training.checkpoints``."""
    if isinstance(node, ast.Name):
        is_bound = node.id in module.imported or bool(module.index.values(node)) or isinstance(node.ctx, ast.Store)
        return not is_bound and module.dotted(node) == API
    is_one = isinstance(node, ast.Attribute | ast.Call | ast.Subscript)
    return is_one and module.dotted(node) == API and ast.unparse(node) not in (API, "flax_ckpt_compat.checkpoints")


def _calls(module: Module, node: ast.Call) -> Found:
    if module.dotted(node.func).startswith(f"{_UTILS}."):
        yield "orbax-utils", node
    is_partial = module.dotted(node.func) == "functools.partial" and node.args
    name = api_name(module, node.args[0] if is_partial else node.func)
    if not name:
        return
    yield _KINDS.get(name, "other-api"), node
    # Nobody knows what stands before an unknown part; an empty text is the default of an option that was not given.
    path = module.text(argument(node, "ckpt_dir", 0))
    if name.startswith(("save", "restore")) and path and not re.match(r"/|~|\*|\w+://", path):
        yield "relative-path", node
    if name == "restore_checkpoint":
        target = argument(node, "target", 1)
        if isinstance(target, ast.Constant) and target.value is None:
            yield "untyped-restore", node
        if any(keyword.arg == "orbax_transforms" for keyword in node.keywords):
            yield "transforms", node


def _asks_for_process(test: ast.expr) -> bool:
    asked = {last_name(node.func) for node in ast.walk(test) if isinstance(node, ast.Call)}
    return bool(asked & {"process_index", "host_id"})


def _calls_in(module: Module, body: list[ast.stmt], function: str) -> Iterator[ast.Call]:
    calls = (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call))
    return (node for node in calls if api_name(module, node.func) == function)
