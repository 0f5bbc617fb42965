"""List what a program does with checkpoints: the work of ``flax-ckpt scan``."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .api_uses import api_name, api_uses, argument
from .file_uses import FileUses
from .findings import KINDS, Finding
from .module import Index, Module, last_name
from .sources import Source, files_below, read

_OTHER_FRAMEWORKS = {"torch", "pytorch_lightning", "lightning", "keras"}
_SHORTEST = 3  # letters of a prefix


@dataclass(frozen=True)
class ScanReport:
    """Result of a scan."""

    findings: tuple[Finding, ...]  # By file and line
    files: int  # How many files were read
    unreadable: tuple[tuple[str, str], ...]  # Files that are no Python code, with the reason


def scan(paths: Sequence[str | os.PathLike[str]]) -> ScanReport:
    """Find all uses of the legacy API in files and folders, and the code around them that expects one file.

    The code is parsed, never imported or run: ``.py``, ``.ipynb``, and files that are named, whatever their suffix."""
    files = list(dict.fromkeys(file for path in paths for file in files_below(Path(path))))
    index = Index()
    project: list[tuple[Source, Module]] = []
    unreadable: list[tuple[str, str]] = []
    for file in files:
        try:
            source = read(file)
            project.append((source, Module(source.tree, source.path, index)))
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
            unreadable.append((str(file), f"{type(error).__name__}: {error}"))
    modules = [module for _, module in project]
    _follow(modules, index)
    users = [module for module in modules if any(kind != "flag" for kind, _ in api_uses(module))]
    prefixes = _prefixes(users)
    found: list[Finding] = []
    for source, module in project:
        uses = [(kind, KINDS[kind].action, node) for kind, node in api_uses(module)]
        if module in users or (users and _is_near(module, users, prefixes)):
            uses += FileUses(module, prefixes).found()
        placed = {source.finding(kind, action, node) for kind, action, node in uses}
        found += sorted(placed, key=lambda one: (one.cell or 0, one.line, one.kind))
    return ScanReport(tuple(found), len(files), tuple(unreadable))


def _follow(modules: Sequence[Module], index: Index) -> None:
    """Let names of other modules of the project stand for what these import; bind options and arguments of calls."""
    by_name = {module.parts[-1]: module for module in modules}
    functions: dict[str, list[ast.FunctionDef]] = {}
    for module in modules:
        for name, dotted in module.imported.items():
            *_, holder, last = ("", *dotted.split("."))
            if holder in by_name and by_name[holder] is not module:
                other = by_name[holder]
                module.imported[name] = other.imported.get(last, dotted)
                index.bound[id(module.tree), name] = index.bound.get((id(other.tree), last), [])
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Call):
                _bind_call(node, functions, index)
            elif isinstance(node, ast.AnnAssign) and isinstance(index.parents[id(node)], ast.ClassDef) and node.value:
                index.options.setdefault(last_name(node.target), []).append(node.value)


def _bind_call(node: ast.Call, functions: dict[str, list[ast.FunctionDef]], index: Index) -> None:
    name = last_name(node.func)
    if name.startswith("DEFINE_") and len(node.args) > 1:
        index.options.setdefault(str(getattr(node.args[0], "value", "")), []).append(node.args[1])
    elif name in {"add_argument", "option"}:
        default = argument(node, "default", 99)
        for one in node.args:
            if default and isinstance(one, ast.Constant):
                index.options.setdefault(str(one.value).lstrip("-").replace("-", "_"), []).append(default)
    for function in functions.get(name, []) if len(functions.get(name, [])) == 1 else []:
        parameters = [
            one for one in [*function.args.posonlyargs, *function.args.args] if one.arg not in ("self", "cls")
        ]
        for parameter, value in zip(parameters, node.args, strict=False):
            index.bind(parameter, value)
        for keyword in node.keywords:
            for parameter in [*parameters, *function.args.kwonlyargs]:
                if parameter.arg == keyword.arg:
                    index.bind(parameter, keyword.value)


def _prefixes(users: Sequence[Module]) -> set[str]:
    """Return what the names of a project's checkpoints begin with, up to what is unknown."""
    found = {"checkpoint_"}
    for module in users:
        for node in module.nodes:
            if isinstance(node, ast.Call) and (name := api_name(module, node.func)):
                prefix = argument(node, "prefix", 3 if name.startswith(("save", "restore")) else 1)
                text = module.text(prefix).partition("*")[0] if prefix else ""
                found |= {text} if len(text) >= _SHORTEST else set()
    return found


def _is_near(module: Module, users: Sequence[Module], prefixes: Collection[str]) -> bool:
    """Return whether a module is one import away from one that uses the API, or names its checkpoints."""
    imported = {*module.imported.values(), *module.wildcards}
    if {dotted.partition(".")[0] for dotted in imported} & _OTHER_FRAMEWORKS:
        return False
    texts = (node.value for node in module.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(_imports(module, user) or _imports(user, module) for user in users) or any(
        prefix in text for text in texts for prefix in prefixes
    )


def _imports(module: Module, other: Module) -> bool:
    names = [f"{dotted}." for dotted in (*module.imported.values(), *module.wildcards)]
    return any(
        name.startswith(".".join(other.parts[start:]) + ".") for name in names for start in range(len(other.parts))
    )
