"""Read Python files and the code cells of notebooks, and say what their names may stand for."""

from __future__ import annotations

import ast
import bisect
import json
import os
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

from .findings import Finding

API = "flax.training.checkpoints"
OURS = "flax_ckpt_compat.checkpoints"
_ADDS = {"append", "appendleft", "add", "insert", "extend", "put", "push", "setdefault"}
_JOINS = {"join", "Path", "PurePath", "PosixPath", "joinpath", "with_name", "glob", "iglob", "rglob"}
_SAME = {"str", "fspath", "expanduser", "sorted", "list", "reversed", "max", "min", "quote", "split", "compile"}
_DEEPEST = 40  # expressions in expressions, and names of names
_UNKNOWN = "*"
_SKIPPED = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "site-packages", "build", "dist"}
_SUFFIXES = {".py", ".ipynb"}


@dataclass(frozen=True)
class Source:
    """A parsed file; the code cells of a notebook are one module, because they share their names."""

    path: str
    lines: list[str]  # as they are written
    tree: ast.Module
    cell_starts: tuple[int, ...] = ()  # the lines before each cell

    def finding(self, kind: str, action: str, node: ast.AST) -> Finding:
        """Return a finding with its place in the file."""
        number: int = node.lineno  # type: ignore[attr-defined]
        cell = bisect.bisect_left(self.cell_starts, number) or None
        line = number - (self.cell_starts[cell - 1] if cell else 0)
        return Finding(self.path, cell, line, kind, action, self.lines[number - 1].strip())


