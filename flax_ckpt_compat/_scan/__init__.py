"""List what a program does with checkpoints: the work of ``flax-ckpt scan``."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .checkpoint_uses import FileUses, api_name, api_uses
from .findings import KINDS, Finding
from .source_modules import Module, Project, argument, files_below

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
    project, modules = Project(), list[Module]()
    unreadable: list[tuple[str, str]] = []
    for file in files:
        try:
            modules.append(Module(file, project))
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
            unreadable.append((str(file), f"{type(error).__name__}: {error}"))
    for module in modules:
        for call in module.calls:
            module.bind_call(call)
    users = [module for module in modules if any(kind != "flag" for kind, _ in api_uses(module))]
    prefixes = {"checkpoint_"}.union(*map(_prefixes, users))
    found: list[Finding] = []
    for module in modules:
        uses = [(kind, KINDS[kind].action, node) for kind, node in api_uses(module)]
        if module in users or (users and _is_near(module, users, prefixes)):
            uses += FileUses(module, prefixes).found()
        placed = {module.finding(kind, action, node) for kind, action, node in uses}
        found += sorted(placed, key=lambda one: (one.cell or 0, one.line, one.kind))
    return ScanReport(tuple(found), len(files), tuple(unreadable))


def _prefixes(module: Module) -> set[str]:
    """Return what the names of checkpoints begin with, up to what is unknown."""
    named = [(call, name) for call in module.calls if (name := api_name(module, call.func))]
    given = [argument(call, "prefix", 3 if name.startswith(("save", "restore")) else 1) for call, name in named]
    texts = [module.text(one).partition("*")[0] for one in given if one]
    return {text for text in texts if len(text) >= _SHORTEST}


def _is_near(module: Module, users: Sequence[Module], prefixes: Collection[str]) -> bool:
    """Return whether a module is one import away from one that uses the API, or names its checkpoints."""
    if {dotted.partition(".")[0] for dotted in module.imported.values()} & _OTHER_FRAMEWORKS:
        return False
    texts = [node.value for node in module.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names_one = any(prefix in text for text in texts for prefix in prefixes)
    return names_one or any(module.imports(user) or user.imports(module) for user in users)
