"""What a proposal does to each leaf of the checkpoint and of the target."""

from __future__ import annotations

import dataclasses

from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.tree import Node, Path, iter_leaves
from flax_ckpt_compat._suggest._looks import EMPTY, KEPT, Look, Roles, fits, flatten, look
from flax_ckpt_compat._trees.leaf_sources import handles_of


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a proposal does.

    Attributes:
        pairs: target path → path of the stored leaf it gets, or of the first one it is made of.
        kept: target path → look of the leaves that stay as the target has them.
        unused: stored path → look of the leaves that nothing is made of.
        stored: stored path → look.
        goal: target path → look.
        had: roles in the checkpoint.
        has: roles in the target.
    """

    pairs: dict[Path, Path]
    kept: dict[Path, Look]
    unused: dict[Path, Look]
    stored: dict[Path, Look]
    goal: dict[Path, Look]
    had: Roles
    has: Roles


def outcome_of(stored: Node, target: Node, tree: Node) -> Outcome:
    """Return what each leaf becomes once rules made ``tree`` of the checkpoint."""
    goal = flatten(target)
    result = Outcome({}, {}, unused(stored, tree, goal), flatten(stored), goal, Roles(stored), Roles(target))
    for path, leaf in iter_leaves(tree):
        if path not in goal or goal[path] == EMPTY:
            continue
        if look(leaf) == KEPT:
            result.kept[path] = goal[path]
        elif handles := handles_of(leaf):
            source = _row(handles[0].path, handles[1].path) if len(handles) > 1 else handles[0].path
            result.pairs[path] = source
            result.stored.setdefault(source, look(handles[0]))
    return result


def _row(one: Path, other: Path) -> Path:
    """Return the key path of a row of layers: without the numbers in which two of them differ."""
    return tuple(left if left == right else left.rstrip("0123456789") for left, right in zip(one, other, strict=False))


def unused(stored: Node, tree: Node, goal: dict[Path, Look]) -> dict[Path, Look]:
    """Key path → look of the stored leaves that no leaf of the target is made of."""
    used = {
        id(handle)
        for path, leaf in iter_leaves(tree)
        if path in goal
        for handle in handles_of(leaf)
        if fits(look(leaf), goal[path])
    }
    return {
        path: look(leaf) for path, leaf in iter_leaves(stored) if isinstance(leaf, LeafHandle) and id(leaf) not in used
    }
