"""Index a module: what its names were imported by, what they are bound to, and which texts its expressions are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

API = "flax.training.checkpoints"
_OURS = "flax_ckpt_compat.checkpoints"
_IMPORTERS = {"importlib.import_module", "__import__"}
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_ADDS = {"append", "appendleft", "add", "insert", "extend", "heappush", "put", "push", "setdefault"}
_JOINS = {"join", "Path", "PurePath", "PosixPath", "joinpath", "with_name"}
_DEEPEST = 4  # names of names that are followed
_UNKNOWN = "*"


@dataclass
class Index:
    """What names of a project may stand for, by scope; attributes have the scope 0."""

    parents: dict[int, ast.AST] = field(default_factory=dict)
    bound: dict[tuple[int, str], list[ast.expr]] = field(default_factory=dict)
    options: dict[str, list[ast.expr]] = field(default_factory=dict)  # defaults of command lines
    returned: dict[str, list[ast.expr]] = field(default_factory=dict)  # what functions return or yield

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what is around a node, from the inside out."""
        while (parent := self.parents.get(id(node))) is not None:
            yield parent
            node = parent

    def bind(self, target: ast.expr | ast.arg, value: ast.expr) -> None:
        """Note that a name, attribute or parameter may have a value."""
        if isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else ()
            for at, one in enumerate(target.elts):
                self.bind(one, values[at] if values else value)
        elif keys := self._keys(target):
            self.bound.setdefault(keys[0], []).append(value)

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return the expressions that a name, an attribute or the result of a function may be."""
        if isinstance(node, ast.Call):
            return self.returned.get(last_name(node.func), [])
        found = next((self.bound[key] for key in self._keys(node) if key in self.bound), [])
        return found or (self.options.get(node.attr, []) if isinstance(node, ast.Attribute) else [])

    def _keys(self, node: ast.AST) -> list[tuple[int, str]]:
        """Return a name with its function and its module; a container has the name of its elements."""
        if isinstance(node, ast.Attribute):
            return [(0, node.attr)]
        if isinstance(node, ast.Subscript | ast.Starred):
            return self._keys(node.value)
        name = getattr(node, "id", None) or getattr(node, "arg", None)
        scopes = [one for one in self.above(node) if isinstance(one, _FUNCTION | ast.Module)] if name else []
        return [(id(scope), str(name)) for scope in scopes]


class Module:
    """A parsed file of a project."""

    def __init__(self, tree: ast.Module, path: str, index: Index) -> None:
        self.tree, self.nodes, self.index = tree, list(ast.walk(tree)), index
        file = Path(path).absolute().with_suffix("")
        parts = tuple(re.sub(r"\W", "_", part) for part in file.parts)
        self.parts = parts[:-1] if file.name == "__init__" else parts
        index.parents.update((id(child), node) for node in self.nodes for child in ast.iter_child_nodes(node))
        self.imported: dict[str, str] = {}
        self.wildcards: set[str] = set()
        package = self.parts if file.name == "__init__" else self.parts[:-1]
        for node in self.nodes:
            self._take_import(node, package)
        for node in self.nodes:
            for target, value in _bindings(node):
                index.bind(target, value)
            if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value:
                function = next((one for one in index.above(node) if isinstance(one, ast.FunctionDef)), None)
                index.returned.setdefault(getattr(function, "name", ""), []).append(node.value)

    def _take_import(self, node: ast.AST, package: Sequence[str]) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                self.imported[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*":
                    self.wildcards.add(origin)
                else:
                    self.imported[alias.asname or alias.name] = f"{origin}.{alias.name}"

    def dotted(self, node: ast.AST, depth: int = 0) -> str:
        """Return the name by which an expression was imported, as ``os.path.join``, or ""; ours is that of Flax."""
        found = self._dotted(node, depth) if depth <= _DEEPEST else ""
        is_ours = f"{found}.".startswith(f"{_OURS}.")
        return API + found[len(_OURS) :] if is_ours else found

    def _dotted(self, node: ast.AST, depth: int) -> str:
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):  # no recursion: generated code has long ones
            attributes.insert(0, node.attr)
            node = node.value
        base = ""
        if isinstance(node, ast.Name):
            base = self.imported.get(node.id) or self._of_wildcard(node.id)
            values = self.index.values(node) if not base else []
            base = base or (self.dotted(values[0], depth + 1) if len(values) == 1 else "")
        elif isinstance(node, ast.Call):
            base = self._of_call(node, depth)
        elif isinstance(node, ast.Subscript) and self.dotted(node.value, depth + 1) == "sys.modules":
            base = text_constant(node.slice)
        return ".".join([base, *attributes]) if base else ""

    def _of_wildcard(self, name: str) -> str:
        if "flax.training" in self.wildcards and name == "checkpoints":
            return API
        return f"{API}.{name}" if self.wildcards & {API, _OURS} else ""

    def _of_call(self, node: ast.Call, depth: int) -> str:
        function = self.dotted(node.func, depth + 1) or last_name(node.func)
        constants = [text for one in node.args if (text := text_constant(one))]
        if function in _IMPORTERS and constants:
            is_relative = constants[0].startswith(".") and len(constants) > 1
            return constants[1] + constants[0] if is_relative else constants[0]
        if function == "getattr" and constants and (base := self.dotted(node.args[0], depth + 1)):
            return f"{base}.{constants[0]}"
        return self.dotted(node.args[0], depth + 1) if function == "functools.partial" and node.args else ""

    def text(self, node: ast.AST | None, depth: int = 0) -> str:
        """Return the text that an expression may be, with ``*`` for unknown parts."""
        if depth > _DEEPEST or node is None:
            return _UNKNOWN
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else _UNKNOWN
        if isinstance(node, ast.JoinedStr):
            return "".join(
                self.text(getattr(part, "value", None) if isinstance(part, ast.FormattedValue) else part, depth + 1)
                for part in node.values
            )
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and node.elts:
            return self.text(node.elts[0], depth + 1)
        if isinstance(node, ast.BinOp):
            return self._of_operation(node, depth + 1)
        if isinstance(node, ast.Call):
            return self._text_of_call(node, depth + 1)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute) and node.attr in {"name", "path"}:
                return self.text(node.value, depth + 1)
            known = [self.text(value, depth + 1) for value in self.index.values(node)]
            return next((text for text in known if text != _UNKNOWN), _UNKNOWN)
        return _UNKNOWN

    def _of_operation(self, node: ast.BinOp, depth: int) -> str:
        left = self.text(node.left, depth)
        if isinstance(node.op, ast.Mod):
            return re.sub(r"%\(?[-\w.)]+", _UNKNOWN, left)
        return left + "/" * isinstance(node.op, ast.Div) + self.text(node.right, depth)

    def _text_of_call(self, node: ast.Call, depth: int) -> str:
        name, receiver = last_name(node.func), getattr(node.func, "value", None)
        is_method = isinstance(node.func, ast.Attribute) and not self.dotted(node.func)
        parts = [self.text(one, depth) for one in node.args]
        if name == "format":
            return re.sub(r"\{[^}]*\}", _UNKNOWN, self.text(receiver, depth))
        if name == "join" and isinstance(receiver, ast.Constant) and isinstance(node.args[0], ast.List | ast.Tuple):
            return str(receiver.value).join(self.text(one, depth) for one in node.args[0].elts)
        if name in {"glob", "iglob", "rglob", *_JOINS} and parts:
            return "/".join([self.text(receiver, depth), *parts] if is_method and name != "Path" else parts)
        if name == "with_suffix" and parts:
            return self.text(receiver, depth) + parts[0]
        if name in {"split", "quote"} and self.dotted(node.func).startswith("shlex.") and parts:
            return parts[0]
        if name in {"abspath", "resolve", "absolute"}:
            return "/" + (parts or [self.text(receiver, depth)])[0]
        is_same = name in {"str", "fspath", "expanduser", "sorted", "list", "reversed", "max", "min"}
        return (parts or [self.text(receiver, depth)])[0] if is_same else _UNKNOWN


def is_function(node: ast.AST) -> bool:
    """Return whether a node is the definition of a function."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def last_name(function: ast.AST) -> str:
    """Return the last name of a function: ``exists`` of ``tf.io.gfile.exists``."""
    return getattr(function, "attr", None) or getattr(function, "id", None) or ""


def text_constant(node: ast.AST | None) -> str:
    """Return the text that an expression is, or ""."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr | ast.arg, ast.expr]]:
    """Yield what a node binds, as (target, value); what is added to a container counts as its value."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.Call) and last_name(node.func) in _ADDS and isinstance(node.func, ast.Attribute):
        holder = node.args[0] if node.func.attr == "heappush" and node.args else node.func.value
        yield from ((holder, value) for value in node.args)
    elif isinstance(node, ast.arguments):
        plain = [*node.posonlyargs, *node.args]
        yield from zip(plain[len(plain) - len(node.defaults) :], node.defaults, strict=True)
        yield from ((arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value)
