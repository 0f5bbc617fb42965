"""Read Python files and the code cells of notebooks, and say what their names may stand for."""

from __future__ import annotations

import ast
import json
import os
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .findings import Finding

API = "flax.training.checkpoints"
OURS = "flax_ckpt_compat.checkpoints"
# Unknown parts of a text: of one name or several, a name from a listing, and the path of a checkpoint.
UNKNOWN, LISTED, CHECKPOINT = "*", "?", "*/checkpoint_*"
_LISTINGS = {"listdir", "scandir", "iterdir", "walk", "ListDirectory"}
_OF_CHECKPOINTS = {"save_checkpoint", "save_checkpoint_multiprocess", "latest_checkpoint"}
_PATH_NAME = re.compile(r"(^|_)(ckpt|checkpoint)(_?(path|file|filename|filepath|fname|name))?$", re.IGNORECASE)
_EXTENSION = re.compile(r"\.(?!bak$|old$|orig$|tmp$)[A-Za-z][\w-]*$")
_ADDS = {"append", "appendleft", "add", "insert", "extend", "put", "push", "setdefault"}
_JOINS = {"join", "Path", "PurePath", "PosixPath", "joinpath", "with_name", "glob", "iglob", "rglob"}
_JOINS |= {"str", "fspath", "expanduser", "sorted", "list", "reversed", "max", "min", "quote", "shlex.split"}  # of one
_GIVE_NAMES = {"partial", "getattr", "import_module", "__import__", "modules"}
_GLOBS = {"glob", "iglob", "rglob", "Glob"}
SHORTEST = 3  # characters that say what a name is
_DEEPEST = 40  # expressions in expressions, and names of names
_SKIPPED = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "site-packages", "build", "dist"}


def files_below(path: Path) -> Iterator[Path]:
    """Yield a file, or the Python files and notebooks below a folder."""
    if not path.is_dir():
        yield path
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.endswith(".egg-info"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith((".py", ".ipynb")))


def _read(file: Path) -> tuple[list[tuple[int | None, int, str]], ast.Module]:
    """Parse a file, never run; return its lines, as (number of a cell or None, number, text), and the tree."""
    if not file.is_file():  # a pipe, to which nobody may ever write
        raise OSError("not a regular file: save its code to one")
    if file.suffix != ".ipynb":
        with tokenize.open(file) as opened:  # by the encoding that the file declares
            text = opened.read()
        return [(None, *one) for one in enumerate(text.split("\n"), 1)], ast.parse(text)
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    # Not str.splitlines, which also cuts text at form feeds and at separators of Unicode.
    texts = ["".join(one.get("source") or "") for one in cells if one.get("cell_type") == "code"]
    written = [re.split(r"\r\n?|\n", text) for text in texts]
    lines = [(at, *one) for at, cell in enumerate(written, 1) for one in enumerate(cell, 1)]
    return [*lines], ast.parse("".join(map(_cell_code, written)))


def _cell_code(lines: list[str]) -> str:
    """Return the Python of a cell, with as many lines; nothing where the rest is not Python."""
    code = ""
    for line in lines:  # a shell command is a call, IPython's other commands are ``pass``
        shell = re.match(r"(\s*)(?:\w+\s*=\s*)?!(.+)", line)
        other = re.sub(r"^(\s*)[%!?].*|^(\s*)[\w.]+\?+$", r"\1\2pass", line)
        code += f"{shell[1]}get_ipython().system({shell[2]!r})\n" if shell else f"{other}\n"
    try:
        ast.parse(code)
    except SyntaxError:
        return "\n" * len(lines)
    return code


class Project:
    """Hold what the modules of a program share: values of names, parameters, prefixes."""

    def __init__(self) -> None:
        self.values: dict[str, list[ast.expr]] = defaultdict(list)  # of names, of functions' results and of options
        self.parameters: dict[str, list[tuple[Module, ast.arguments]]] = defaultdict(list)  # of functions
        self.around: dict[ast.AST, ast.AST] = {}  # node → the function that it is in, or else the outermost statement
        self.prefixes = {"checkpoint_"}  # of the names of checkpoints

    def names_checkpoint(self, text: str) -> bool:
        """Return whether a path, pattern or regular expression fits names such as ``checkpoint_1``."""
        name = text.rpartition("/")[2]
        if is_other_file(name) or len(re.sub(r"\W", "", name)) < SHORTEST:
            return False
        return any(name.lstrip("^.*(?:").startswith(one) or fnmatchcase(f"{one}1", name) for one in self.prefixes)