def files_below(path: Path) -> Iterator[Path]:
    """Yield a file, or the Python files and notebooks below a folder."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"There is no file or folder {path}")
        yield path
        return
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.endswith(".egg-info"))
        yield from (Path(folder, name) for name in sorted(files) if Path(name).suffix in _SUFFIXES)


def read(file: Path) -> Source:
    """Parse a file; it is never imported or run."""
    if not file.is_file():  # a pipe, to which nobody may ever write
        raise OSError("not a regular file: save its code to one")
    if file.suffix == ".ipynb":
        return _read_notebook(file)
    with tokenize.open(file) as opened:  # by the encoding that the file declares
        text = opened.read()
    return Source(str(file), text.split("\n"), _parse(text))


def _read_notebook(file: Path) -> Source:
    notebook = json.loads(file.read_text(encoding="utf-8"))
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook of format 4: it has no list of cells")  # noqa: TRY004 - a file, no argument
    written = [_cell_lines(cell) for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    starts = tuple(accumulate(map(len, written), initial=0))[:-1]
    return Source(str(file), list(chain(*written)), _parse("".join(map(_cell_code, written))), starts)


def _cell_lines(cell: dict[str, object]) -> list[str]:
    source = cell.get("source")
    text = "".join(map(str, source)) if isinstance(source, list) else str(source or "")
    # Not str.splitlines, which also cuts text at form feeds and at separators of Unicode.
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def _cell_code(lines: list[str]) -> str:
    """Return the Python of a cell, with as many lines; nothing where the rest is not Python."""
    code = "".join(f"{_line_of_cell(line)}\n" for line in lines)
    try:
        _parse(code)
    except SyntaxError:
        return "\n" * len(lines)
    return code


def _line_of_cell(line: str) -> str:
    """Return the Python of a line: a shell command is what IPython makes of it, its other commands ``pass``."""
    shell = re.match(r"(\s*)(?:\w+\s*=\s*)?!(.+)", line)
    if shell:
        command = re.sub(r"\$(\w+)", r"{\1}", shell[2])
        for prefix in ("f", ""):  # not every brace is an expression
            code = f"get_ipython().system({prefix}{command!r})"
            try:
                ast.parse(code)
            except SyntaxError:
                continue
            return shell[1] + code
    return re.sub(r"^(\s*)[%!?].*|^(\s*)[\w.]+\?+$", r"\1\2pass", line)


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # "\d" in the user's code
        return ast.parse(text)


class Project:
    """Values that names may have in all modules: of functions what they return, of options their defaults."""

    def __init__(self) -> None:
        self.values: dict[str, list[ast.expr]] = defaultdict(list)
        self.imported: dict[str, str] = {}  # by the name of a module and a name in it
        self.parameters: dict[str, list[tuple[Module, ast.arguments]]] = defaultdict(list)  # of functions


class Module:
    """A parsed file of a project. A name may be whatever is assigned to it anywhere in the file."""

    def __init__(self, source: Source, project: Project) -> None:
        self.source, self.nodes, self.project = source, list(ast.walk(source.tree)), project
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        file = Path(source.path).absolute().with_suffix("")
        parts = tuple(re.sub(r"\W", "_", part) for part in file.parts)
        self.parts = parts[:-1] if file.name == "__init__" else parts
        self.imported: dict[str, str] = {}
        self.wildcards: set[str] = set()
        self._values: dict[str, list[ast.expr]] = defaultdict(list)
        self._texts: dict[ast.AST, str] = {}
        for node in self.nodes:
            self._take_import(node, parts[:-1])
            for target, value in _bindings(node):
                self.bind(target, value)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                project.parameters[node.name].append((self, node.args))
                for one in ast.walk(node):
                    if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom) and one.value:
                        project.values[node.name].append(one.value)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what is around a node, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def bind(self, target: ast.AST, value: ast.expr) -> None:
        """Note that a name, attribute or parameter may have a value; a container is what its elements are."""
        if isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple) else []
            for at, one in enumerate(target.elts):
                self.bind(one, values[at] if len(values) == len(target.elts) else value)
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
            for parameter, value in zip(plain, node.args, strict=False):
                module.bind(parameter, value)
            for keyword in node.keywords:
                if keyword.arg in {one.arg for one in [*plain, *taken.kwonlyargs]}:
                    module.bind(keyword, keyword.value)

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return the expressions that a name, an attribute or the result of a function may be."""
        name = last_name(node.func if isinstance(node, ast.Call) else node)
        if not isinstance(node, ast.Call) and name in self._values:
            return self._values[name]
        is_of_project = isinstance(node, ast.Call | ast.Attribute) or name in self.imported
        return self.project.values.get(name, []) if is_of_project else []

    def _take_import(self, node: ast.AST, package: tuple[str, ...]) -> None:
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
                    self.project.imported[f"{self.parts[-1]}.{alias.asname or alias.name}"] = f"{origin}.{alias.name}"

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
            if name := self.imported.get(node.id):
                return self.project.imported.get(".".join(name.split(".")[-2:]), name)
            if "flax.training" in self.wildcards and node.id == "checkpoints":
                return API
            if len(values := self.values(node)) == 1:
                return self.dotted(values[0], depth + 1)
            return f"{API}.{node.id}" if self.wildcards & {API, OURS} else ""
        if isinstance(node, ast.Subscript) and self.dotted(node.value, depth + 1) == "sys.modules":
            return text_constant(node.slice)
        if not isinstance(node, ast.Call) or not node.args:
            return ""
        name, texts = last_name(node.func), [text for one in node.args if (text := text_constant(one))]
        if name in {"import_module", "__import__"} and texts:
            return texts[1] + texts[0] if texts[0].startswith(".") and len(texts) > 1 else texts[0]
        base = self.dotted(node.args[0], depth + 1) if name in {"getattr", "partial"} else ""
        return f"{base}.{texts[0]}" if name == "getattr" and texts and base else base

    def text(self, node: ast.AST | None, depth: int = 0) -> str:
        """Return the text that an expression may be, with ``*`` for unknown parts."""
        if node is None or depth > _DEEPEST:
            return _UNKNOWN
        if node not in self._texts:
            self._texts[node] = _UNKNOWN  # where the text depends on itself
            self._texts[node] = self._text(node, depth)
        return self._texts[node]

    def _text(self, node: ast.AST, depth: int) -> str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else _UNKNOWN
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part, depth + 1) for part in node.values)
        if isinstance(node, ast.FormattedValue) or (isinstance(node, ast.Attribute) and node.attr in {"name", "path"}):
            return self.text(node.value, depth + 1)
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and node.elts:
            return self.text(node.elts[0], depth + 1)
        if isinstance(node, ast.BinOp):
            left, joint = self.text(node.left, depth + 1), "/" * isinstance(node.op, ast.Div)
            is_formatting = isinstance(node.op, ast.Mod)
            right = "" if is_formatting else self.text(node.right, depth + 1)
            return re.sub(r"%\(?[-\w.)]+", _UNKNOWN, left) if is_formatting else left + joint + right
        if isinstance(node, ast.Call):
            return self._text_of_call(node, depth + 1)
        known = (self.text(value, depth + 1) for value in self.values(node))
        return next((text for text in known if text != _UNKNOWN), _UNKNOWN)

    def _text_of_call(self, node: ast.Call, depth: int) -> str:
        name, receiver = last_name(node.func), getattr(node.func, "value", None)
        is_method = isinstance(node.func, ast.Attribute) and not self.dotted(node.func)
        parts = [self.text(one, depth) for one in [*[receiver] * is_method, *node.args]]
        if name == "format":
            return re.sub(r"\{[^}]*\}", _UNKNOWN, parts[0])
        if name == "join" and isinstance(receiver, ast.Constant) and isinstance(node.args[0], ast.List | ast.Tuple):
            return parts[0].join(self.text(one, depth) for one in node.args[0].elts)
        if name in _JOINS:
            return "/".join(parts)
        if name == "with_suffix":
            return "".join(parts)
        if name in {"abspath", "resolve", "absolute"}:
            return f"/{parts[0]}"
        return parts[0] if parts and name in _SAME and not (is_method and name == "split") else _UNKNOWN


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


def _bindings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield what a node binds, as (target, value); what is added to a container counts as its value."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case (
            ast.AnnAssign(target=ast.expr() as target, value=ast.expr() as value)
            | ast.NamedExpr(target=ast.expr() as target, value=ast.expr() as value)
            | ast.For(target=ast.expr() as target, iter=ast.expr() as value)
            | ast.AsyncFor(target=ast.expr() as target, iter=ast.expr() as value)
            | ast.comprehension(target=ast.expr() as target, iter=ast.expr() as value)
            | ast.withitem(optional_vars=ast.expr() as target, context_expr=ast.expr() as value)
        ):
            yield target, value
        case ast.Call(func=ast.Attribute(attr="heappush"), args=[holder, value]):
            yield holder, value
        case ast.Call(func=ast.Attribute(attr=name, value=holder), args=values) if name in _ADDS:
            yield from ((holder, value) for value in values)
        case ast.arguments(posonlyargs=first, args=plain, defaults=defaults, kwonlyargs=named, kw_defaults=others):
            yield from zip([*first, *plain][::-1], defaults[::-1], strict=False)
            yield from ((arg, value) for arg, value in zip(named, others, strict=True) if value)
