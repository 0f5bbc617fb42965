"""Find rows and stacks of layers, and the rules that convert one layout to another."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.steps import numbered
from flax_ckpt_compat._core.text_formatting import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path
from flax_ckpt_compat._suggest.leaf_features import Contents, Look, SubtreeMemo

_AXES = (0, 1, 2, 3, -1)


@dataclasses.dataclass(frozen=True, slots=True)
class ProposedRule:
    """One proposed rule.

    Attributes:
        rule: see `flax_ckpt_compat.rules`.
        reason: evidence for it, in a few words.
        doubt: evidence against it, if any.
        keeps: key paths below which the target's own values stay, so that it prints as a comment.
    """

    rule: rules.Rule
    reason: str
    doubt: str = ""
    keeps: tuple[Path, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerRow:
    """Siblings numbered without a gap."""

    stem: str  # before the numbers; the name of a list
    is_list: bool  # one branch holds them, by numbers alone
    first: int
    nodes: list[Node]  # in the order of the numbers

    @property
    def names(self) -> list[str]:
        """Return the names of all layers, in order."""
        stem = f"{self.stem}/" if self.is_list else self.stem
        return [f"{stem}{number}" for number in range(self.first, self.first + len(self.nodes))]

    @property
    def siblings(self) -> list[str]:
        """Return the names that the row takes among its siblings."""
        return [self.stem] if self.is_list else self.names


def rows(children: dict[str, Node]) -> list[LayerRow]:
    """Return the rows of two or more layers among the children of a branch."""
    found: dict[tuple[str, bool], dict[int, Node]] = {}
    for name, node in children.items():
        if (counted := numbered(name)) and isinstance(node, Branch):
            found.setdefault((counted[0], False), {})[counted[1]] = node
        if is_list(node) and "/" not in name:
            found[name, True] = {int(number): child for number, child in node.children.items()}
    return [
        LayerRow(stem, listed, min(layers), [layers[number] for number in sorted(layers)])
        for (stem, listed), layers in found.items()
        if len(layers) > 1 and max(layers) - min(layers) == len(layers) - 1
    ]


def is_list(node: Node) -> bool:
    """Return whether a branch holds only branches whose names are numbers."""
    return (
        isinstance(node, Branch)
        and len(node.children) > 1
        and all(name.isdecimal() and isinstance(child, Branch) for name, child in node.children.items())
    )


def renamed(old: LayerRow, new: LayerRow) -> dict[str, str]:
    """Return patterns and replacements for the names of a row, one for each number that changes."""
    if old.first == new.first:
        pattern = rf"{literal(old.stem)}{'/' if old.is_list else ''}(\d+)"
        return {pattern: rf"{plain(new.stem)}{'/' if new.is_list else ''}\1"}
    return {literal(left): plain(right) for left, right in zip(old.names, new.names, strict=True)}


def rename(patterns: dict[str, str], reason: str) -> ProposedRule:
    """Return the step for one or several renames at once."""
    rule = rules.rename(*next(iter(patterns.items()))) if len(patterns) == 1 else rules.rename(patterns)
    return ProposedRule(rule, reason)


def stacked(old: LayerRow, into: str, axis: int, doubt: str) -> list[ProposedRule]:
    """Return the rules that stack a row."""
    stem = old.stem or f"{into.rpartition('/')[2]}_"
    reason = f"{into} has an axis of {len(old.nodes)}, there are {len(old.nodes)} {old.stem}…"
    # Names that are numbers alone may be those of other things, too.
    named = [] if old.stem else [rename(renamed(old, LayerRow(stem, False, old.first, old.nodes)), f"layers of {into}")]
    pattern = rf"{literal(stem)}{'/' if old.is_list else ''}(\d+)"
    more = _axis(axis) | ({"first": old.first} if old.first else {})
    return [*named, ProposedRule(rules.stack(pattern, into, **more), reason, doubt)]


def unstacked(name: str, new: LayerRow, axis: int, doubt: str) -> list[ProposedRule]:
    """Return the rules that unstack a stack into a row."""
    into = f"{new.stem}{'/' if new.is_list else ''}{{}}"
    reason = f"{name} has an axis of {len(new.nodes)}, the target has {len(new.nodes)} {new.stem}…"
    more = _axis(axis) | ({"first": new.first} if new.first else {})
    return [ProposedRule(rules.unstack(literal(name), into, **more), reason, doubt)]


def split_groups(name: str, groups: tuple[int, int]) -> ProposedRule:
    """Return the rule that makes groups of the layers of a stack."""
    reason = f"the target's {name} has {groups[0]} groups of {groups[1]} layers"
    return ProposedRule(rules.split_axis(literal(name), groups), reason)


def merge_groups(name: str, groups: tuple[int, int]) -> ProposedRule:
    """Return the rule that makes one row of the groups of layers of a stack."""
    return ProposedRule(rules.merge_axes(literal(name)), f"{name} has {groups[0]} groups of {groups[1]} layers")


def joined_axes(parts: Sequence[Node], whole: Node, memo: SubtreeMemo) -> dict[int, list[int]]:
    """Return the axes, from the end, on which several subtrees make up another one, with the lengths of the parts."""
    looks = [dict(leaf for leaf in memo.contents(part)) for part in parts]
    joined = dict(leaf for leaf in memo.contents(whole))
    if not joined or any(one.keys() != joined.keys() for one in looks):
        return {}
    found: dict[int, list[int]] = {}
    for axis in (-1, -2):
        lengths = [
            [shape[axis] if len(shape) >= -axis else 0 for shape, _ in (one[name] for one in looks)] for name in joined
        ]
        if all(_is_joined([one[name][0] for one in looks], joined[name][0], axis) for name in joined):
            found[axis] = lengths[0]
    return found


def _is_joined(parts: Sequence[tuple[int, ...]], whole: tuple[int, ...], axis: int) -> bool:
    if any(len(part) != len(whole) or len(part) < -axis for part in parts):
        return False
    rests = {(*part[:axis], *part[len(part) + axis + 1 :]) for part in (*parts, whole)}
    return len(rests) == 1 and sum(part[axis] for part in parts) == whole[axis]


def fused(names: Sequence[str], whole: str, axes: dict[int, list[int]], *, fusing: bool) -> ProposedRule:
    """Return the rule that joins projections, or divides one."""
    axis, lengths = next(iter(axes.items()))
    doubt = f"the parts of {whole} may lie head by head, which the shapes do not tell"
    reason = f"{whole} is as long as {', '.join(names)} together"
    more: dict[str, Any] = {"axis": axis} if axis != -1 else {}
    if fusing:
        return ProposedRule(rules.fuse(list(names), whole, **more), reason, doubt)
    more |= {"sizes": lengths} if len(set(lengths)) > 1 else {}
    return ProposedRule(rules.split(literal(whole), list(names), **more), reason, doubt)


def _axis(axis: int) -> dict[str, int]:
    return {"axis": axis} if axis else {}


def leaves_of_stack(layer: Contents, count: int) -> set[tuple[str, Look]]:
    """Return the leaves that a stack of so many layers can have, on any axis."""
    return set().union(*(_with_axis(layer, count, axis) for axis in _AXES))


def stack_axis(layer: Contents, count: int, whole: Contents) -> tuple[int, str] | None:
    """Return the axis of a subtree that holds the layers of a row, and a doubt if another axis fits."""
    if layer.total() != whole.total():
        return None
    stacks = {axis: _with_axis(layer, count, axis) for axis in _AXES}
    shared = {axis: (stack & whole).total() for axis, stack in stacks.items()}
    best = max(shared.values())
    if best * 2 <= whole.total():
        return None
    axes = [axis for axis in _AXES if shared[axis] == best]
    # Axes on which the stacks are the same are one, as the last one where all arrays have as many.
    ranks = {len(shape) for _, (shape, _) in layer}
    is_clear = len(axes) == 1 or (axes[1:] == [-1] and ranks == {axes[0]})
    return axes[0], "" if is_clear else "the shapes do not tell on which axis the layers lie"


def groupings(count: int) -> Iterator[tuple[int, int]]:
    """Yield the lengths of two axes that make up a number of layers."""
    yield from ((groups, count // groups) for groups in range(2, count // 2 + 1) if count % groups == 0)


def leaves_of_groups(layer: Contents, count: int) -> set[tuple[str, Look]]:
    """Return the leaves that a stack of so many layers can have in groups."""
    return {(name, ((*groups, *shape), kind)) for groups in groupings(count) for name, (shape, kind) in layer}


def groups_of(layer: Contents, count: int, whole: Contents) -> tuple[int, int] | None:
    """Return the lengths of the first two axes of a subtree that holds the layers of a row in groups."""
    # Where the numbers of axes differ, the first axes in common are those of the layers.
    is_clear = len({len(shape) for _, (shape, _) in layer}) > 1
    for groups in groupings(count) if is_clear and layer.total() == whole.total() else ():
        if Counter({(name, ((*groups, *shape), kind)): many for (name, (shape, kind)), many in layer.items()}) == whole:
            return groups
    return None


def _with_axis(layer: Contents, count: int, axis: int) -> Contents:
    """Return the contents of a layer once stacked; an array without that axis matches nothing."""
    result: Contents = Counter()
    for (name, (shape, kind)), many in layer.items():
        at = len(shape) + 1 + axis if axis < 0 else axis
        result[name, ((*shape[:at], count, *shape[at:]), kind if at <= len(shape) else "none")] += many
    return result


def plain(text: str) -> str:
    """Return text escaped for a replacement."""
    return text.replace("\\", r"\\")


def either(names: Iterable[str]) -> str:
    """Return a pattern for one of several names, without a group."""
    return "|".join(sorted(map(literal, names)))