class Module:
    """A parsed file of a project. A name may be whatever is assigned to it anywhere in the file."""

    def __init__(self, file: Path, project: Project) -> None:
        self._path, (self._lines, tree) = str(file), _read(file)
        self.name = file.parent.name if file.stem == "__init__" else file.stem
        self.nodes, self.project = list(ast.walk(tree)), project
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.imported: dict[str, str] = {}
        functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        project.around |= {node: one for one in [*tree.body, *functions] for node in ast.walk(one)}
        self._values: dict[str, list[ast.expr]] = defaultdict(list)
        self._texts: dict[ast.AST, str] = {}
        for node in self.nodes:
            self._take_import(node)
            for target, value in _bindings(node):
                self.bind(target, value)
        for node in functions:
            project.parameters[node.name].append((self, node.args))
        self.reached = {part for dotted in self.imported.values() for part in dotted.split(".")}

    def finding(self, kind: str, action: str, node: Any) -> Finding:
        """Return a finding with its place in the file."""
        cell, line, code = self._lines[node.lineno - 1]
        return Finding(self._path, cell, line, kind, action, code.strip())

    def lists_checkpoints(self, node: ast.Call) -> bool:
        """Return whether a call lists names by a pattern of checkpoints, or code around it has texts that begin so."""
        name = last_name(node.func)
        pattern = self.text(node.args[-1]).rpartition("/")[2] if name in _GLOBS and node.args else ""
        if pattern.strip("*?"):
            return self.project.names_checkpoint(pattern)
        around = list(ast.walk(self.project.around[node])) if name in _LISTINGS | _GLOBS else []
        values = [part for one in around for value in self.values(one) for part in ast.walk(value)]
        return any(self.project.names_checkpoint(f"{text_constant(one)}*") for one in [*around, *values])

    def bind(self, target: ast.AST, value: ast.expr) -> None:
        """Note that a name, attribute or parameter may have a value; a container is what its elements are."""
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self.bind(one, value)
        elif name := last_name(target):
            self._values[name].append(value)
            self.project.values[name].append(value)

    def bind_call(self, node: ast.Call) -> None:
        """Note the arguments of a project's function, and the defaults of options on a command line."""
        name = last_name(node.func)
        default = argument(node, "default", 1 if name.startswith("DEFINE_") else 99)
        if default and (name in {"add_argument", "option"} or name.startswith("DEFINE_")):
            for option in map(text_constant, node.args):
                self.project.values[option.lstrip("-").replace("-", "_")].append(default)
        if len(functions := self.project.parameters.get(name, [])) == 1:
            module, taken = functions[0]
            plain = [one for one in [*taken.posonlyargs, *taken.args] if one.arg not in {"self", "cls"}]
            for target, value in [*zip(plain, node.args, strict=False), *((one, one.value) for one in node.keywords)]:
                module.bind(target, value)

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return the expressions that a name, an attribute or the result of a function may be."""
        name = last_name(getattr(node, "func", node))
        is_of_project = isinstance(node, ast.Call | ast.Attribute) or name in self.imported
        return self._values.get(name) or (self.project.values.get(name, []) if is_of_project else [])

    def _take_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = alias.name if alias.asname or origin else alias.name.partition(".")[0]
                self.imported[alias.asname or name] = f"{origin}{name}"

    def dotted(self, node: ast.AST, depth: int = 0) -> str:
        """Return the name by which an expression was imported, as ``os.path.join``, or ""."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):  # no recursion: generated code has long ones
            attributes.insert(0, node.attr)
            node = node.value
        base = self._base(node, depth) if depth <= _DEEPEST else ""
        return ".".join([base, *attributes]) if base else ""

    def _base(self, node: ast.AST, depth: int) -> str:
        if isinstance(node, ast.Name):
            if node.id in self.imported or len(values := self.values(node)) != 1:
                return self.imported.get(node.id, "")
            return self.dotted(values[0], depth + 1)
        # getattr(training, "checkpoints"), import_module(".checkpoints", "flax.training"), sys.modules["flax.training"]
        giver = last_name(getattr(node, "func", node))
        given: list[Any] = node.args[:2] if isinstance(node, ast.Call) else [getattr(node, "slice", None)]
        names = [text_constant(one) or self.dotted(one, depth + 1) for one in given if giver in _GIVE_NAMES]
        parts = names[:1] if giver == "partial" else sorted(names, key=lambda name: name.startswith("."))
        return ".".join(filter(None, parts)).replace("..", ".")

    def text(self, node: ast.AST | None, depth: int = 0) -> str:
        """Return the text that an expression may be; `UNKNOWN`, `LISTED` and `CHECKPOINT` stand for parts."""
        if node is None or depth > _DEEPEST:
            return UNKNOWN
        if node not in self._texts:
            self._texts[node] = UNKNOWN  # where the text depends on itself
            self._texts[node] = self._text(node, depth + 1)
        return self._texts[node]

    def _text(self, node: ast.AST, depth: int) -> str:
        match node:
            case ast.Constant(value=value):
                return value if isinstance(value, str) else UNKNOWN
            case ast.JoinedStr(values=parts):
                return "".join(self.text(part, depth) for part in parts)
            case ast.Subscript(value=inner) | ast.Attribute(value=inner, attr="name" | "path"):
                return self.text(inner, depth)
            case ast.BinOp(left=left, op=op, right=right):
                added = "/" * isinstance(op, ast.Div) + self.text(right, depth)
                return self.text(left, depth) + added * isinstance(op, ast.Add | ast.Div)
            case ast.Call():
                return self._text_of_call(node, depth)
            case ast.Name() | ast.Attribute() | ast.arg():
                found = self._best(self.values(node), depth)
                return CHECKPOINT if _PATH_NAME.search(last_name(node)) and not is_other_file(found) else found
        inside: Iterable[Any] = getattr(node, "values", None) or ast.iter_child_nodes(node)  # a dict's without its keys
        return self._best([part for part in inside if isinstance(part, ast.expr)], depth)

    def _best(self, nodes: list[ast.expr], depth: int) -> str:
        """Return the text of the first expression that is a checkpoint, or else that is known."""
        known = [text for one in nodes if (text := self.text(one, depth)) != UNKNOWN]
        return next((text for text in known if CHECKPOINT in text), known[0] if known else UNKNOWN)

    def _text_of_call(self, node: ast.Call, depth: int) -> str:
        name, dotted = last_name(node.func), self.dotted(node.func)
        if self.lists_checkpoints(node) or (dotted or name).rpartition(".")[2] in _OF_CHECKPOINTS:
            return CHECKPOINT
        parts = [*([node.func.value] if isinstance(node.func, ast.Attribute) and not dotted else []), *node.args]
        first, *others = [self.text(one, depth) for one in parts] or [UNKNOWN]
        if name == "format":
            return first
        if {name, dotted} & _JOINS:
            return "/".join([first, *others])
        if name in {"abspath", "resolve", "absolute"}:
            return f"/{first}"
        given = [one for one in parts if {CHECKPOINT, LISTED} & {self.text(one, depth)}]
        return LISTED if name in _LISTINGS else self._best([*self.values(node), *given], depth)


