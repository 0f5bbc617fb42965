"""Keep the target's own values."""

from __future__ import annotations

from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import Branch, Node, Path, map_leaves, show_path
from flax_ckpt_compat._trees.leaf_sources import Own
from flax_ckpt_compat.rules import _trees
from flax_ckpt_compat.rules._rule import Apply, rule


@rule
def from_target(_rule_name: str, *paths: str) -> Apply:
    """Keep the target's own values, whatever is stored: ``from_target("batch_stats", "params/head")``.

    Args:
        paths: literal paths of subtrees or leaves in the target.

    Raises:
        TransformError: no path; when applied: the target has no such path, or the checkpoint has a leaf where the
            target has a subtree around it.
    """
    if not all(paths) or not paths:
        raise TransformError(f"{_rule_name}: name at least one path in the target")

    def apply(stored: Node, target: Node) -> Node:
        for text in paths:
            path = _trees.find(target, text, _rule_name, whose="the target")
            stored = put(stored, path, keep_target(_trees.node_at(target, path)), _rule_name)
        return stored

    return apply


def keep_target(node: Node) -> Node:
    """Return the target's branches with `Own.TARGET` as every leaf."""
    return map_leaves(lambda _, __: Own.TARGET, node)


def put(stored: Node, path: Path, node: Node, rule_name: str, *, depth: int = 0) -> Node:
    """Return a tree with a node replaced.

    Args:
        stored: the tree, or its subtree at the first ``depth`` names of the path.
        path: key path of the node.
        node: the new node.
        rule_name: the rule, for the message.
        depth: number of names of the path that lead to ``stored``.

    Raises:
        TransformError: a leaf is above the path.
    """
    if depth == len(path):
        return node
    if stored is not None and not isinstance(stored, Branch):
        leaf, inner = show_path(path[:depth]), show_path(path)
        raise TransformError(
            f"{rule_name}: stored {leaf} is a leaf, but {inner} lies below; move or drop it first", leaf=leaf
        )
    was = Branch({}) if stored is None else stored
    child = put(was.children.get(path[depth]), path, node, rule_name, depth=depth + 1)
    return Branch({**was.children, path[depth]: child}, was.container, was.int_keys)
