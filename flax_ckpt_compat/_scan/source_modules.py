"""Read Python files and the code cells of notebooks, and say what their names may stand for."""

from __future__ import annotations

import ast
import json
import os
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .findings import Finding

API = "flax.training.checkpoints"
OURS = "flax_ckpt_compat.checkpoints"
# Unknown parts of a text: of one name or several, a name from a listing, and the path of a checkpoint.
UNKNOWN, LISTED, CHECKPOINT = "*", "?", "*/checkpoint_*"
LISTINGS = {"listdir", "scandir", "iterdir", "walk", "ListDirectory"}
_OF_CHECKPOINTS = {"save_checkpoint", "save_checkpoint_multiprocess", "latest_checkpoint"}
_PATH_NAME = re.compile(r"(^|_)(ckpt|checkpoint)(_?(path|file|filename|filepath|fname|name))?$", re.IGNORECASE)
_EXTENSION = re.compile(r"\.(?!bak$|old$|orig$|tmp$)[A-Za-z][\w-]*$")
_ADDS = {"append", "appendleft", "add", "insert", "extend", "put", "push", "setdefault"}
_JOINS = {"join", "Path", "PurePath", "PosixPath", "joinpath", "with_name", "glob", "iglob", "rglob"}
_SAME = {"str", "fspath", "expanduser", "sorted", "list", "reversed", "max", "min", "quote", "compile"}
_GIVE_MODULES = {"getattr", "import_module", "__import__", "modules"}
_DEEPEST = 40  # expressions in expressions, and names of names
_SKIPPED = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "site-packages", "build", "dist"}

Line = tuple[int | None, int, str]  # number of the notebook's cell, or None, of the line in it, and what is written