def is_other_file(text: str) -> bool:
    """Return whether a text is the name of a file with an ending that checkpoints do not have."""
    return bool(_EXTENSION.search(text.rpartition("/")[2]))


def last_name(node: ast.AST) -> str:
    """Return the last name of an expression, ``exists`` of ``tf.io.gfile.exists``; of an element, its container's."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    return next((name for key in ("attr", "id", "arg", "name") if (name := getattr(node, key, None))), "")


def text_constant(node: ast.AST | None) -> str:
    """Return the text that an expression is, or ""."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def argument(call: ast.Call, name: str, at: int) -> ast.expr | None:
    """Return an argument of a call by its name or place."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return named or (call.args[at] if at < len(call.args) else None)


def _bindings(node: Any) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield what a node binds, as (target, value); what is added to a container counts as its value."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            yield node.target, node.iter
        case ast.Call(func=ast.Attribute(attr=name, value=holder), args=values) if name in _ADDS:
            yield from ((holder, value) for value in values)
        case ast.arguments(posonlyargs=first, args=plain, defaults=defaults, kwonlyargs=named, kw_defaults=others):
            yield from zip([*first, *plain][::-1], defaults[::-1], strict=False)
            yield from ((arg, value) for arg, value in zip(named, others, strict=True) if value)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            results = [one for one in ast.walk(node) if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom)]
            yield from ((node, one.value) for one in results if one.value)
