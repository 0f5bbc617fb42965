"""The rule that leaves parts of the target as they are."""

from __future__ import annotations

from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import Branch, Node, Path, map_leaves, show_path
from flax_ckpt_compat._trees.leaf_sources import Own
from flax_ckpt_compat.rules import _trees
from flax_ckpt_compat.rules._rule import Apply, rule


@rule
def from_target(who: str, *paths: str) -> Apply:
    """The target keeps its own values, whatever is stored: ``from_target("batch_stats", "params/head")``.

    Args:
        paths: literal paths of subtrees or leaves in the target.

    Raises:
        TransformError: no path; when applied: the target has no such path, or the checkpoint has a leaf where the
            target has a subtree around it.
    """
    if not all(paths) or not paths:
        raise TransformError(f"{who}: name at least one path in the target")

    def apply(stored: Node, target: Node) -> Node:
        for path in paths:
            where = _trees.find(target, path, who, whose="the target")
            stored = put(stored, where, left_to_target(_trees.node_at(target, where)), who)
        return stored

    return apply


def left_to_target(node: Node) -> Node:
    """A tree of the target's branches whose leaves all say that the target keeps its own value."""
    return map_leaves(lambda _, __: Own.TARGET, node)


def put(stored: Node, where: Path, node: Node, who: str, *, depth: int = 0) -> Node:
    """The tree with this node at a key path, instead of what is there.

    Args:
        stored: the tree, or what is of it after so many names of the path.
        where: the key path.
        node: what goes there.
        who: the rule, for the message.
        depth: how many names of the path lead to ``stored``.

    Raises:
        TransformError: there is a leaf on the way.
    """
    if depth == len(where):
        return node
    if stored is not None and not isinstance(stored, Branch):
        leaf, inner = show_path(where[:depth]), show_path(where)
        raise TransformError(
            f"{who}: stored {leaf} is a leaf, but {inner} lies below; move or drop it first", leaf=leaf
        )
    was = Branch({}) if stored is None else stored
    child = put(was.children.get(where[depth]), where, node, who, depth=depth + 1)
    return Branch({**was.children, where[depth]: child}, was.container, was.int_keys)