def files_below(path: Path) -> Iterator[Path]:
    """Yield a file, or the Python files and notebooks below a folder."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"There is no file or folder {path}")
        yield path
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.endswith(".egg-info"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith((".py", ".ipynb")))


def _read(file: Path) -> tuple[list[Line], ast.Module]:
    """Parse a file; it is never imported or run. The code cells of a notebook are one, because they share names."""
    if not file.is_file():  # a pipe, to which nobody may ever write
        raise OSError("not a regular file: save its code to one")
    if file.suffix != ".ipynb":
        with tokenize.open(file) as opened:  # by the encoding that the file declares
            text = opened.read()
        return [(None, *one) for one in enumerate(text.split("\n"), 1)], _parse(text)
    notebook = json.loads(file.read_text(encoding="utf-8"))
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook of format 4: it has no list of cells")  # noqa: TRY004 - a file, no argument
    written = [_cell_lines(cell) for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    lines: list[Line] = [(at, *one) for at, cell in enumerate(written, 1) for one in enumerate(cell, 1)]
    return lines, _parse("".join(map(_cell_code, written)))


def _cell_lines(cell: dict[str, object]) -> list[str]:
    source = cell.get("source")
    text = "".join(map(str, source)) if isinstance(source, list) else str(source or "")
    # Not str.splitlines, which also cuts text at form feeds and at separators of Unicode.
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def _cell_code(lines: list[str]) -> str:
    """Return the Python of a cell, with as many lines; nothing where the rest is not Python."""
    code = "".join(f"{_line_of_cell(line)}\n" for line in lines)
    return code if _parses(code) else "\n" * len(lines)


def _line_of_cell(line: str) -> str:
    """Return the Python of a line: a shell command is what IPython makes of it, its other commands ``pass``."""
    if shell := re.match(r"(\s*)(?:\w+\s*=\s*)?!(.+)", line):
        command = re.sub(r"\$(\w+)", r"{\1}", shell[2])
        code = f"get_ipython().system(f{command!r})"  # not every brace is an expression
        return shell[1] + (code if _parses(code) else f"get_ipython().system({command!r})")
    return re.sub(r"^(\s*)[%!?].*|^(\s*)[\w.]+\?+$", r"\1\2pass", line)


def _parses(code: str) -> bool:
    try:
        return bool(_parse(code))
    except SyntaxError:
        return False


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # "\d" in the user's code
        return ast.parse(text)


class Project:
    """Values that names may have in all modules: of functions what they return, of options their defaults."""

    def __init__(self) -> None:
        self.values: dict[str, list[ast.expr]] = defaultdict(list)
        self.parameters: dict[str, list[tuple[Module, ast.arguments]]] = defaultdict(list)  # of functions


class Module:
    """A parsed file of a project. A name may be whatever is assigned to it anywhere in the file."""

    def __init__(self, file: Path, project: Project) -> None:
        self._path, (self._lines, tree) = str(file), _read(file)
        self.nodes, self.project = list(ast.walk(tree)), project
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        parts = tuple(re.sub(r"\W", "_", part) for part in file.absolute().with_suffix("").parts)
        self._package, self._parts = parts[:-1], parts[:-1] if parts[-1] == "__init__" else parts
        self.imported: dict[str, str] = {}
        self.listings: set[ast.Call] = set()  # calls that list checkpoints
        self._values: dict[str, list[ast.expr]] = defaultdict(list)
        self._texts: dict[ast.AST, str] = {}
        for node in self.nodes:
            self._take_import(node)
            for target, value in _bindings(node):
                self.bind(target, value)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                project.parameters[node.name].append((self, node.args))
                for one in ast.walk(node):
                    if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom) and one.value:
                        project.values[node.name].append(one.value)

    def finding(self, kind: str, action: str, node: Any) -> Finding:
        """Return a finding with its place in the file."""
        cell, line, code = self._lines[node.lineno - 1]
        return Finding(self._path, cell, line, kind, action, code.strip())

    def imports(self, other: Module) -> bool:
        """Return whether it imports another module, or something of it."""
        ends = [f"{'.'.join(other._parts[start:])}." for start in range(len(other._parts))]
        return any(f"{dotted}.".startswith(end) for dotted in self.imported.values() for end in ends)

    def set_listings(self, listings: set[ast.Call]) -> None:
        """Note which calls list checkpoints."""
        self.listings = listings
        self._texts.clear()

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what is around a node, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

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
            names = {one.arg for one in [*plain, *taken.kwonlyargs]}
            keywords = [(one, one.value) for one in node.keywords if one.arg in names]
            for parameter, value in [*zip(plain, node.args, strict=False), *keywords]:
                module.bind(parameter, value)

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return the expressions that a name, an attribute or the result of a function may be."""
        name = last_name(node.func if isinstance(node, ast.Call) else node)
        if not isinstance(node, ast.Call) and name in self._values:
            return self._values[name]
        is_of_project = isinstance(node, ast.Call | ast.Attribute) or name in self.imported
        return self.project.values.get(name, []) if is_of_project else []

    def _take_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                self.imported[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            above = self._package[: len(self._package) - node.level + 1] if node.level else ()
            origin = ".".join(filter(None, [*above, node.module]))
            self.imported |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}

    def dotted(self, node: ast.AST, depth: int = 0) -> str:
        """Return the name by which an expression was imported, as ``os.path.join``, or ""; ours is that of Flax."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):  # no recursion: generated code has long ones
            attributes.insert(0, node.attr)
            node = node.value
        base = self._base(node, depth) if depth <= _DEEPEST else ""
        found = ".".join([base, *attributes]) if base else ""
        return API + found[len(OURS) :] if f"{found}.".startswith(f"{OURS}.") else found

    def _base(self, node: ast.AST, depth: int) -> str:
        if isinstance(node, ast.Name):
            if node.id in self.imported or len(values := self.values(node)) != 1:
                return self.imported.get(node.id, "")
            return self.dotted(values[0], depth + 1)
        # getattr(training, "checkpoints"), import_module(".checkpoints", "flax.training"), sys.modules["flax.training"]
        parts = node.args if isinstance(node, ast.Call) else [node.slice] if isinstance(node, ast.Subscript) else []
        texts, giver = list(filter(None, map(text_constant, parts))), last_name(getattr(node, "func", node))
        first = self.dotted(parts[0], depth + 1) if parts and giver in {"partial", "getattr"} else ""
        if giver == "partial" or giver not in _GIVE_MODULES or not texts:
            return first if giver == "partial" else ""
        return "".join(texts[1::-1]) if texts[0].startswith(".") else ".".join(filter(None, [first, texts[0]]))

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
            case ast.BinOp(left=left, op=ast.Mod()):
                return re.sub(r"%\(?[-\w.)]+", UNKNOWN, self.text(left, depth))
            case ast.BinOp(left=left, op=op, right=right):
                return self.text(left, depth) + "/" * isinstance(op, ast.Div) + self.text(right, depth)
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
        if node in self.listings or (dotted or name).rpartition(".")[2] in _OF_CHECKPOINTS:
            return CHECKPOINT
        if name in LISTINGS:
            return LISTED
        parts = [*([node.func.value] if isinstance(node.func, ast.Attribute) and not dotted else []), *node.args]
        first, *others = [self.text(one, depth) for one in parts] or [UNKNOWN]
        if name == "format":
            return re.sub(r"\{[^}]*\}", UNKNOWN, first)
        if name in _JOINS:
            return "/".join([first, *others])
        if name in {"abspath", "resolve", "absolute"}:
            return f"/{first}"
        if name in _SAME or dotted == "shlex.split":
            return first
        given = [one for one in parts if self.text(one, depth) in (CHECKPOINT, LISTED)]
        return self._best([*self.values(node), *given], depth)


def is_other_file(text: str) -> bool:
    """Return whether a text is the name of a file with an ending that checkpoints do not have."""
    return bool(_EXTENSION.search(text.rpartition("/")[2]))


def last_name(node: ast.AST) -> str:
    """Return the last name of an expression, ``exists`` of ``tf.io.gfile.exists``; of an element, its container's."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    return str(getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None) or "")


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
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield target, value
        case ast.Call(func=ast.Attribute(attr=name, value=holder), args=values) if name in _ADDS:
            yield from ((holder, value) for value in values)
        case ast.arguments(posonlyargs=first, args=plain, defaults=defaults, kwonlyargs=named, kw_defaults=others):
            yield from zip([*first, *plain][::-1], defaults[::-1], strict=False)
            yield from ((arg, value) for arg, value in zip(named, others, strict=True) if value)
