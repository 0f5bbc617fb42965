"""Bind names, attributes, parameters and results of a project to what they hold, until nothing new is found."""

from __future__ import annotations

import ast
import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence

from .evaluation import Evaluation
from .facts import MADE, NAMES, Key, option, returned
from .guards import guards
from .library import API
from .modules import Function, Module
from .names import last_name, written
from .values import (
    ANY_KEY,
    CHECKPOINT,
    FUNCTION,
    KEYS,
    LIBRARY,
    LINK,
    NOTHING,
    RUN,
    TEXT,
    Tag,
    Value,
    at_index,
    element,
    keys_of,
    texts,
    union,
)

_MOST_VISITS = 8  # of a statement, on average: most need one or two
_ADD = {"add", "append", "appendleft", "extend", "insert", "put", "put_nowait", "update"}
_ADD_TO_FIRST = {"heappush", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right"}
_DIRECTORY_OF = {"save_checkpoint", "save_checkpoint_multiprocess", "latest_checkpoint", "available_steps"}
_PREFIX_ARGUMENT = {"save_checkpoint": 3, "save_checkpoint_multiprocess": 3, "restore_checkpoint": 3}
_PREFIX_ARGUMENT |= {"latest_checkpoint": 1, "available_steps": 1}
# Functions whose second argument is a checkpoint if the first is: it gets its name, or is inside if it is a directory.
_COPY_TO_NAME = {"copytree", "copyfile", "rename", "replace", "link"}
_COPY_INTO = {"copy", "copy2", "move", "Copy", "Rename"}
_DEFINE_OPTIONS = {"add_argument", "DEFINE_string", "DEFINE_enum"}
_LINKS = {"symlink", "symlink_to"}
_MAKE_DIRECTORY = {"makedirs", "mkdir", "MakeDirs"}
_WRAPPERS = {"Path", "abspath", "absolute", "expanduser", "fspath", "normpath", "realpath", "resolve", "str"}
_BINDS = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem),
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Call, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef),
)


