"""Read Python files and the code cells of notebooks."""

from __future__ import annotations

import ast
import bisect
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

from .findings import Finding

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
