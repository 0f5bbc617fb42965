"""Follow the names that a directory's listing gives, to the tests that tell checkpoints among them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .checkpoint_names import CheckpointNames
from .facts import NAMES, Facts
from .guards import guards
from .modules import Module
from .names import last_name
from .values import CHECKPOINT, ENTRY, FUNCTION, RUN, Tag, Value, texts, texts_of_elements

# What a listing gives, by the function's last name: both files and directories, or what `os.walk` sorts apart.
LISTERS = {"listdir", "iterdir", "ListDirectory", "scandir", "ls"}
WALKERS = {"walk", "Walk"}
ALL, FILES, DIRECTORIES = "all", "files", "directories"
# What a test says of an entry.
IS_CHECKPOINT, IS_OTHER, IS_FILE, IS_DIRECTORY = "checkpoint", "other", "file", "directory"

_AFFIXES = {"startswith", "endswith", "match", "fullmatch", "search", "fnmatch", "fnmatchcase", "contains", "findall"}
_FILE_TESTS = {"isfile": IS_FILE, "is_file": IS_FILE, "isdir": IS_DIRECTORY, "is_dir": IS_DIRECTORY}
_FILE_TESTS["IsDirectory"] = IS_DIRECTORY
_REGEX_TESTS = {"match", "fullmatch", "search", "findall"}
_NO_TEXT = re.compile(
    r"\\[A-Za-z]|\[[^]]*\]|\(\?P?[<=!:]\w*>?|\{[^}]*\}"
)  # of a regular expression: no letters of a name
_WORD = re.compile(r"\w{2}")
_DEEPEST = 6  # tests of tests
_SHORTEST = 3  # letters that say something of a name


@dataclass
class Listing:
    """A call that lists a directory."""

    call: ast.Call
    module: Module
    gives: str  # `ALL`, `FILES` or `DIRECTORIES`
    of_run: bool = False  # of a directory that checkpoints are saved to
    of_known: bool = False  # of that, or of another one whose name is known
    has_checkpoints: bool = False  # a test looks for checkpoints in it


@dataclass
class Listings:
    """The listings of a project, and what tests say of their entries."""

    names: CheckpointNames
    value_of: Callable[[Module, ast.AST], Value]  # before tests are considered
    facts: Facts
    node: Callable[[int | str], ast.AST]  # of a function's number
    by_id: dict[int, Listing] = field(default_factory=dict)

    def entries(self, module: Module, call: ast.Call, directory: Value, gives: str = ALL) -> Value:
        """Return the value of the entries of a listing, of which the directory is known."""
        number = id(call) * 4 + (ALL, FILES, DIRECTORIES).index(gives)
        listing = self.by_id.setdefault(number, Listing(call, module, gives))
        listing.of_run |= any(tag.kind == RUN and not tag.place for tag in directory)
        listing.of_known |= listing.of_run or any(one.rpartition("/")[2] not in ("", "{") for one in texts(directory))
        return frozenset([Tag(ENTRY, number)])

    def narrowed(self, value: Value, module: Module, node: ast.AST) -> Value:
        """Return the value of an expression, with what the tests around it say of entries."""
        if not any(tag.kind == ENTRY for tag in value):
            return value
        known = list(guards(module, node))
        return self._by_verdicts(value, lambda number: {self.says(module, *guard, number) for guard in known})

    def filtered(self, value: Value, module: Module, test: ast.expr) -> Value:
        """Return the value of a listing that a function filters."""
        return self._by_verdicts(value, lambda number: {self.says(module, test, True, number)})

    def _by_verdicts(self, value: Value, verdicts_of: Callable[[int], set[str | None]]) -> Value:
        found: set[Tag] = set()
        for tag in value:
            verdicts = verdicts_of(int(tag.of)) if tag.kind == ENTRY else set()
            if IS_OTHER in verdicts:
                continue
            if IS_CHECKPOINT in verdicts:
                self.by_id[int(tag.of)].has_checkpoints = True
                found.add(tag._replace(kind=CHECKPOINT, of=0))
            elif IS_FILE not in verdicts:
                found.add(tag)
        return frozenset(found)

    def says(self, module: Module, test: ast.AST, is_true: bool, number: int, depth: int = 0) -> str | None:
        """Return what the result of a test says of the entries of a listing, or None."""
        if depth > _DEEPEST:
            return None
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.says(module, test.operand, not is_true, number, depth + 1)
        if isinstance(test, ast.BoolOp):
            told = [self.says(module, value, is_true, number, depth + 1) for value in test.values]
            if isinstance(test.op, ast.And) is not is_true:  # one of them holds, nobody knows which
                return told[0] if len(set(told)) == 1 else IS_CHECKPOINT if IS_CHECKPOINT in told else None
            return next((one for one in (IS_OTHER, IS_CHECKPOINT, IS_FILE, IS_DIRECTORY) if one in told), None)
        if isinstance(test, ast.NamedExpr):
            return self.says(module, test.value, is_true, number, depth + 1)
        if isinstance(test, ast.Name):
            values = module.assigned(test)
            return self.says(module, values[0], is_true, number, depth + 1) if len(values) == 1 else None
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._of_comparison(module, test, is_true, number, depth)
        return self._of_call(module, test, is_true, number, depth) if isinstance(test, ast.Call) else None

    def _of_comparison(
        self,
        module: Module,
        test: ast.Compare,
        is_true: bool,
        number: int,
        depth: int,
    ) -> str | None:
        left, operator, right = test.left, test.ops[0], test.comparators[0]
        if isinstance(right, ast.Constant) and right.value is None:  # match is None
            return self.says(module, left, is_true is isinstance(operator, ast.IsNot | ast.NotEq), number, depth + 1)
        holds = is_true is isinstance(operator, ast.Eq | ast.In)
        about, other = (left, right) if self._is_about(module, left, number) else (right, left)
        if not self._is_about(module, about, number) or not isinstance(
            operator, ast.Eq | ast.NotEq | ast.In | ast.NotIn
        ):
            return None
        value = self.value_of(module, other)
        if isinstance(other, ast.Tuple | ast.Set | ast.List):
            value = frozenset().union(*(self.value_of(module, one) for one in other.elts))
        part_of = about is right  # "checkpoint" in name
        return self._judge(texts(value), holds, excludes=part_of or holds)

    def _of_call(self, module: Module, test: ast.Call, is_true: bool, number: int, depth: int) -> str | None:
        name = last_name(test.func)
        receiver = [test.func.value] if isinstance(test.func, ast.Attribute) else []
        values = [*receiver, *test.args]
        if name in _FILE_TESTS and any(self._is_about(module, value, number) for value in values):
            told = _FILE_TESTS[name]
            return told if is_true else IS_FILE if told == IS_DIRECTORY else None
        if name in {"any", "bool", "all"} and test.args:
            inner = test.args[0].elt if isinstance(test.args[0], ast.GeneratorExp | ast.ListComp) else test.args[0]
            return self.says(module, inner, is_true, number, depth + 1)
        if name in _AFFIXES:
            if not any(self._is_about(module, value, number) for value in values):
                return None
            known = [one for value in values for one in self._texts(module, value)]
            if name in _REGEX_TESTS:
                known = [one for one in known if _WORD.search(_NO_TEXT.sub(" ", one))]
            return self._judge(known, is_true, excludes=True)
        return self._of_function(module, test, is_true, number, depth)

    def _of_function(self, module: Module, test: ast.Call, is_true: bool, number: int, depth: int) -> str | None:
        """Return what a function of the project says that is asked about an entry."""
        if not any(self._is_about(module, value, number) for value in test.args):
            return None
        for tag in self.value_of(module, test.func):
            function = self.node(tag.of) if tag.kind == FUNCTION else None
            if isinstance(function, ast.FunctionDef):
                where = module.project.module_of(function)
                returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
                told = [self.says(where, value, is_true, number, depth + 1) for value in returned]
                return next((one for one in told if one), None)
            if isinstance(function, ast.Lambda):
                return self.says(module.project.module_of(function), function.body, is_true, number, depth + 1)
        return None

    def _judge(self, known: list[str], holds: bool, *, excludes: bool) -> str | None:
        """Return what a comparison with texts says; one that fails ``excludes`` all names of the kind, or only one."""
        known = [one for one in known if len(one) >= _SHORTEST or one.startswith(".")]
        if not known:
            return None
        self.facts.reads.add(NAMES)
        is_checkpoint = any(self.names.has(one) or self.names.has_part(one) for one in known)
        if holds:
            return IS_CHECKPOINT if is_checkpoint else IS_OTHER
        return IS_OTHER if is_checkpoint and excludes else None

    def _texts(self, module: Module, value: ast.expr) -> list[str]:
        if isinstance(value, ast.Tuple):
            return [one for part in value.elts for one in self._texts(module, part)]
        return [*texts(held := self.value_of(module, value)), *texts_of_elements(held)]

    def _is_about(self, module: Module, node: ast.expr, number: int) -> bool:
        return any(tag.kind == ENTRY and tag.of == number for tag in self.value_of(module, node))
