"""List what a program does with checkpoints: the work of ``flax-ckpt scan``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .checkpoint_uses import api_name, api_uses, file_uses
from .findings import KINDS, Finding
from .source_modules import SHORTEST, Module, Project, argument, files_below, text_constant

_OTHER_FRAMEWORKS = {"torch", "pytorch_lightning", "lightning", "keras"}


class ScanReport(NamedTuple):
    """Result of a scan."""

    findings: tuple[Finding, ...]  # By file and line
    files: int  # How many files were read
    unreadable: tuple[tuple[str, str], ...]  # Files that are no Python code, with the reason


def scan(paths: Sequence[str | os.PathLike[str]]) -> ScanReport:
    """Find all uses of the legacy API in files and folders, and the code around them that expects one file.

    The code is parsed, never imported or run: ``.py``, ``.ipynb``, and files that are named, whatever their suffix."""
    files = list(dict.fromkeys(file for path in paths for file in files_below(Path(path))))
    project, modules, found, unreadable = Project(), list[Module](), list[Finding](), list[tuple[str, str]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # "\d" in the user's code
        for file in files:
            try:
                modules.append(Module(file, project))
            except (OSError, SyntaxError, ValueError, LookupError, TypeError, RecursionError, MemoryError) as error:
                unreadable.append((str(file), f"{type(error).__name__}: {error}"))
    for module in modules:
        for call in module.calls:
            module.bind_call(call)
    users = [module for module in modules if any(kind != "flag" for kind, _ in api_uses(module))]
    project.prefixes.update(*map(_prefixes, users))
    for module in modules:
        uses = [(kind, KINDS[kind].action, node) for kind, node in api_uses(module)]
        if module in users or (users and _is_near(module, users)):
            uses += file_uses(module)
        found += sorted({module.finding(*use) for use in uses}, key=lambda one: (one.cell or 0, one.line, one.kind))
    return ScanReport(tuple(found), len(files), tuple(unreadable))


def _prefixes(module: Module) -> set[str]:
    """Return what the names of checkpoints begin with, up to what is unknown."""
    named = [(call, name) for call in module.calls if (name := api_name(module, call.func))]
    given = [argument(call, "prefix", 3 if name.startswith(("save", "restore")) else 1) for call, name in named]
    return {text for one in given if one and len(text := module.text(one).partition("*")[0]) >= SHORTEST}


def _is_near(module: Module, users: Sequence[Module]) -> bool:
    """Return whether a module is one import away from one that uses the API, or names its checkpoints."""
    names_one = any(prefix in text for text in map(text_constant, module.nodes) for prefix in module.project.prefixes)
    is_near = names_one or any(user.name in module.reached or module.name in user.reached for user in users)
    return is_near and not _OTHER_FRAMEWORKS.intersection(one.partition(".")[0] for one in module.imported.values())
