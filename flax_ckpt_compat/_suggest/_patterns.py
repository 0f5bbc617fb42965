"""Patterns for all changes of one kind, with as many names as tell them from names that stay."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.template import literal
from flax_ckpt_compat._core.tree import Node, Path, iter_branches
from flax_ckpt_compat._suggest._akin import numbered
from flax_ckpt_compat._suggest._looks import MOMENTS, Roles
from flax_ckpt_compat._suggest._rows import Step


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A child, or a row of them, that has another name in the target.

    Attributes:
        path: of the branch, in both trees.
        old: names of the children.
        pattern: for them, and their replacement.
        reason: what speaks for it.
    """

    path: Path
    old: tuple[str, ...]
    pattern: tuple[str, str]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Wrap:
    """A level that the target has more.

    Attributes:
        path: of the branch that is one level deeper.
        name: of the level; perhaps several.
        held: names of the children that are below it.
        few: whether only those go there, and not all that the branch holds.
        moments: names of the optimizers' branches that hold the same children.
        reason: what speaks for it.
    """

    path: Path
    name: str
    held: tuple[str, ...]
    few: bool
    moments: set[str]
    reason: str


def _free_first(changes: list[Change]) -> list[Change]:
    """Return the changes in an order in which no name is taken before it is free; circles come last."""
    done: list[Change] = []
    while changes:
        taken = {(change.path, name) for change in changes for name in change.old}
        free = [one for one in changes if (one.path, one.pattern[1]) not in taken or one.pattern[1] in one.old]
        if not free:
            break
        done += free
        chosen = set(map(id, free))
        changes = [one for one in changes if id(one) not in chosen]
    return done + changes


def plain(text: str) -> str:
    return text.replace("\\", r"\\")


def wrapped(wraps: list[Wrap]) -> list[Step]:
    """Return the steps for one level that was added in several branches."""
    to = plain(wraps[0].name)
    if all(one.few for one in wraps):
        held = {name for one in wraps for name in one.held}
        return [Step(rules.rename(either(held), rf"{to}/\1"), wraps[0].reason)]
    steps = []
    for one in wraps:
        at = {"at": literal("/".join(one.path))} if one.path else {}
        steps.append(Step(rules.wrap(one.name, **at), one.reason))
    if moments := set().union(*(one.moments for one in wraps)):
        steps.append(Step(rules.rename(either(moments), rf"\1/{to}"), "the optimizer's state of it"))
    return steps


def either(names: Iterable[str]) -> str:
    return f"({'|'.join(sorted(map(re.escape, names)))})"


def renames(changes: list[Change], stored: Node, own: Roles) -> list[Step]:
    """Return one rename for all changes of one kind, with the names before it where others have that name, too."""
    concerned = {name for change in changes for name in change.old}
    places: dict[str, set[Path]] = {}
    for path, branch in iter_branches(stored):
        for name in branch.children.keys() & concerned:
            places.setdefault(name, set()).add(path)
    homes: dict[tuple[str, str], set[Path]] = {}
    for change in changes:
        homes.setdefault(change.pattern, set()).add(change.path)
    steps: dict[str, tuple[Step, int]] = {}
    for change in _free_first(changes):
        everywhere = {path for name in change.old for path in places[name]}
        moments = {path for path in everywhere if own.is_optimizer(path) and not own.is_optimizer(change.path)}
        pattern = _qualified(change, homes[change.pattern], everywhere - moments, moments)
        step = Step(rules.rename(*pattern), change.reason)
        steps.setdefault(step.rule.source, (step, len(change.path)))
    return [step for step, _ in sorted(steps.values(), key=lambda one: one[1])]


def _qualified(change: Change, homes: set[Path], places: set[Path], moments: set[Path]) -> tuple[str, str]:
    """Return a pattern and its replacement, with as many names before it as tell it from names that stay."""
    pattern, replacement = change.pattern
    path, strangers = change.path, places - homes
    if not strangers:
        return pattern, replacement
    if not path:
        return f"^{pattern}", replacement
    alike = [home for home in homes if _unnumbered(home) == _unnumbered(path)]
    shown = [_counted(name) if len(alike) > 1 else re.escape(name) for name in path]
    for count in range(1, len(path)):
        if not any(_unnumbered(other)[-count:] == _unnumbered(path)[-count:] for other in strangers):
            before = "/".join(shown[-count:])
            break
    else:
        size = len(path)
        above = {one[-size] for one in moments if one[len(one) - size + 1 :] == path[1:] and len(one) >= size}
        above = {path[0]} | (above & MOMENTS)
        before = "/".join([either(above) if len(above) > 1 else re.escape(path[0]), *shown[1:]])
        if "\\d+" not in before and len(above) > 1:
            shifted = replacement.replace(r"\1", r"\2")
            return f"{before}/{pattern}", "/".join([r"\1", *map(plain, path[1:]), shifted])
        before = before.replace("(", "(?:", 1) if len(above) > 1 else before
    if "\\d+" in before or "(" in before:
        return f"({before})/{pattern}", rf"\1/{replacement.replace(chr(92) + '1', chr(92) + '2')}"
    return f"{before}/{pattern}", f"{_plain_path(path, before)}/{replacement}"


def _plain_path(path: Path, before: str) -> str:
    """Return as many names of a path as a pattern has, for a replacement."""
    return plain("/".join(path[len(path) - 1 - before.count("/") :]))


def _unnumbered(path: Path) -> Path:
    return tuple(found[0] + "#" if (found := numbered(name)) else name for name in path)


def _counted(name: str) -> str:
    found = numbered(name)
    return rf"{re.escape(found[0])}\d+" if found else re.escape(name)
