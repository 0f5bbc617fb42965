"""Index the modules of a project: scopes, classes and functions, and what names of other modules stand for."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .names import Names

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = ast.Module | ast.ClassDef | Function
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
_DEFS = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_REEXPORTS = 5


def _parts(path: Path) -> tuple[str, ...]:
    """Return the names that imports may call a file by: all of it, from any folder on."""
    parts = path.with_suffix("").parts
    return tuple(re.sub(r"\W", "_", part) for part in (parts[:-1] if parts[-1] == "__init__" else parts))


class Module:
    """A parsed file, with the parent and scope of each node."""

    def __init__(self, tree: ast.Module, path: str) -> None:
        self.tree = tree
        self.parts = _parts(Path(path).absolute())
        package = self.parts if Path(path).stem == "__init__" else self.parts[:-1]
        self.parents: dict[int, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        pending: list[ast.AST] = [tree]
        while pending:
            node = pending.pop()
            self.nodes.append(node)
            for child in ast.iter_child_nodes(node):
                # Names' contexts and operators are one object each for all nodes.
                if not isinstance(child, ast.expr_context | ast.operator | ast.cmpop | ast.boolop | ast.unaryop):
                    self.parents[id(child)] = node
                    pending.append(child)
        self.names = Names(self.nodes, package)
        self.functions = {node.name: node for node in self.nodes if isinstance(node, _DEFS) and not self.class_of(node)}
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self._scopes: dict[int, Scope] = {}
        self._scopes_of: dict[int, list[ast.AST]] = {}
        self._loops: dict[int, set[str]] = {}
        self.project: Project  # set by it
        self._bound = set(self._bindings())
        self._assigned: dict[tuple[int, str], list[ast.expr]] = {}
        for node in self.nodes:
            for name, value in _assignments(node):
                self._assigned.setdefault((id(self.scope(node)), name), []).append(value)

    def assigned(self, name: ast.Name) -> list[ast.expr]:
        """Return the expressions that a name is assigned in its scope."""
        return self._assigned.get((id(self.scope(name)), name.id), [])

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Give each (child, parent) from a node up to the module."""
        while (parent := self.parents.get(id(node))) is not None:
            yield node, parent
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """Return the function, class or module whose names a node sees first."""
        found = self._scopes.get(id(node))
        if found is None:
            above = (parent for _, parent in self.above(node) if isinstance(parent, Scope))
            found = self._scopes[id(node)] = next(above, self.tree)
        return found

    def scopes(self, node: ast.AST) -> list[ast.AST]:
        """Return the scopes that a name is looked up in; methods do not see names of their class."""
        if id(node) not in self._scopes_of:
            found: list[ast.AST] = []
            is_first = True
            for _, parent in self.above(node):
                is_scope = isinstance(parent, Scope)
                if isinstance(parent, Comprehension) or (
                    is_scope and (is_first or not isinstance(parent, ast.ClassDef))
                ):
                    found.append(parent)
                is_first &= not is_scope
            self._scopes_of[id(node)] = found or [self.tree]
        return self._scopes_of[id(node)]

    def scope_of_name(self, name: ast.Name) -> ast.AST:
        """Return the scope that a name is bound in: by an assignment, a loop or a parameter; else the module."""
        scopes = self.scopes(name)
        return next((scope for scope in scopes if (id(scope), name.id) in self._bound), self.tree)

    def loop_of_name(self, name: ast.Name) -> ast.For | ast.AsyncFor | None:
        """Return the innermost loop around a name that binds it, if nothing else does within it."""
        for child, parent in self.above(name):
            if isinstance(parent, Function):
                return None
            if isinstance(parent, ast.For | ast.AsyncFor) and child in parent.body:
                if id(parent) not in self._loops:
                    self._loops[id(parent)] = _names_of_loop(parent)
                if name.id in self._loops[id(parent)]:
                    return parent
        return None

    def _bindings(self) -> Iterator[tuple[int, str]]:
        for node in self.nodes:
            if isinstance(node, ast.arg):
                yield id(self.scope(node)), node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield id(self._scope_of_target(node)), node.id

    def _scope_of_target(self, name: ast.Name) -> ast.AST:
        for child, parent in self.above(name):
            if isinstance(parent, ast.comprehension) and child is parent.target:
                return self.parents[id(parent)]
            if isinstance(parent, ast.stmt):
                break
        scope = self.scope(name)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            declared = (one for one in scope.body if isinstance(one, ast.Global))
            return self.tree if any(name.id in one.names for one in declared) else scope
        return scope

    def class_of(self, function: ast.AST) -> ast.ClassDef | None:
        """Return the class that a function is a method of."""
        parent = self.parents.get(id(function))
        return parent if isinstance(parent, ast.ClassDef) else None


