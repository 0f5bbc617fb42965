"""Say what functions and methods that the project does not define return: paths, listings, parts of names."""

from __future__ import annotations

import ast
import re
from typing import Protocol

from .checkpoint_names import CheckpointNames
from .facts import Facts, returned
from .listings import ALL, DIRECTORIES, FILES, LISTERS, WALKERS, Listings
from .modules import Module, Project
from .names import CHECKPOINT_API, last_name
from .values import (
    ANY_KEY,
    CHECKPOINT,
    ENTRY,
    FUNCTION,
    LIBRARY,
    NOTHING,
    RUN,
    TEXT,
    Tag,
    Value,
    at_index,
    dict_values,
    element,
    keys_of,
    of_sequence,
    of_table,
    pieces,
    texts,
    union,
)

API = "flax.training.checkpoints"
_RETURN_PATHS = {f"{API}.{name}" for name in CHECKPOINT_API if name.startswith(("save", "latest"))}
_RETURN_PATHS |= {f"{API}._checkpoint_path", f"{API}._all_checkpoints"}
# Functions whose result is about the path they are given, by their last name.
_KEEP = {"Path", "PosixPath", "PurePath", "abspath", "absolute", "as_posix", "as_uri", "commonpath", "expanduser"}
_KEEP |= {"fspath", "normpath", "realpath", "resolve", "safe_normpath", "basename", "str", "compile", "with_name"}
_KEEP |= {"chain", "copy", "deque", "iter", "list", "max", "min", "natural_sort", "natsorted", "next", "reversed"}
_KEEP |= {
    "set",
    "sorted",
    "tuple",
    "from_iterable",
    "escape",
    "heappop",
    "heappushpop",
    "heapreplace",
    "nsmallest",
    "nlargest",
    "union",
    "difference",
    "cast",
    "replace_prefix",
    "tqdm",
}
_OF_ANY = {"deque", "iter", "list", "max", "min", "next", "nlargest", "nsmallest", "reversed", "set", "sorted", "tuple"}
_MAKE_ABSOLUTE = {"abspath", "absolute", "realpath", "resolve"}
_OF_CONTAINER = {"get", "pop", "popitem", "setdefault"}
_PARSERS = {"split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix", "replace", "strip", "rstrip"}
_PARSERS |= {"lstrip", "splitext", "lower", "upper", "with_suffix"}
_COPIES = {"copy", "copy2", "copyfile", "copytree", "move", "rename", "replace"}  # return where they copied to
ARCHIVE = "zipfile.ZipFile"
_GLOBS = {"glob", "iglob", "rglob", "Glob"}
_ANYTHING = re.compile(r"(^|/)\*+(/\*+)*/?$")  # a glob that gives all entries
FILE_SYSTEMS = ("fsspec.", "gcsfs.", "s3fs.")
_OBJECTS = {ARCHIVE, "shutil.make_archive"}


class Evaluator(Protocol):
    """Evaluates the arguments of calls."""

    project: Project
    names: CheckpointNames
    listings: Listings
    facts: Facts

    def value(self, module: Module, node: ast.AST | None) -> Value:
        """Return what an expression holds."""

    def dotted(self, module: Module, function: ast.expr) -> str | None:
        """Return the dotted name of a called function."""

    def is_checkpoint(self, value: Value) -> bool:
        """Return whether a value is a checkpoint's path or name, or lists them."""


