"""Change trees: give leaves other paths, replace nodes, change matching leaves and branches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from flax_ckpt_compat._core.errors import NameCollisionError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import (
    Branch,
    Container,
    Node,
    Path,
    from_leaves,
    iter_leaves,
    map_leaves,
    node_at,
    show_path,
)
from flax_ckpt_compat._trees.leaf_sources import Own
from flax_ckpt_compat.rules import _patterns
from flax_ckpt_compat.rules._rule import Apply, RuleError
from flax_ckpt_compat.rules._states import is_empty


def remap(stored: Node, new_paths: Callable[[Path], Iterable[Path]]) -> Node:
    """Give every leaf new key paths, or none to drop it; containers whose children keep their names keep their type."""
    leaves: dict[Path, Node] = {}
    origins: dict[Path, Path] = {}
    for old, leaf in iter_leaves(stored):
        for new in new_paths(old):
            # What an earlier rule left to the target is no value, and gives way.
            if leaf is Own.KEEP_TARGET and new in leaves:
                continue
            if leaves.get(new) is Own.KEEP_TARGET:
                del leaves[new]
            if new in leaves:
                first, second = show_path(origins[new]), show_path(old)
                raise _collision(f"{first} and {second} would both be called {show_path(new)}", show_path(new))
            leaves[new], origins[new] = leaf, old
    try:
        tree = _built(leaves, stored)
    except NameCollisionError as error:
        raise _collision(str(error), error.leaf) from None
    _take_containers(tree, stored, origins)
    return tree


def _built(leaves: dict[Path, Node], like: Node) -> Node:
    """Build a tree; None and empty containers, which hold no values, give way to what is put below them."""
    try:
        return from_leaves(leaves, like=like)
    except NameCollisionError:
        above = {path[:end] for path in leaves for end in range(len(path))}
        empty = {path for path in above if is_empty(leaves.get(path, Own.KEEP_TARGET))}
        return from_leaves({path: leaf for path, leaf in leaves.items() if path not in empty}, like=like)


def moved(stored: Node, ends: Mapping[Path, Path], *, stays: bool = False, drops_rest: bool = False) -> Node:
    """Give every leaf at or below some key paths another beginning of its own; if it ``stays``, add a copy there."""

    def new_paths(path: Path) -> list[Path]:
        start = prefix_in(path, ends)
        if start is None:
            return [] if drops_rest else [path]
        end = ends[start] + path[len(start) :]
        return [path, end] if stays else [end]

    return remap(stored, new_paths)


def _collision(problem: str, leaf: str | None) -> RuleError:
    return RuleError(f"{problem}; drop or move one of them first", leaf=leaf, kind=NameCollisionError)


def prefix_in(path: Path, places: Collection[Path]) -> Path | None:
    """Return the shortest beginning of a key path that is among the places, or None."""
    return next((path[:end] for end in range(len(path) + 1) if path[:end] in places), None)


def put(stored: Node, path: Path, node: Node, *, depth: int = 0) -> Node:
    """Return a tree with a node replaced; ``stored`` is its subtree below the first ``depth`` names of the path."""
    if depth == len(path):
        return node
    if stored is not None and not isinstance(stored, Branch):
        leaf, inner = show_path(path[:depth]), show_path(path)
        raise RuleError(f"stored {leaf} is a leaf, but {inner} lies below; move or drop it first", leaf=leaf)
    was = Branch({}) if stored is None else stored
    child = put(was.children.get(path[depth]), path, node, depth=depth + 1)
    return Branch({**was.children, path[depth]: child}, was.container, was.int_keys, was.type_name)


def each_leaf(pattern: str, change: Callable[[Any, Path, Node], Node], needed: str = "leaf") -> Apply:
    """Return the `apply` of a rule that changes every leaf whose key path has a match; other leaves stay.

    ``change`` takes leaf, key path and target, and returns the new leaf, or None to leave it as it is and not count it.
    ``needed`` is a noun for the required match."""
    names = [_patterns.whole_names(pattern)]

    def apply(stored: Node, target: Node) -> Node:
        found = False
        others: list[str] = []

        def changed(path: Path, leaf: Any) -> Node:
            nonlocal found
            if not any(_patterns.matches(names, path)):
                return leaf
            new = change(leaf, path, target)
            found = found or new is not None
            if new is None:
                others.append(show_path(path))
            return leaf if new is None else new

        tree = map_leaves(changed, stored)
        if not found:
            why = f"{one_line(others)} is none" if others else _patterns.near_names(pattern, stored)
            raise RuleError(f"matches no {needed} in the checkpoint (patterns match whole names of a key path); {why}")
        return tree

    return apply


def _take_containers(tree: Node, stored: Node, origins: dict[Path, Path]) -> None:
    """Restore the container types of branches that moved as a whole."""
    done: set[Path] = set()
    for new, old in origins.items():
        while new and old and new[-1] == old[-1]:
            new, old = new[:-1], old[:-1]
            if new in done:
                break
            done.add(new)
            branch, was = node_at(tree, new), node_at(stored, old)
            if branch.container is Container.DICT and branch.children.keys() == was.children.keys():
                branch.container, branch.int_keys = was.container, was.int_keys


def each_branch(change: Callable[[Branch, Path], Branch | None], *, near: str) -> Apply:
    """Return the `apply` of a rule that changes every branch for which ``change`` returns one, inner ones first."""

    def apply(stored: Node, _: Node) -> Node:
        found = False

        def visit(node: Node, path: Path) -> Node:
            nonlocal found
            if not isinstance(node, Branch):
                return node
            children = {name: visit(child, (*path, name)) for name, child in node.children.items()}
            branch = Branch(children, node.container, node.int_keys, node.type_name)
            changed = change(branch, path)
            found = found or changed is not None
            return branch if changed is None else changed

        tree = visit(stored, ())
        if not found:
            raise RuleError(f"matches nothing in the checkpoint; {_patterns.near_names(near, stored)}")
        return tree

    return apply


def replaced(branch: Branch, path: Path, old: Sequence[Path], new: Sequence[tuple[Path, Node]]) -> Branch:
    """Return a branch with nodes below it replaced by (path below it, node) each, where the first old one was."""
    result = Branch({})
    for name, child in branch.children.items():
        inside = [at for at in old if at[0] == name]
        if inside and inside[0] == old[0]:
            for at, node in new:
                _put(result, at, node, path)
        kept = _without(child, [at[1:] for at in inside])
        if kept is not None or not inside:
            _put(result, (name,), kept, path)
    return result


def _without(node: Node, old: Sequence[Path]) -> Node:
    """Return a node without the paths ``old`` below it; None if nothing is left."""
    if () in old:
        return None
    if not old or not isinstance(node, Branch):
        return node
    children = {}
    for name, child in node.children.items():
        inside = [at[1:] for at in old if at[0] == name]
        if (kept := _without(child, inside)) is not None or not inside:
            children[name] = kept
    return Branch(children) if children else None


def _put(branch: Branch, at: Path, node: Node, path: Path) -> None:
    """Put a node below a branch, merging subtrees."""
    name = at[0]
    for inner in reversed(at[1:]):
        node = Branch({inner: node})
    present = branch.children.get(name)
    if name not in branch.children:
        branch.children[name] = node
    elif isinstance(present, Branch) and isinstance(node, Branch):
        for inner, child in node.children.items():
            _put(present, (inner,), child, (*path, name))
    else:
        shown = show_path((*path, name))
        raise _collision(f"there already is {shown}", shown)
