"""Rows: numbered siblings, lists and stacks, and the rules that lead from one form to another."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.template import literal
from flax_ckpt_compat._core.tree import Branch, Node
from flax_ckpt_compat._suggest._akin import akin, numbered
from flax_ckpt_compat._suggest._looks import Contents, Look

_AXES = (0, 1, 2, 3, -1)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One proposed rule.

    Attributes:
        rule: see `flax_ckpt_compat.rules`.
        reason: what speaks for it, in a few words.
        doubt: what speaks against it, if anything.
    """

    rule: rules.Rule
    reason: str
    doubt: str = ""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Siblings that are numbered without a gap.

    Attributes:
        stem: text before the numbers; of a list its name.
        is_list: one branch holds them, by numbers alone.
        first: the lowest number.
        nodes: in the order of the numbers.
    """

    stem: str
    is_list: bool
    first: int
    nodes: list[Node]

    def name(self, number: int) -> str:
        """Return the name, or names, of the layer with a number."""
        return f"{self.stem}/{number}" if self.is_list else f"{self.stem}{number}"

    @property
    def names(self) -> list[str]:
        """The names of all layers, in their order."""
        return [self.name(number) for number in range(self.first, self.first + len(self.nodes))]

    @property
    def siblings(self) -> list[str]:
        """The names that the row takes among its siblings."""
        return [self.stem] if self.is_list else self.names


def rows(children: dict[str, Node]) -> list[Row]:
    """Return the rows of two or more layers among the children of a branch."""
    found: dict[str, dict[int, Node]] = {}
    lists = []
    for name, node in children.items():
        if (counted := numbered(name)) and isinstance(node, Branch):
            found.setdefault(counted[0], {})[counted[1]] = node
        if isinstance(node, Branch) and is_list(node) and "/" not in name:
            inner = {int(number): child for number, child in node.children.items()}
            lists.append(_row(name, True, inner))
    return [row for row in (*(_row(stem, False, layers) for stem, layers in found.items()), *lists) if row]


def is_list(node: Node) -> bool:
    """Return whether a branch holds branches by numbers alone."""
    return (
        isinstance(node, Branch)
        and len(node.children) > 1
        and all(name.isdecimal() and isinstance(child, Branch) for name, child in node.children.items())
    )


def _row(stem: str, listed: bool, layers: dict[int, Node]) -> Row | None:
    first = min(layers)
    if len(layers) < 2 or layers.keys() != set(range(first, first + len(layers))):
        return None
    return Row(stem, listed, first, [layers[number] for number in sorted(layers)])


def renumbered(old: Row, new: Row) -> list[Step]:
    """Return the renames from one row to one of other names or numbers."""
    reason = f"both are rows of {len(old.nodes)} equal layers"
    if old.first == new.first:
        pattern = rf"{re.escape(old.stem)}{'/' if old.is_list else ''}(\d+)"
        return [Step(rules.rename(pattern, rf"{_plain(new.stem)}{'/' if new.is_list else ''}\1"), reason)]
    names = list(zip(old.names, new.names, strict=True))
    # The free name first, so that none is taken twice.
    return [
        Step(rules.rename(re.escape(left), _plain(right)), f"{reason}, numbered from {new.first}")
        for left, right in (reversed(names) if new.first > old.first else names)
    ]


def stacked(old: Row, into: str, axis: int, doubt: str = "") -> list[Step]:
    """Return the rules that stack a row."""
    stem = f"{into.rpartition('/')[2]}_" if old.is_list or not old.stem else old.stem
    plain = Row(stem, False, 0, old.nodes)
    before = renumbered(old, plain) if old.is_list or old.first else []
    extra = {"axis": axis} if axis else {}
    reason = f"{into} has an axis of {len(old.nodes)}, there are {len(old.nodes)} {old.stem}…"
    return [*before, Step(rules.stack(rf"{re.escape(stem)}(\d+)", into, **extra), reason, doubt)]


def unstacked(name: str, new: Row, axis: int, doubt: str = "") -> list[Step]:
    """Return the rules that make a row of a stack."""
    from_0 = dataclasses.replace(new, first=0)
    extra = {"axis": axis} if axis else {}
    into = f"{new.stem}/{{}}" if new.is_list else f"{new.stem}{{}}"
    reason = f"{name} has an axis of {len(new.nodes)}, the target has {len(new.nodes)} {new.stem}…"
    after = renumbered(from_0, new) if new.first else []
    return [Step(rules.unstack(literal(name), into, **extra), reason, doubt), *after]


def restacked(old: str, new: str, axes: tuple[int, int]) -> list[Step]:
    """Return the rules that put the layers of a stack on another axis."""
    reason = f"the layers lie on axis {axes[0]} of {old}, on axis {axes[1]} of the target's {new}"
    stem = f"{new.rpartition('/')[2]}_"
    extra = [{"axis": axis} if axis else {} for axis in axes]
    return [
        Step(rules.unstack(literal(old), f"{stem}{{}}", **extra[0]), reason),
        Step(rules.stack(rf"{re.escape(stem)}(\d+)", new, **extra[1]), reason),
    ]


def stack_axis(layer: Contents, count: int, whole: Contents) -> tuple[int, str] | None:
    """Return the axis on which a subtree has the layers of a row, and a doubt where there may be another."""
    if layer.total() != whole.total():
        return None
    shared = {axis: (with_axis(layer, count, axis) & whole).total() for axis in _AXES}
    best = max(shared.values())
    if best * 2 <= whole.total():
        return None
    axes = [axis for axis in _AXES if shared[axis] == best]
    same = {frozenset(with_axis(layer, count, axis).items()) for axis in axes}
    # The last axis is none of its own where all arrays have as many.
    told = len(axes) == 1 or (axes[-1] == -1 and len(axes) == 2 and _one_rank(layer) == axes[0])
    return axes[0], "" if told or not same else "the shapes do not tell on which axis the layers lie"


def _one_rank(layer: Contents) -> int:
    ranks = {len(shape) for _, (shape, _) in layer}
    return ranks.pop() if len(ranks) == 1 else -1


def moved_axis(old: Contents, new: Contents) -> tuple[int, int] | None:
    """Return the axes of the layers in two stacks of the same layers, if no others are possible."""
    if old.total() != new.total() or old == new:
        return None
    found = []
    for before in (0, 1):
        after = 1 - before
        counts = {shape[before] for _, (shape, _) in old if len(shape) > before}
        if len(counts) != 1 or any(len(shape) <= before for _, (shape, _) in old):
            continue
        count = counts.pop()
        if count > 1 and with_axis(_without_axis(old, before), count, after) == new:
            found.append((before, after))
    return found[0] if len(found) == 1 else None


def with_axis(layer: Contents, count: int, axis: int) -> Contents:
    """Return the contents of a layer as they are stacked."""
    result: Contents = Counter()
    for (name, (shape, kind)), many in layer.items():
        at = len(shape) + 1 + axis if axis < 0 else axis
        look: Look = ((*shape[:at], count, *shape[at:]), kind)
        # An axis that an array cannot have makes it unlike any.
        result[name, look if at <= len(shape) else ((), "none")] += many
    return result


def _without_axis(whole: Contents, axis: int) -> Contents:
    result: Contents = Counter()
    for (name, (shape, kind)), many in whole.items():
        result[name, ((*shape[:axis], *shape[axis + 1 :]), kind)] += many
    return result


def nearest(name: str, names: list[str]) -> str:
    """Return the name that is most like another."""
    return next((one for one in names if one == name), next((one for one in names if akin(one, name)), names[0]))


def _plain(text: str) -> str:
    return text.replace("\\", r"\\")