class Library:
    """The functions of other packages, as far as they pass on paths."""

    def __init__(self, evaluation: Evaluator) -> None:
        self._evaluation = evaluation
        self._asked: dict[int, ast.expr] = {}  # they are kept: values are remembered by the ids of nodes

    def call(self, module: Module, node: ast.Call) -> Value:
        """Return what a call returns."""
        dotted, name = module.names.of(node.func), last_name(node.func)
        if self._evaluation.dotted(module, node.func) in _RETURN_PATHS:
            return frozenset([Tag(CHECKPOINT)])
        if dotted in _OBJECTS or (dotted or "").startswith(("tempfile.", *FILE_SYSTEMS)):
            return frozenset([Tag(LIBRARY, str(dotted))])
        listed = self._listing(module, node, name)
        if listed is not None:
            return listed
        if name in {"filter", "map"}:
            return self._mapped(module, node, name)
        values = [self._value(module, value) for value in node.args]
        receiver = self._value(module, node.func.value) if self._has_receiver(module, node) else NOTHING  # type: ignore[attr-defined]
        if name in _COPIES and len(values) > 1 and dotted:
            return values[1]
        if name == "zip":
            return union(at_index(value, at) for at, value in enumerate(values))
        if name == "enumerate":
            return at_index(union(values[:1]), 1)
        if name == "items":
            return at_index(dict_values(receiver), 1) | at_index(keys_of(receiver), 0)
        if name == "keys":
            return keys_of(receiver)
        if name == "values":
            return dict_values(receiver)
        if name == "popleft" or (name == "pop" and (not node.args or _is_position(node.args[0]))):
            return of_sequence(receiver, None)
        if name in _OF_CONTAINER:
            key = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ANY_KEY
            table = NOTHING if isinstance(key, str) and key != ANY_KEY else of_table(receiver)
            return union([element(receiver, key if isinstance(key, str) else ANY_KEY), table, *values[1:]])
        if name == "split" and (dotted or "").endswith("path.split"):
            return at_index(union(values), 1)
        if dotted in {"re.split", "re.sub"} and len(values) > 1:
            return pieces(values[-1])
        if name == "join" and receiver:  # "".join(…)
            return pieces(union(values))
        if name in _PARSERS:
            return self._parsed(node, receiver, values)
        if name not in _KEEP:
            return NOTHING
        kept = union([receiver, *values])
        kept = union([kept, keys_of(kept)]) if name in _OF_ANY else kept
        return _with_root(kept) if name in _MAKE_ABSOLUTE else kept

    def _value(self, module: Module, node: ast.expr) -> Value:
        return self._evaluation.value(module, node)

    def _has_receiver(self, module: Module, node: ast.Call) -> bool:
        return isinstance(node.func, ast.Attribute) and module.names.of(node.func) is None

    def _parsed(self, node: ast.Call, receiver: Value, values: list[Value]) -> Value:
        """Return what is left of a name; a path that is split at slashes, or stripped of them, is left whole."""
        held = receiver if receiver else union(values[:1])
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        of_slashes = isinstance(first, str) and "/" in first
        return held if of_slashes else pieces(held)

    def _listing(self, module: Module, node: ast.Call, name: str) -> Value | None:
        """Return the entries that a call lists, or None if it lists none."""
        has_receiver = self._has_receiver(module, node)
        listings = self._evaluation.listings
        receiver = self._value(module, node.func.value) if has_receiver else NOTHING  # type: ignore[attr-defined]
        first = self._value(module, node.args[0]) if node.args else NOTHING
        if name in LISTERS and (node.args or has_receiver or name == "listdir"):
            return listings.entries(module, node, union([receiver, first]), ALL)
        if name in WALKERS and (module.names.of(node.func) != "ast.walk"):
            directory = union([receiver, first])
            named = [listings.entries(module, node, directory, gives) for gives in (DIRECTORIES, FILES)]
            return union([at_index(named[0], 1), at_index(named[1], 2)])
        if name in _GLOBS:
            return self._glob(module, node, receiver, first)
        if (module.names.of(node.func) or "") == "fnmatch.filter" and len(node.args) > 1:
            return listings.filtered(first, module, self._test(node))
        return None

    def _glob(self, module: Module, node: ast.Call, receiver: Value, first: Value) -> Value:
        """Return what a pattern gives: checkpoints, all entries of a directory, or other files."""
        patterns = texts(first)
        if any(map(self._evaluation.names.has, patterns)) or self._evaluation.is_checkpoint(receiver):
            return frozenset([Tag(CHECKPOINT)])
        if any(map(_ANYTHING.search, patterns)):
            return self._evaluation.listings.entries(module, node, receiver | self._directory(module, node))
        return frozenset(tag for tag in first if tag.kind == TEXT)

    def _directory(self, module: Module, node: ast.Call) -> Value:
        """Return what a glob's pattern says of the directory, in which `RUN` is not the end of the path."""
        inner = [part for arg in node.args for part in ast.walk(arg) if isinstance(part, ast.Name | ast.Attribute)]
        return frozenset(tag for part in inner for tag in self._value(module, part) if tag.kind == RUN)

    def _mapped(self, module: Module, node: ast.Call, name: str) -> Value:
        if len(node.args) < 2:
            return NOTHING
        function, values = node.args[0], self._value(module, node.args[1])
        called = next((tag for tag in self._value(module, function) if tag.kind == FUNCTION), None)
        if name == "map":
            if called is None:
                return values if last_name(function) in _KEEP | {"join"} else NOTHING
            found = self._evaluation.project.node(called.of)
            if isinstance(found, ast.Lambda):
                return self._value(self._evaluation.project.module_of(found), found.body)
            return self._evaluation.facts.get(returned(found))
        if any(tag.kind == ENTRY for tag in values):
            return self._evaluation.listings.filtered(values, module, self._test(node, function))
        return values

    def _test(self, node: ast.Call, function: ast.expr | None = None) -> ast.expr:
        """Return the test that a filter makes of each value."""
        if isinstance(function, ast.Lambda):
            return function.body
        if function is None:  # fnmatch.filter(names, pattern)
            asked = ast.Call(ast.Name("fnmatch"), [node.args[0], node.args[1]], [])
        else:
            asked = ast.Call(function, [node.args[1]], [])
        return self._asked.setdefault(id(node), asked)


def _is_position(node: ast.expr) -> bool:
    """Return whether an argument is a number, as ``-1``."""
    number = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(number, ast.Constant) and isinstance(number.value, int)


def _with_root(value: Value) -> Value:
    """Return the value of paths that were made absolute: nobody knows what stands before relative ones."""
    relative = (tag for tag in value if tag.kind == TEXT and not tag.place and not re.match(r"/|\w+://", str(tag.of)))
    changed = {tag: Tag(TEXT, f"{{/{tag.of}") for tag in relative}
    return frozenset(changed.get(tag, tag) for tag in value)
