"""Scan files and folders of code: Python files, and the code cells of notebooks."""

from __future__ import annotations

import ast
import bisect
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from .api_uses import api_uses
from .binding import Binding
from .checkpoint_names import CheckpointNames
from .conventions import paths_by_spelling
from .evaluation import Evaluation
from .file_uses import FileUses
from .findings import KINDS, NOTHING, Kind
from .modules import Module, Project
from .unfollowed import unfollowed
from .values import texts

_SKIPPED = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "site-packages", "build", "dist"}
_SUFFIXES = {".py", ".ipynb"}


@dataclass(frozen=True)
class _Use:
    """A finding in a module."""

    kind: str
    line: int  # Line of the code, from 1
    column: int  # Column in bytes of UTF-8, from 0, as `ast` counts


@dataclass
class _ModuleScan:
    """The findings of one module."""

    uses: list[_Use]
    lost: list[_Use]  # calls that the scan could not follow
    error: Exception | None = None


@dataclass(frozen=True)
class Finding:
    """One line of code that saves, restores or handles checkpoints."""

    path: str  # File, as it was named or found
    cell: int | None  # Number of the notebook's code cell from 1; None in Python files
    line: int  # Line in the file or cell, from 1
    column: int  # Column in characters, from 0
    kind: str  # Key of `kinds.KINDS`
    code: str  # The line, without its indentation

    @property
    def about(self) -> Kind:
        """Return the description of the kind of finding."""
        return KINDS[self.kind]


@dataclass(frozen=True)
class ScanReport:
    """Result of a scan."""

    findings: tuple[Finding, ...]  # By file and line
    files: int  # How many files were read
    unreadable: tuple[tuple[str, str], ...]  # Files that are no Python code, with the reason
    not_followed: tuple[Finding, ...] = ()  # Calls of which nobody knows what they do to checkpoints, or to what

    @property
    def actions(self) -> tuple[Finding, ...]:
        """Return the findings that ask for a change or a look."""
        return tuple(found for found in self.findings if found.about.action != NOTHING)


@dataclass(frozen=True)
class _Source:
    """A parsed file; the code cells of a notebook are one module, because they share their names."""

    path: str
    text: str
    tree: ast.Module
    cell_starts: tuple[int, ...] = ()  # the lines before each cell
    shown: str = ""  # a notebook's text as it is written, line by line

    def finding(self, use: _Use) -> Finding:
        """Return a use with its place in the file."""
        cell = bisect.bisect_left(self.cell_starts, use.line) or None
        line = use.line - (self.cell_starts[cell - 1] if cell else 0)
        code = self.text.split("\n")[use.line - 1]
        column = len(code.encode()[: use.column].decode())
        shown = self.shown.split("\n")[use.line - 1] if self.shown else code
        return Finding(self.path, cell, line, column, use.kind, shown.strip())


def scan(paths: Sequence[str | os.PathLike[str]]) -> ScanReport:
    """Find all uses of the legacy API in files and folders, and the code around them that expects one file.

    The code is parsed, never imported or run: ``.py``, ``.ipynb``, and files that are named, whatever their suffix."""
    files = list(dict.fromkeys(file for path in paths for file in _files(Path(path))))
    sources: list[_Source] = []
    unreadable: list[tuple[str, str]] = []
    for file in files:
        try:
            sources.append(_read(file))
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
            unreadable.append((str(file), f"{type(error).__name__}: {error}"))
    found: list[Finding] = []
    lost: list[Finding] = []
    for source, scanned in zip(sources, _scan_modules([(one.path, one.tree) for one in sources]), strict=True):
        found += map(source.finding, scanned.uses)
        lost += map(source.finding, scanned.lost)
        if scanned.error:
            unreadable.append((source.path, f"{type(scanned.error).__name__}: {scanned.error}"))
    return ScanReport(tuple(found), len(files), tuple(unreadable), tuple(lost))


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"There is no file or folder {path}")
        yield path
        return
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.endswith(".egg-info"))
        yield from (Path(folder, name) for name in sorted(files) if Path(name).suffix in _SUFFIXES)


def _read(file: Path) -> _Source:
    if not file.is_file():  # a pipe, to which nobody may ever write
        raise OSError("not a regular file: save its code to one")
    if file.suffix == ".ipynb":
        return _read_notebook(file)
    with tokenize.open(file) as opened:  # by the encoding that the file declares
        text = opened.read()
    return _Source(str(file), text, _parse(text))


def _read_notebook(file: Path) -> _Source:
    notebook = json.loads(file.read_text(encoding="utf-8"))
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook of format 4: it has no list of cells")  # noqa: TRY004 - a file, no argument
    written = [_cell_lines(cell) for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    starts = tuple(accumulate(map(len, written), initial=0))[:-1]
    text = "".join(map(_cell_code, written))
    shown = "".join(f"{line}\n" for lines in written for line in lines)
    return _Source(str(file), text, _parse(text), starts, shown)


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


def _scan_modules(trees: Sequence[tuple[str, ast.Module]]) -> list[_ModuleScan]:
    """Return what each module of a project does with checkpoints, in its order.

    If one module uses the legacy API, names like ``checkpoint_{step}`` are checkpoints in the others, too."""
    project = Project([Module(tree, path) for path, tree in trees])
    evaluation = Evaluation(project, CheckpointNames())
    users = [one for one in project.modules if any(kind != "flag" for kind, _ in api_uses(one.nodes, one.names))]
    for module in users:
        evaluation.by_convention[id(module)] = paths_by_spelling(module)
    reached = project.reached(users)
    Binding(evaluation, reached).until_known()
    if users and len(reached) < len(project.modules):
        reached += [one for one in project.modules if one not in reached and _names_one(one.nodes, evaluation.names)]
        Binding(evaluation, reached).until_known()
    return [
        _scan(evaluation, module, is_user=module in users, is_reached=module in reached) for module in project.modules
    ]


def _scan(evaluation: Evaluation, module: Module, *, is_user: bool, is_reached: bool) -> _ModuleScan:
    try:
        uses: list[tuple[str, ast.AST]] = [
            *api_uses(
                module.nodes,
                module.names,
                lambda function: evaluation.dotted(module, function),
                lambda node: texts(evaluation.value(module, node)),
            )
        ]
        lost: list[tuple[str, ast.AST]] = []
        if is_user or (is_reached and not _is_torch(module.nodes)):
            uses += FileUses(evaluation, module).found()
            told = {id(node) for _, node in uses}
            lost += (one for one in unfollowed(evaluation, module) if id(one[1]) not in told)
            uses += [one for one in lost if one[0] == "wrapped"]
        return _ModuleScan(list(_in_order(uses)), [one for one in _in_order(lost) if one.kind != "wrapped"])
    except RecursionError as error:  # the other files are scanned all the same
        return _ModuleScan([], [], error)


def _in_order(found: Sequence[tuple[str, ast.AST]]) -> Iterator[_Use]:
    places = {(node.lineno, node.col_offset, kind) for kind, node in found}  # type: ignore[attr-defined]
    yield from (_Use(kind, line, column) for line, column, kind in sorted(places))


def _names_one(nodes: Sequence[ast.AST], names: CheckpointNames) -> bool:
    """Return whether a text of a module is about checkpoints: it may be a program beside the one that saves them."""
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and names.is_in(node.value) for node in nodes
    )


def _is_torch(nodes: Sequence[ast.AST]) -> bool:
    """Return whether a module imports another framework whose files have such names, too."""
    tops = {alias.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names} | {
        (node.module or "").partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)
    }
    return bool(tops & {"torch", "pytorch_lightning", "lightning", "keras"})
