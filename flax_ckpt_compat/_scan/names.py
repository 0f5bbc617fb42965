"""Resolve expressions of a module to the dotted names that they were imported by."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

_API, _OURS = "flax.training.checkpoints", "flax_ckpt_compat.checkpoints"
_IMPORTERS = {"importlib.import_module", "__import__"}


class Names:
    """The imported names of a module and their aliases, wherever in the module they are bound."""

    def __init__(self, nodes: Sequence[ast.AST], package: Sequence[str] = ()) -> None:
        self._bound: dict[str, str] = {}
        self.wildcards: set[str] = set()
        self._known: dict[int, str | None] = {}  # what `of` returned, by the id of the expression
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self._bound[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                above = [*package[: len(package) - node.level + 1]] if node.level else []
                origin = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    if alias.name == "*":
                        self.wildcards.add(origin)
                    else:
                        self._bound[alias.asname or alias.name] = f"{origin}.{alias.name}"
        # Aliases of aliases: each round resolves one more.
        assigned = list(_assigned_names(nodes))
        for _ in range(3):
            self._known.clear()
            for name, value in assigned:
                dotted = self.of(value)
                if dotted and name not in self._bound:
                    self._bound[name] = dotted
        self._known.clear()

    def bound(self, name: str) -> str | None:
        """Return the dotted name that a name of the module was imported by."""
        return self._bound.get(name)

    def all(self) -> list[str]:
        """Return the dotted names and modules that the module imports."""
        return [*self._bound.values(), *self.wildcards]

    def follow(self, change: Callable[[str], str]) -> None:
        """Change what names were imported by to what that stands for."""
        self._bound = {name: change(dotted) for name, dotted in self._bound.items()}
        self._known.clear()

    def of(self, node: ast.AST) -> str | None:
        """Return the dotted name that an expression stands for, or None; our module is that of Flax."""
        if id(node) not in self._known:
            self._known[id(node)] = self._of_anew(node)
        return self._known[id(node)]

    def is_flax_by_value(self, node: ast.AST) -> bool:
        """Return whether an expression gets Flax's own module from another one, as ``training.checkpoints`` does.

        Not where it is imported, or written out from ``flax`` on."""
        if isinstance(node, ast.Name) and (node.id in self._bound or isinstance(node.ctx, ast.Store)):
            return False
        is_expression = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        return is_expression and self.of(node) == _API and self._of(node) == _API and written(node) != _API

    def _of_anew(self, node: ast.AST) -> str | None:
        dotted = self._of(node)
        is_ours = dotted is not None and f"{dotted}.".startswith(f"{_OURS}.")
        return _API + dotted[len(_OURS) :] if dotted is not None and is_ours else dotted

    def _of(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._bound.get(node.id) or self._from_wildcard(node.id)
        if isinstance(node, ast.Attribute):
            names = []
            while isinstance(node, ast.Attribute):  # no recursion: generated code has long ones
                names.append(node.attr)
                node = node.value
            base = self.of(node)
            return ".".join([base, *reversed(names)]) if base else None
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Subscript) and self.of(node.value) == "sys.modules":
            key = node.slice
            return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None
        return None

    def _from_wildcard(self, name: str) -> str | None:
        if "flax.training" in self.wildcards and name == "checkpoints":
            return _API
        return f"{_API}.{name}" if self.wildcards & {_API, _OURS} and name in CHECKPOINT_API else None

    def _of_call(self, node: ast.Call) -> str | None:
        function = self.of(node.func) or (node.func.id if isinstance(node.func, ast.Name) else "")
        constants = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if function in _IMPORTERS and constants:
            is_relative = constants[0].startswith(".") and len(constants) > 1
            return constants[1] + constants[0] if is_relative else constants[0]
        if function == "getattr" and constants and (base := self.of(node.args[0])):
            return f"{base}.{constants[0]}"
        if function == "functools.partial" and node.args:
            return self.of(node.args[0])
        return None


def last_name(function: ast.expr) -> str:
    """Return the last name of a function: ``exists`` of ``tf.io.gfile.exists``."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def written(node: ast.AST) -> str:
    """Return the code of an expression, or "" if it is nested too deeply to be written."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return ""


# Names of flax.training.checkpoints, and the kind of finding that a call of each is.
CHECKPOINT_API = {
    "save_checkpoint": "save",
    "save_checkpoint_multiprocess": "multiprocess-save",
    "restore_checkpoint": "restore",
    "latest_checkpoint": "lookup",
    "available_steps": "lookup",
    "AsyncManager": "async-manager",
    "convert_pre_linen": "other-api",
    "natural_sort": "other-api",
    "safe_normpath": "other-api",
}


def _assigned_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
