"""Evaluate expressions of a project, without running it, to what they hold of checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from .checkpoint_names import CheckpointNames
from .composition import Part, compose, parts_of
from .facts import NAMES, Facts, Key, option, returned
from .library import API, Library
from .listings import Listings
from .modules import Function, Module, Project
from .names import written
from .values import (
    ANY_KEY,
    CHECKPOINT,
    ENTRY,
    FUNCTION,
    KEYS,
    LIBRARY,
    LINK,
    NOTHING,
    OBJECT,
    Tag,
    Value,
    at_index,
    element,
    of_sequence,
    of_table,
    pieces,
    text,
    texts,
    union,
)

_DEEPEST = 60  # expressions within expressions
_OF_PATH = {"name", "stem", "path"}


class Evaluation:
    """The values that names and attributes of a project are bound to, and those of expressions of them."""

    def __init__(self, project: Project, names: CheckpointNames) -> None:
        self.project, self.names = project, names
        self.facts = Facts()
        self.listings = Listings(names, self.before_tests, self.facts, project.node)
        self.by_convention: dict[int, set[str]] = {}  # names of a module that are paths of checkpoints by spelling
        self.file_tests: set[int] = set()  # calls of `isfile` whose answer lets a restore of that path begin
        self._library = Library(self)
        self._memo: dict[tuple[int, bool], tuple[Value, frozenset[Key], int]] = {}  # with what was read, and when
        self._with_tests = True
        self._depth = 0

    def value(self, module: Module, node: ast.AST | None) -> Value:
        """Return what an expression holds."""
        if node is None or self._depth > _DEEPEST:
            return NOTHING
        if isinstance(node, ast.Constant):
            return text(node.value) if isinstance(node.value, str) else NOTHING
        key = id(node), self._with_tests
        found, reads, clock = self._memo.get(key, (NOTHING, frozenset(), -1))
        if clock < 0 or not self.facts.are_old(reads, clock):
            found, reads = self._evaluate_anew(module, node, key)
        self.facts.reads |= reads
        return found

    def _evaluate_anew(self, module: Module, node: ast.AST, key: tuple[int, bool]) -> tuple[Value, frozenset[Key]]:
        clock, outer, self.facts.reads = self.facts.clock, self.facts.reads, set()
        self._memo[key] = NOTHING, frozenset(), clock  # while it is evaluated: a name may be bound to itself
        self._depth += 1
        try:
            found = self._evaluate(module, node)
            if self._with_tests:
                found = self.listings.narrowed(found, module, node)
            reads = frozenset(self.facts.reads)
        finally:
            self._depth -= 1
            self.facts.reads = outer
        self._memo[key] = found, reads, clock
        return found, reads

    def holds(self, module: Module, node: ast.AST | None) -> bool:
        """Return whether an expression is, or lists, paths or names of checkpoints."""
        return self.is_checkpoint(self.value(module, node))

    def is_checkpoint(self, value: Value) -> bool:
        """Return whether a value is a checkpoint's path or name, or lists them."""
        self.facts.reads.add(NAMES)
        tagged = any(tag.kind == CHECKPOINT and not tag.place and not tag.piece for tag in value)
        return tagged or any(map(self.names.has, texts(value)))

    def is_link(self, value: Value) -> bool:
        """Return whether a value is the path of a link to a checkpoint."""
        tagged = any(tag.kind == LINK and not tag.place and not tag.piece for tag in value)
        return tagged or any(map(self.names.has_link, texts(value)))

    def functions(self, module: Module, node: ast.expr) -> Iterator[ast.AST]:
        """Give the functions and classes of the project that an expression may be."""
        defined = self.project.definition(module, node)
        if defined is not None:
            yield defined
            return
        if isinstance(node, ast.Attribute):
            for owner in self.classes(module, node.value):
                yield from (method for method in self.project.methods(owner, node.attr) if method)
        for tag in self.value(module, node):
            if tag.kind == FUNCTION and not tag.place:
                yield self.project.node(tag.of)

    def classes(self, module: Module, node: ast.expr) -> Iterator[ast.ClassDef]:
        """Give the classes of the project that an expression may be an object of."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            owner = self._owner(module, node)
            yield from self.project.bases(owner) if owner else ()
            return
        named = self.project.definition(module, node) if isinstance(node, ast.Name | ast.Attribute) else None
        if isinstance(named, ast.ClassDef):  # its attributes are those of its objects
            yield named
            return
        for tag in self.value(module, node):
            found = self.project.node(tag.of) if tag.kind == OBJECT and not tag.place else None
            if isinstance(found, ast.ClassDef):
                yield found

    def key(self, module: Module, node: ast.expr) -> Key | None:
        """Return what a name or attribute is bound under."""
        if isinstance(node, ast.Name):
            return id(module.scope_of_name(node)), node.id
        if isinstance(node, ast.Attribute):
            owner = next(self.classes(module, node.value), None)
            if owner is not None:
                return self.project.family(owner), node.attr
            found = self.project.resolve(module, node)
            if found and found[1]:
                return id(found[0].tree), found[1]
            return id(module.tree), written(node)
        return None

    def before_tests(self, module: Module, node: ast.AST) -> Value:
        """Return what an expression holds before the tests around it are considered: they are asked about it."""
        before, self._with_tests = self._with_tests, False
        try:
            return self.value(module, node)
        finally:
            self._with_tests = before

    def dotted(self, module: Module, function: ast.expr) -> str | None:
        """Return the dotted name of a called function, also if the API was passed on as a value."""
        name = module.names.of(function)
        if name is not None and name.startswith(API):
            return name
        for node, rest in [(function, "")] + (
            [(function.value, f".{function.attr}")] if isinstance(function, ast.Attribute) else []
        ):
            for tag in self.value(module, node):
                if tag.kind == LIBRARY and not tag.place and str(tag.of).startswith(API):
                    return f"{tag.of}{rest}"
        return name

    def _evaluate(self, module: Module, node: ast.AST) -> Value:
        api = module.names.of(node) if isinstance(node, ast.Name | ast.Attribute | ast.Call) else None
        found = self._evaluate_kind(module, node)
        is_known = api is not None and (f"{api}.".startswith(f"{API}.") or _is_file_function(module, node, api))
        return found | {Tag(LIBRARY, str(api))} if is_known else found

    def _evaluate_kind(self, module: Module, node: ast.AST) -> Value:
        if isinstance(node, ast.expr) and (parts := self._parts(module, node)) is not None:
            return compose(parts, lambda part: self.value(module, part))
        evaluate = _KINDS.get(type(node))
        return evaluate(self, module, node) if evaluate else NOTHING

    def _parts(self, module: Module, node: ast.expr) -> list[Part] | None:
        return parts_of(node, lambda template: texts(self.value(module, template)))

    def _name(self, module: Module, node: ast.Name) -> Value:
        loop = module.loop_of_name(node)
        if loop is not None and self.facts.has((id(loop), node.id)):  # other loops may use the same name
            return self.facts.get((id(loop), node.id)) | self._by_convention(module, node.id)
        found = self.facts.get((id(module.scope_of_name(node)), node.id))
        imported = self.project.resolve(module, node)
        if imported and imported[1]:
            found |= self.facts.get((id(imported[0].tree), imported[1]))
        defined = self.project.definition(module, node) if not found else None
        if isinstance(defined, Function):
            found |= {Tag(FUNCTION, id(defined))}
        return found | self._by_convention(module, node.id) | self._self(module, node)

    def _attribute(self, module: Module, node: ast.Attribute) -> Value:
        key = self.key(module, node)
        found = self.facts.get(key) if key else NOTHING
        for owner in self.classes(module, node.value):
            found |= self._of_class(owner, node.attr)
        if not texts(found):
            found |= self.facts.get(option(node.attr))
        base = self.value(module, node.value)
        if node.attr in _OF_PATH:
            found |= frozenset(tag for tag in base if tag.kind not in (OBJECT, FUNCTION, LIBRARY))
        elif node.attr == "suffix":
            found |= pieces(base)
        return found | self._by_convention(module, node.attr)

    def _of_class(self, owner: ast.ClassDef, name: str) -> Value:
        """Return what an attribute of an object is bound to by its class: a constant, a property, a method."""
        found = self.facts.get((id(owner), name))
        for base in self.project.bases(owner):
            found |= self.facts.get((id(base), name))
        for method in self.project.methods(owner, name):
            if method and any(
                getattr(one, "id", "") in {"property", "cached_property"} for one in method.decorator_list
            ):
                found |= self.facts.get(returned(method))
            elif method:
                found |= {Tag(FUNCTION, id(method))}
        return found

    def _call(self, module: Module, node: ast.Call) -> Value:
        called = list(self.functions(module, node.func))
        if not called:
            return self._library.call(module, node)
        values = []
        for one in called:
            if isinstance(one, ast.ClassDef):
                values.append(frozenset([Tag(OBJECT, id(one))]))
            elif isinstance(one, ast.Lambda):
                values.append(self.value(self.project.module_of(one), one.body))
            else:
                values.append(self.facts.get(returned(one)))
        return union(values)

    def _subscript(self, module: Module, node: ast.Subscript) -> Value:
        base = self.value(module, node.value)
        if isinstance(node.slice, ast.Slice):
            return base
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        key = self.facts.get((id(module.tree), written(node))) if index is not None else NOTHING
        if isinstance(index, str):
            return element(base, index) | key
        walked = frozenset(tag for tag in base if tag.kind == ENTRY and tag.place[:1] == (2,))
        if walked and written(node.slice) == "-1":
            return element(walked, 2)  # the names of files, which `os.walk` gives last
        return of_sequence(base, index) | key if isinstance(index, int) else of_sequence(base, None) | of_table(base)

    def _tuple(self, module: Module, node: ast.Tuple) -> Value:
        return union(at_index(self.value(module, one), at) for at, one in enumerate(node.elts))

    def _several(self, module: Module, node: ast.List | ast.Set) -> Value:
        return union(self.value(module, one) for one in node.elts)

    def _dict(self, module: Module, node: ast.Dict) -> Value:
        values = []
        for key, value in zip(node.keys, node.values, strict=True):
            held = self.value(module, value)
            constant = key.value if isinstance(key, ast.Constant) else ANY_KEY
            if key is not None and constant == ANY_KEY:
                values.append(at_index(self.value(module, key), KEYS))
            values.append(held if key is None else at_index(held, constant if isinstance(constant, str) else ANY_KEY))
        return union(values)

    def _set(self, module: Module, node: ast.BinOp) -> Value:
        """Return what is left of a set, or what is in one of two."""
        left, right = self.value(module, node.left), self.value(module, node.right)
        return union([left, right]) if isinstance(node.op, ast.BitOr) else left

    def _choice(self, module: Module, node: ast.IfExp) -> Value:
        return union([self.value(module, node.body), self.value(module, node.orelse)])

    def _either(self, module: Module, node: ast.BoolOp) -> Value:
        return union(self.value(module, one) for one in node.values)

    def _comprehension(self, module: Module, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
        return self.value(module, node.elt)

    def _dict_comprehension(self, module: Module, node: ast.DictComp) -> Value:
        return at_index(self.value(module, node.value), ANY_KEY) | at_index(self.value(module, node.key), KEYS)

    def _inner(self, module: Module, node: ast.Starred | ast.NamedExpr | ast.Await) -> Value:
        return self.value(module, node.value)

    def _lambda(self, module: Module, node: ast.Lambda) -> Value:  # noqa: ARG002
        return frozenset([Tag(FUNCTION, id(node))])

    def _self(self, module: Module, node: ast.Name) -> Value:
        """Return the object that ``self`` is in a method."""
        owner = self._owner(module, node) if node.id in {"self", "cls"} else None
        return frozenset([Tag(OBJECT, id(owner))]) if owner else NOTHING

    def _owner(self, module: Module, node: ast.AST) -> ast.ClassDef | None:
        return next((parent for _, parent in module.above(node) if isinstance(parent, ast.ClassDef)), None)

    def _by_convention(self, module: Module, name: str) -> Value:
        is_path = name in self.by_convention.get(id(module), ())
        return frozenset([Tag(CHECKPOINT)]) if is_path else NOTHING


def _is_file_function(module: Module, node: ast.AST, dotted: str) -> bool:
    """Return whether a function of files is passed on as a value: in a table, as a default, as an attribute."""
    is_function = not isinstance(node, ast.Call) and re.match(r"(os|shutil|gfile)\.|.*\.gfile\.", dotted)
    return bool(is_function) and not isinstance(module.parents.get(id(node)), ast.Attribute)


_KINDS: dict[type[ast.AST], Callable[[Evaluation, Module, Any], Value]] = {
    ast.Name: Evaluation._name,
    ast.Attribute: Evaluation._attribute,
    ast.Call: Evaluation._call,
    ast.Subscript: Evaluation._subscript,
    ast.Tuple: Evaluation._tuple,
    ast.List: Evaluation._several,
    ast.Set: Evaluation._several,
    ast.Dict: Evaluation._dict,
    ast.BinOp: Evaluation._set,
    ast.IfExp: Evaluation._choice,
    ast.BoolOp: Evaluation._either,
    ast.ListComp: Evaluation._comprehension,
    ast.SetComp: Evaluation._comprehension,
    ast.GeneratorExp: Evaluation._comprehension,
    ast.DictComp: Evaluation._dict_comprehension,
    ast.Starred: Evaluation._inner,
    ast.NamedExpr: Evaluation._inner,
    ast.Await: Evaluation._inner,
    ast.Lambda: Evaluation._lambda,
}