@dataclass
class Project:
    """The modules that are scanned together."""

    modules: list[Module]
    _by_name: dict[tuple[str, ...], list[Module]] = field(default_factory=dict)
    _of_node: dict[int, Module] = field(default_factory=dict)
    _nodes: dict[int, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in self.modules:
            module.project = self
            for start in range(len(module.parts)):
                self._by_name.setdefault(module.parts[start:], []).append(module)
            for node in module.nodes:
                if isinstance(node, ast.ClassDef | Function):
                    self._of_node[id(node)], self._nodes[id(node)] = module, node
        for module in self.modules:
            module.names.follow(lambda dotted, here=module: self._external(here, dotted))  # type: ignore[misc]
        self._below: dict[int, list[ast.ClassDef]] = {}
        for module in self.modules:
            for node in module.classes.values():
                for base in self.bases(node):
                    self._below.setdefault(id(base), []).append(node)

    def reached(self, users: Collection[Module]) -> list[Module]:
        """Return the modules that code of others may pass paths to, or get them from, by whatever imports."""
        beside: dict[int, list[Module]] = {}
        for module in self.modules:
            for dotted in module.names.all():
                found = self._resolve(module, tuple(dotted.split(".")))
                if found and found[0] is not module:
                    beside.setdefault(id(module), []).append(found[0])
                    beside.setdefault(id(found[0]), []).append(module)
        pending, seen = [*users], {id(module) for module in users}
        while pending:
            for other in beside.get(id(pending.pop()), ()):
                if id(other) not in seen:
                    seen.add(id(other))
                    pending.append(other)
        return [module for module in self.modules if id(module) in seen]

    def module_of(self, node: ast.AST) -> Module:
        """Return the module of a function or class."""
        return self._of_node[id(node)]

    def node(self, number: int | str) -> ast.AST:
        """Return the class or function that a tag identifies."""
        return self._nodes[int(number)]

    def resolve(self, module: Module, expression: ast.AST) -> tuple[Module, str] | None:
        """Return the module of the project and the name there that an imported expression stands for ("" for all)."""
        dotted = module.names.of(expression)
        return self._resolve(module, tuple(dotted.split("."))) if dotted else None

    def definition(self, module: Module, expression: ast.AST) -> ast.AST | None:
        """Return the function or class of the project that an expression names."""
        found: tuple[Module, str] | None
        if isinstance(expression, ast.Name) and module.names.of(expression) is None:
            found = (module, expression.id)
        else:
            found = self.resolve(module, expression)
        if found is None:
            return None
        holder, _, name = found[1].rpartition(".")
        if holder:
            return self.methods(found[0].classes[holder], name)[0] if holder in found[0].classes else None
        return found[0].functions.get(name) or found[0].classes.get(name)

    def bases(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """Return the bases of a class that the project defines."""
        module = self.module_of(node)
        found = [self.definition(module, base) for base in node.bases]
        return [base for base in found if isinstance(base, ast.ClassDef) and base is not node]

    def family(self, node: ast.ClassDef) -> int:
        """Identify a class together with its bases and subclasses: they share the attributes of their objects."""
        above = _closure(node, self.bases)
        return min(id(one) for one in above if not self.bases(one)) if any(not self.bases(one) for one in above) else 0

    def methods(self, node: ast.ClassDef, name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef | None]:
        """Return the functions that a method of an object may be: of its class, else a base; and of subclasses."""
        above = (_method(one, name) for one in _closure(node, self.bases))
        first = next((one for one in above if one), None)
        below = [_method(one, name) for one in _closure(node, lambda one: self._below.get(id(one), []))[1:]]
        return [first, *(one for one in below if one)]

    def _external(self, module: Module, dotted: str) -> str:
        """Return the name of another package's module that modules of the project pass on, or the name as it is."""
        for _ in range(_MOST_REEXPORTS):
            names = tuple(dotted.split("."))
            found = next((end for end in range(len(names) - 1, 0, -1) if names[:end] in self._by_name), None)
            again = self._nearest(names[:found], module).names.bound(names[found]) if found else None
            if found is None or again is None:
                break
            dotted = ".".join([again, *names[found + 1 :]])
        return dotted

    def _nearest(self, names: tuple[str, ...], module: Module) -> Module:
        return max(self._by_name[names], key=lambda other: _shared(other.parts, module.parts))

    def _resolve(self, module: Module, names: tuple[str, ...], depth: int = 0) -> tuple[Module, str] | None:
        for end in range(len(names), 0, -1):
            if names[:end] not in self._by_name:
                continue
            target = self._nearest(names[:end], module)
            rest = names[end:]
            again = target.names.bound(rest[0]) if rest else None
            if again and target is not module and depth < _MOST_REEXPORTS:  # what that module imports itself
                return self._resolve(target, (*again.split("."), *rest[1:]), depth + 1)
            return target, ".".join(rest)
        return None


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value


def _names_of_loop(loop: ast.For | ast.AsyncFor) -> set[str]:
    """Return the names that a loop binds, but for those that are bound again in its body."""

    def bound(nodes: Sequence[ast.AST]) -> set[str]:
        parts = (part for node in nodes for part in ast.walk(node))
        return {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}

    return bound([loop.target]) - bound(loop.body)


def _closure(node: ast.ClassDef, step: object) -> list[ast.ClassDef]:
    found: list[ast.ClassDef] = []
    pending = [node]
    while pending:
        one = pending.pop(0)
        if one not in found:
            found.append(one)
            pending += step(one)  # type: ignore[operator]
    return found


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    return next((one for one in node.body if isinstance(one, _DEFS) and one.name == name), None)


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many folders two files share, counted from above."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