class Binding:
    """One run over all statements of a project after another."""

    def __init__(self, evaluation: Evaluation, modules: Sequence[Module]) -> None:
        self._evaluation = evaluation
        self._project = evaluation.project
        self._modules = modules
        self._facts = evaluation.facts
        self._made: set[str] = set()  # texts of directories that the project makes

    def until_known(self) -> None:
        """Follow each statement, and again those that have read what another one changed."""
        binding = [(module, node) for module in self._modules for node in module.nodes if isinstance(node, _BINDS)]
        readers: dict[Key, set[int]] = {}
        pending = collections.deque(range(len(binding)))
        waiting = set(pending)
        for _ in range(_MOST_VISITS * len(binding)):
            if not pending:
                break
            at = pending.popleft()
            waiting.discard(at)
            self._facts.reads, self._facts.changed = set(), set()
            self._follow(*binding[at])
            for key in self._facts.reads:
                readers.setdefault(key, set()).add(at)
            again = {reader for key in self._facts.changed for reader in readers.get(key, ())} - waiting
            pending.extend(sorted(again))
            waiting |= again

    def _follow(self, module: Module, node: ast.AST) -> None:
        value = self._evaluation.value
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(module, target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            if node.value is not None:
                self._assign(module, node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._iterate(module, node)
        elif isinstance(node, ast.withitem):
            if node.optional_vars is not None:
                self._bind(module, node.optional_vars, value(module, node.context_expr))
        elif isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            scope = module.scope(node)
            if isinstance(scope, Function) and node.value is not None:
                self._facts.add(returned(scope), value(module, node.value))
        elif isinstance(node, Function):
            self._parameters(module, node)
            self._decorate(module, node)
        elif isinstance(node, ast.Call):
            self._call(module, node)

    def _assign(self, module: Module, target: ast.expr, node: ast.expr) -> None:
        sequence = ast.Tuple | ast.List
        if isinstance(target, sequence) and isinstance(node, sequence) and len(target.elts) == len(node.elts):
            for one, inner in zip(target.elts, node.elts, strict=True):
                self._assign(module, one, inner)
        else:
            self._bind(module, target, self._evaluation.value(module, node))

    def _iterate(self, module: Module, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        target, over = node.target, node.iter
        if isinstance(over, ast.Tuple):
            value = union(self._evaluation.value(module, one) for one in over.elts)
        else:
            value = self._evaluation.value(module, over)
            if isinstance(target, ast.Name):  # texts of a tuple, as of names; other tuples may be elements of a list
                value |= frozenset(tag._replace(place=()) for tag in value if tag.kind == TEXT)
        held = union([value, keys_of(value)])
        self._bind(module, target, held)
        if not isinstance(node, ast.comprehension):
            self._bind(module, target, held, loop=node)

    def _bind(
        self, module: Module, target: ast.expr, value: Value, *, into: bool = False, loop: ast.AST | None = None
    ) -> None:
        """Bind a target of an assignment, in a scope or within a loop alone.

        Or put a value ``into`` the container that it is, wherever that is bound."""
        if isinstance(target, ast.Tuple | ast.List):
            for at, one in enumerate(target.elts):
                self._bind(module, one, element(value, at), loop=loop)
        elif isinstance(target, ast.Starred):
            self._bind(module, target.value, value, loop=loop)
        elif loop is not None:
            if isinstance(target, ast.Name):
                self._facts.add((id(loop), target.id), value)
        elif isinstance(target, ast.Subscript):
            key = target.slice.value if isinstance(target.slice, ast.Constant) else ANY_KEY
            held = at_index(value, key if isinstance(key, str | int) else ANY_KEY)
            keys = NOTHING if key != ANY_KEY else at_index(self._evaluation.value(module, target.slice), KEYS)
            self._bind(module, target.value, union([held, keys]), into=True)
        elif isinstance(target, ast.Name):
            found = self._project.resolve(module, target) if into else None
            scope = found[0].tree if found and found[1] else module.scope_of_name(target)
            self._facts.add((id(scope), found[1] if found and found[1] else target.id), value)
            if (within := module.loop_of_name(target)) is not None:
                self._facts.add((id(within), target.id), value)
        elif (key_of := self._evaluation.key(module, target)) is not None:
            self._facts.add(key_of, value)

    def _parameters(self, module: Module, node: ast.AST) -> None:
        """Bind parameters to their defaults; and note them, so that no outer name is taken for them."""
        arguments = node.args  # type: ignore[attr-defined]
        positional = [*arguments.posonlyargs, *arguments.args]
        for one in [*positional, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
            if one is not None:
                self._facts.add((id(node), one.arg), NOTHING)
        defaults = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
        defaults += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
        for one, default in defaults:
            if default is not None:
                self._facts.add((id(node), one.arg), self._evaluation.value(module, default))

    def _decorate(self, module: Module, node: ast.AST) -> None:
        """Bind the first parameter of a function's decorators to the function."""
        for decorator in getattr(node, "decorator_list", ()):
            for called in self._evaluation.functions(module, decorator):
                if isinstance(called, Function) and called.args.args:
                    self._facts.add((id(called), called.args.args[0].arg), frozenset([Tag(FUNCTION, id(node))]))

    def _call(self, module: Module, node: ast.Call) -> None:
        name = last_name(node.func)
        dotted = self._evaluation.dotted(module, node.func) or ""
        if dotted.startswith(f"{API}."):
            self._api_call(module, node, dotted.removeprefix(f"{API}."))
            return
        for called in self._evaluation.functions(module, node.func):
            self._pass(module, called, node)
        is_transfer = name == "put" and len(node.args) > 1  # put(source, target); a queue's takes one
        if isinstance(node.func, ast.Attribute) and name in _ADD and not is_transfer:
            added = union(self._evaluation.value(module, one) for one in node.args)
            self._bind(module, node.func.value, added, into=True)
        if name in _ADD_TO_FIRST and node.args:
            added = union(self._evaluation.value(module, one) for one in node.args[1:])
            self._bind(module, node.args[0], added, into=True)
        if name in _DEFINE_OPTIONS:
            self._option(module, node, name)
        passed_on = self._evaluation.value(module, node.func) if module.names.of(node.func) is None else NOTHING
        named = {str(tag.of).rpartition(".")[2] for tag in passed_on if tag.kind == LIBRARY and not tag.place}
        for one in sorted(named | {name}):
            self._copy(module, node, one)
        self._callbacks(module, node)

    def _api_call(self, module: Module, node: ast.Call, name: str) -> None:
        names = self._evaluation.names
        if name in _PREFIX_ARGUMENT:
            given = argument(node, "prefix", _PREFIX_ARGUMENT[name])
            for text in texts(self._evaluation.value(module, given)):
                if names.add_prefix(text):
                    self._facts.change(NAMES)
        if name in _DIRECTORY_OF:
            self._is_run(module, argument(node, "ckpt_dir", 0))
        if name == "restore_checkpoint":
            self._is_restored(module, argument(node, "ckpt_dir", 0))

    def _is_restored(self, module: Module, node: ast.expr | None) -> None:
        """Take note of the tests by ``isfile`` that let a restore of this path begin: it is one file, or none."""
        if node is None:
            return
        path = written(node)
        for test, is_true in guards(module, node):
            for part in _that_hold(test, is_true=is_true):
                if isinstance(part, ast.Call) and last_name(part.func) in {"isfile", "is_file"}:
                    receiver = [part.func.value] if isinstance(part.func, ast.Attribute) else []
                    if path in map(written, [*part.args, *receiver]):
                        self._evaluation.file_tests.add(id(part))
        scope = module.scope_of_name(node) if isinstance(node, ast.Name) else None
        if isinstance(scope, Function):
            self._facts.add(_is_restored_key(scope, path), NOTHING)

    def _is_run(self, module: Module, node: ast.expr | None) -> None:
        """Take note that an expression is a directory that checkpoints are saved to."""
        if isinstance(node, ast.Call) and last_name(node.func) in _WRAPPERS:
            inner = [node.func.value] if isinstance(node.func, ast.Attribute) and not node.args else node.args[:1]
            self._is_run(module, inner[0] if inner else None)
        elif isinstance(node, ast.Name):
            scope = module.scope_of_name(node)
            self._bind(module, node, frozenset([Tag(RUN)]))
            if isinstance(scope, Function) and any(
                one.arg == node.id for one in ast.walk(scope.args) if isinstance(one, ast.arg)
            ):
                self._facts.add(_is_run_key(scope, node.id), NOTHING)
            for value in module.assigned(node):
                if isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
                    self._is_run_once(module, value)
        elif isinstance(node, ast.Attribute | ast.Subscript):
            self._bind(module, node, frozenset([Tag(RUN)]))

    def _is_run_once(self, module: Module, node: ast.expr) -> None:
        if not any(tag.kind == RUN for tag in self._evaluation.value(module, node)):
            self._is_run(module, node)

    def _pass(self, module: Module, called: ast.AST, node: ast.Call) -> None:
        """Bind the parameters of a function, or of a class, to what a call gives."""
        if isinstance(called, ast.ClassDef):
            self._construct(module, called, node)
            return
        skips = self._project.module_of(called).class_of(called) is not None and not _is_static(called)
        skips = skips and not (isinstance(node.func, ast.Attribute) and self._names_class(module, node.func.value))
        self._pass_to(module, called, node.args, node.keywords, skip=int(skips))

    def _names_class(self, module: Module, node: ast.expr) -> bool:
        return isinstance(self._project.definition(module, node), ast.ClassDef)

    def _construct(self, module: Module, called: ast.ClassDef, node: ast.Call) -> None:
        made = next(iter(self._project.methods(called, "__init__")), None)
        if made is not None:
            self._pass_to(module, made, node.args, node.keywords, skip=1)
            return
        fields = [
            one.target.id for one in called.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        given = [*zip(fields, node.args, strict=False), *((one.arg, one.value) for one in node.keywords if one.arg)]
        for name, value in given:
            self._facts.add((self._project.family(called), name), self._evaluation.value(module, value))

    def _pass_to(
        self, module: Module, called: ast.AST, given: Iterable[ast.expr], keywords: Iterable[ast.keyword], *, skip: int
    ) -> None:
        arguments = called.args  # type: ignore[attr-defined]
        names = [one.arg for one in [*arguments.posonlyargs, *arguments.args]][skip:]
        known = {*names, *(one.arg for one in arguments.kwonlyargs)}
        given = list(given)
        plain = list(itertools.takewhile(lambda one: not isinstance(one, ast.Starred), given))
        pairs: list[tuple[str, ast.expr]] = [*zip(names, plain, strict=False)]
        pairs += [(one.arg, one.value) for one in keywords if one.arg in known and one.arg]
        for name, value in pairs:
            self._facts.add((id(called), name), self._evaluation.value(module, value))
            if self._facts.has(_is_run_key(called, name)):
                self._is_run(module, value)
            if self._facts.has(_is_restored_key(called, name)):
                self._is_restored(module, value)
        self._pass_rest(module, called, names[len(plain) :], given[len(plain) :])
        if arguments.vararg is not None:
            rest = given[len(names) :]
            self._facts.add(
                (id(called), arguments.vararg.arg), union(self._evaluation.value(module, one) for one in rest)
            )
        self._pass_keywords(module, called, [one for one in keywords if one.arg not in known])

    def _pass_rest(self, module: Module, called: ast.AST, names: Iterable[str], given: Iterable[ast.expr]) -> None:
        """Bind parameters to what a call takes out of sequences, as ``*args``."""
        value = union(self._evaluation.value(module, one) for one in given)
        for name in names:
            self._facts.add((id(called), name), value)

    def _pass_keywords(self, module: Module, called: ast.AST, keywords: Iterable[ast.keyword]) -> None:
        """Bind parameters to what a call takes out of dicts, as ``**kwargs``; such a parameter gets all others."""
        arguments = called.args  # type: ignore[attr-defined]
        for keyword in keywords:
            value = self._evaluation.value(module, keyword.value)
            if keyword.arg is None:
                for one in [*arguments.args, *arguments.kwonlyargs]:
                    self._facts.add((id(called), one.arg), element(value, one.arg))
            if arguments.kwarg is not None:
                held = value if keyword.arg is None else at_index(value, keyword.arg)
                self._facts.add((id(called), arguments.kwarg.arg), held)

    def _copy(self, module: Module, node: ast.Call, name: str) -> None:
        """Take note of where a call copies, moves or links a checkpoint to: that is one, too."""
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        holder = node.func.value if isinstance(node.func, ast.Attribute) and not module.names.of(node.func) else None
        if holder is not None and (len(values) == 1 or self._evaluation.holds(module, holder)):
            values.insert(0, holder)  # path.rename(other)
        if name in _MAKE_DIRECTORY and values:
            made = set(texts(self._evaluation.value(module, values[0])))
            if not made <= self._made:
                self._made |= made
                self._facts.change(MADE)
        if len(values) < 2 or name not in _COPY_TO_NAME | _COPY_INTO | _LINKS:
            return
        source, target = self._evaluation.value(module, values[0]), values[1]
        if name == "symlink_to":
            source, target = self._evaluation.value(module, target), values[0]
        if not self._evaluation.is_checkpoint(source):
            return
        is_link, known = name in _LINKS, self._evaluation.value(module, target)
        folder, last = _folder_and_name(target)
        if last is not None and self._evaluation.holds(module, last):  # it keeps its name
            self._is_run(module, folder)
        if name in _COPY_INTO and (not texts(known) or any(map(self._may_be_directory, texts(known)))):
            self._is_run(module, target)  # a directory, as far as is known
            return
        for text in texts(known):
            if self._evaluation.names.add_copy(text, is_link=is_link):
                self._facts.change(NAMES)
        if isinstance(target, ast.Name | ast.Attribute):
            self._bind(module, target, frozenset([Tag(LINK if is_link else CHECKPOINT)]))

    def _may_be_directory(self, path: str) -> bool:
        self._facts.reads.add(MADE)
        return path in self._made or path.rpartition("/")[2] in ("", "{")

    def _option(self, module: Module, node: ast.Call, name: str) -> None:
        """Bind an option of the command line to its default."""
        names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        default = argument(node, "default", 1 if name.startswith("DEFINE") else len(node.args))
        if names and default is not None:
            longest = max(names[:1] if name.startswith("DEFINE") else names, key=len)
            key = option(longest.lstrip("-").replace("-", "_"))
            self._facts.add(key, frozenset(tag for tag in self._evaluation.value(module, default) if tag.kind == TEXT))

    def _callbacks(self, module: Module, node: ast.Call) -> None:
        """Bind the parameters of functions that are passed on with their arguments: to map, sorted, submit, Thread."""
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        for function in values:
            if not isinstance(function, ast.Lambda | ast.Name | ast.Attribute):
                continue
            for tag in self._evaluation.value(module, function):
                called = self._project.node(tag.of) if tag.kind == FUNCTION and not tag.place else None
                if isinstance(called, Function):
                    others = [one for one in values if one is not function]
                    others = others[0].elts if len(others) == 1 and isinstance(others[0], ast.Tuple) else others
                    skip = int(self._project.module_of(called).class_of(called) is not None)
                    self._pass_to(module, called, others or receiver, (), skip=skip)


def argument(node: ast.Call, name: str, position: int) -> ast.expr | None:
    """Return an argument of a call."""
    given = [keyword.value for keyword in node.keywords if keyword.arg == name]
    return given[0] if given else node.args[position] if position < len(node.args) else None


def _is_run_key(function: object, parameter: str) -> Key:
    return id(function), f"{parameter} is a run"


def _folder_and_name(path: ast.expr) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the parts of a path of two parts, or (None, None)."""
    if isinstance(path, ast.Call) and last_name(path.func) == "join" and len(path.args) == 2:
        return path.args[0], path.args[1]
    if isinstance(path, ast.BinOp) and isinstance(path.op, ast.Div):
        return path.left, path.right
    return None, None


def _is_restored_key(function: object, parameter: str) -> Key:
    return id(function), f"{parameter} is restored"


def _that_hold(test: ast.expr, *, is_true: bool) -> Iterator[ast.expr]:
    """Give the parts of a test that are true if its result is this one."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _that_hold(test.operand, is_true=not is_true)
    elif isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) is is_true:
            for value in test.values:
                yield from _that_hold(value, is_true=is_true)
    elif is_true:
        yield test


def _is_static(function: ast.AST) -> bool:
    return any(getattr(one, "id", "") == "staticmethod" for one in getattr(function, "decorator_list", ()))
