"""Where a checkpoint and a target part ways: at one branch, names that are gone and names that are new."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from flax_ckpt_compat._core.tree import Branch, Node, Path
from flax_ckpt_compat._suggest._akin import akin, pair_up
from flax_ckpt_compat._suggest._looks import Look, Roles, fits, items, look


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Gap:
    """The children of one branch that have no counterpart of the same name.

    Attributes:
        path: of the branch, in both trees.
        gone: children of the checkpoint that the target lacks, or has in other shapes.
        new: children of the target that the checkpoint lacks, or has in other shapes.
        common: how many children have a counterpart.
    """

    path: Path
    gone: dict[str, Node]
    new: dict[str, Node]
    common: int


class Prints:
    """Fingerprints of subtrees: equal where names, shapes and kinds of all leaves are, each computed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, int]] = {}

    def of(self, node: Node) -> int:
        """The fingerprint; nodes without children count for nothing."""
        if not isinstance(node, Branch):
            return hash(look(node))
        known = self._known.get(id(node))
        if known is None:
            parts = frozenset((name, self.of(child)) for name, child in node.children.items() if not _is_empty(child))
            known = self._known[id(node)] = (node, hash(parts))
        return known[1]


def _is_empty(node: Node) -> bool:
    return node is None or (isinstance(node, Branch) and all(map(_is_empty, node.children.values())))


def gaps(stored: Node, target: Node, roles: Roles, path: Path = ()) -> Iterator[Gap]:
    """Every gap outside of optimizers' states, the outer ones first."""
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return
    inner: list[str] = []
    gone, new = dict(stored.children), dict(target.children)
    for name in stored.children.keys() & target.children.keys():
        if not _torn(stored.children[name], target.children[name]):
            del gone[name], new[name]
            inner.append(name)
    new = {name: node for name, node in new.items() if not _is_empty(node)}
    gone = {name: node for name, node in gone.items() if not _is_empty(node)}
    if gone or new:
        yield Gap(path, gone, new, len(inner))
    for name in stored.children:
        if name in inner and not roles.is_optimizer((*path, name)):
            yield from gaps(stored.children[name], target.children[name], roles, (*path, name))


def _torn(stored: Node, target: Node) -> bool:
    """True where what has one name in both trees cannot be one thing: its own leaves have other shapes."""
    if not isinstance(stored, Branch) and not isinstance(target, Branch):
        return not fits(look(stored), look(target))
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return not _is_empty(stored) and not _is_empty(target)
    return any(
        not isinstance(child, Branch)
        and name in target.children
        and not isinstance(target.children[name], Branch)
        and not fits(look(child), look(target.children[name]))
        for name, child in stored.children.items()
    )


def _has_arrays(node: Node) -> bool:
    """True where more than numbers and texts are held, which would be taken for each other too easily."""
    return any(shape for shape, _ in items(node).values())


def aligned(gone: dict[str, Node], new: dict[str, Node], prints: Prints) -> list[tuple[str, str]]:
    """(old name, new name) of children that may be the same: equal subtrees first, then those that share most."""
    groups: dict[int, tuple[list[str], list[str]]] = {}
    for side, children in enumerate((gone, new)):
        for name, node in children.items():
            groups.setdefault(prints.of(node), ([], []))[side].append(name)
    pairs = [pair for olds, news in groups.values() if olds and news for pair in pair_up(olds, news)]
    pairs = [(old, name) for old, name in pairs if _has_arrays(gone[old]) or akin(old, name)]
    taken_old, taken_new = {old for old, _ in pairs}, {new_name for _, new_name in pairs}
    rest_old = {name: items(node) for name, node in gone.items() if name not in taken_old}
    rest_new = {name: items(node) for name, node in new.items() if name not in taken_new}
    return pairs + _by_overlap(rest_old, rest_new)


_MAX_PAIRS = 900


def _by_overlap(gone: dict[str, dict[Path, Look]], new: dict[str, dict[Path, Look]]) -> list[tuple[str, str]]:
    if len(gone) * len(new) > _MAX_PAIRS:
        return []
    shared = {
        (old, name): sum(bool(seen[0]) or akin(old, name) for _, seen in old_leaves.items() & new_leaves.items())
        / max(len(new_leaves), 1)
        for old, old_leaves in gone.items()
        for name, new_leaves in new.items()
    }
    pairs: list[tuple[str, str]] = []
    # More shared leaves first; among equals, names alike.
    for (old, name), share in sorted(shared.items(), key=lambda one: (-one[1], one[0][0] != one[0][1])):
        if share > 0 and not any(old == done or name == other for done, other in pairs):
            pairs.append((old, name))
    return [(old, name) for old, name in pairs if old != name]
