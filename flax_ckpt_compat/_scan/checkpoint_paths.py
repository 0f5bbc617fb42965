"""Decide which expressions of a module hold paths or names of checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .names import CHECKPOINT_API, Names, last_name

_RETURN_PATHS = {f"flax.training.checkpoints.{name}" for name in CHECKPOINT_API if name.startswith(("save", "latest"))}
# Functions whose result is about the path they are given, by their last name.
_KEEP = {"Path", "PosixPath", "PurePath", "abspath", "absolute", "as_posix", "as_uri", "commonpath", "expanduser"}
_KEEP |= {"fspath", "join", "joinpath", "normpath", "realpath", "resolve", "safe_normpath", "basename"}
_KEEP |= {"format", "replace", "str", "strip"}
_KEEP |= {"get", "list", "max", "min", "natural_sort", "next", "pop", "popleft", "reversed", "set", "sorted", "tuple"}
_KEEP |= {"glob", "iglob", "rglob", "Glob", "filter"}
_PATH_NAME = re.compile(r"(^|_)(ckpt|checkpoint)_?(path|file|filename|filepath|fname)$", re.IGNORECASE)
_ADD = {"add", "append", "appendleft", "extend", "insert", "put"}
_ROUNDS = 5  # an assignment chain longer than that is rare

Function = ast.FunctionDef | ast.AsyncFunctionDef


class CheckpointPaths:
    """The expressions of one module that hold checkpoint paths.

    The names of its checkpoints begin with ``prefixes``. If the module ``uses_api``, names such as ``ckpt_path`` count
    too."""

    def __init__(self, tree: ast.Module, names: Names, prefixes: set[str], *, uses_api: bool) -> None:
        self._tree = tree
        self._names = names
        self._uses_api = uses_api
        begins = "|".join(re.escape(prefix) for prefix in sorted(prefixes) if prefix)
        self._literal = re.compile(rf"(^|/)({begins})([-\d*%{{\[.?(\\<]|$)") if begins else None
        self._scopes = dict(_scopes(tree))
        self._held: set[tuple[int, str]] = set()  # the id of a scope, a name in it
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
        self._returning: set[str] = set()
        for _ in range(_ROUNDS):
            before = len(self._held), len(self._returning)
            for node in ast.walk(tree):
                self._follow(node)
            if before == (len(self._held), len(self._returning)):
                break

    def holds(self, node: ast.AST | None) -> bool:
        """Return whether an expression is, or lists, paths or names of checkpoints."""
        if node is None:
            return False
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and self._is_name(node.value)
        if isinstance(node, ast.JoinedStr):
            return self._is_name("".join(_text(part) for part in node.values)) or any(
                isinstance(part, ast.FormattedValue) and self.holds(part.value) for part in node.values
            )
        if isinstance(node, ast.Name):
            return self._holds_name(node)
        if isinstance(node, ast.Attribute):
            if (id(self._tree), ast.unparse(node)) in self._held:
                return True
            return (node.attr in {"name", "stem", "path"} and self.holds(node.value)) or self._is_path_name(node.attr)
        if isinstance(node, ast.Call):
            return self._holds_call(node)
        if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
            return self.holds(node.elt) or any(self._filters(test) for part in node.generators for test in part.ifs)
        return any(self.holds(part) for part in _parts(node))

    def _holds_call(self, node: ast.Call) -> bool:
        dotted = self._names.of(node.func)
        if dotted in _RETURN_PATHS:
            return True
        if isinstance(node.func, ast.Name) and node.func.id in self._returning:
            return True
        if last_name(node.func) not in _KEEP:
            return False
        of_method = isinstance(node.func, ast.Attribute) and dotted is None and self.holds(node.func.value)
        return of_method or any(self.holds(arg) for arg in node.args)

    def _holds_name(self, node: ast.Name) -> bool:
        scopes = [self._scope_of(node)]
        while not isinstance(scopes[-1], ast.Module):
            scopes.append(self._scope_of(scopes[-1]))
        return self._is_path_name(node.id) or any((id(scope), node.id) in self._held for scope in scopes)

    def _is_path_name(self, name: str) -> bool:
        return self._uses_api and bool(_PATH_NAME.search(name))

    def _is_name(self, text: str) -> bool:
        return self._literal is not None and bool(self._literal.search(text))

    def _filters(self, test: ast.expr) -> bool:
        """Return whether a condition is ``name.startswith('checkpoint_')``, or a match of such a pattern."""
        return any(isinstance(node, ast.Constant) and self.holds(node) for node in ast.walk(test))

    def _follow(self, node: ast.AST) -> None:
        """Take note of the names that a statement binds to checkpoint paths."""
        if isinstance(node, ast.Assign) and self.holds(node.value):
            for target in node.targets:
                self._bind(target)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension):
            if self.holds(node.iter if isinstance(node, ast.For | ast.comprehension) else node.value):
                self._bind(node.target)
        elif isinstance(node, ast.Return) and self.holds(node.value):
            scope = self._scope_of(node)
            if isinstance(scope, Function):
                self._returning.add(scope.name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADD:
            if any(map(self.holds, node.args)):
                self._bind(node.func.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._functions:
            function = self._functions[node.func.id]
            given = [*zip([arg.arg for arg in function.args.args], node.args, strict=False)]
            given += [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
            self._held |= {(id(function), name) for name, value in given if self.holds(value)}

    def _bind(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._held.add((id(self._scope_of(target)), target.id))
        elif isinstance(target, ast.Attribute):  # an attribute is the same in every method
            self._held.add((id(self._tree), ast.unparse(target)))
        elif isinstance(target, ast.Subscript):
            self._bind(target.value)
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._bind(part)

    def _scope_of(self, node: ast.AST) -> ast.AST:
        return self._scopes[id(node)]


def _scopes(tree: ast.Module) -> Iterator[tuple[int, ast.AST]]:
    """Give the function or module that each node lies in, by the node's id."""
    pending: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while pending:
        node, scope = pending.pop()
        yield id(node), scope
        inner = node if isinstance(node, Function | ast.Module) else scope
        pending += [(child, inner) for child in ast.iter_child_nodes(node)]


def _text(part: ast.AST) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{"


def _parts(node: ast.AST) -> list[ast.AST]:
    """Return the parts of an expression that its value comes from."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right] if isinstance(node.op, ast.Add | ast.Div | ast.Mod) else []
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        return [*node.values]
    if isinstance(node, ast.List | ast.Tuple):
        return [*node.elts]
    if isinstance(node, ast.Subscript | ast.Starred | ast.NamedExpr | ast.Await):
        return [node.value]
    return []
