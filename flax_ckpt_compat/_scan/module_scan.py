"""Scan the modules of a project together: uses of the legacy API, and code that expects a checkpoint to be one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .api_uses import api_uses
from .binding import Binding
from .checkpoint_names import CheckpointNames
from .conventions import paths_by_spelling
from .evaluation import Evaluation
from .file_uses import FileUses
from .modules import Module, Project
from .unfollowed import unfollowed
from .values import texts


@dataclass(frozen=True)
class Use:
    """A finding in a module."""

    kind: str
    line: int  # Line of the code, from 1
    column: int  # Column in bytes of UTF-8, from 0, as `ast` counts


@dataclass
class ModuleScan:
    """The findings of one module."""

    uses: list[Use]
    lost: list[Use]  # calls that the scan could not follow
    error: Exception | None = None


def scan_modules(trees: Sequence[tuple[str, ast.Module]]) -> list[ModuleScan]:
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


def _scan(evaluation: Evaluation, module: Module, *, is_user: bool, is_reached: bool) -> ModuleScan:
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
        return ModuleScan(list(_in_order(uses)), [one for one in _in_order(lost) if one.kind != "wrapped"])
    except RecursionError as error:  # the other files are scanned all the same
        return ModuleScan([], [], error)


def _in_order(found: Sequence[tuple[str, ast.AST]]) -> Iterator[Use]:
    places = {(node.lineno, node.col_offset, kind) for kind, node in found}  # type: ignore[attr-defined]
    yield from (Use(kind, line, column) for line, column, kind in sorted(places))


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
