"""Rename, move and drop stored leaves; no value changes."""

from __future__ import annotations

import re

from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.template import compile_template
from flax_ckpt_compat._core.tree import Branch, Node, Path, show_path
from flax_ckpt_compat.rules import _trees
from flax_ckpt_compat.rules._rule import Apply, rule


@rule
def rename(_rule_name: str, pattern: str, replacement: str) -> Apply:
    """Rename wherever a pattern matches whole names of a key path: ``rename("Dense_0", "encoder")``.

    Args:
        pattern: regular expression over the key path joined with ``/``; it matches whole names, one or several
            (``layer_(\\d+)``, ``params/Dense_0``), anywhere in the path, or from its root if it begins with ``^``.
        replacement: the new names; may refer to groups (``block_\\1``) and contain ``/``.

    Raises:
        TransformError: a bad pattern or replacement; when applied: it matches nothing in the checkpoint.
        NameCollisionError: when applied: two leaves would get the same name.
    """
    compiled = _trees.whole_names(pattern, _rule_name)
    try:
        fill = compile_template(compiled, replacement)
    except (re.error, IndexError) as error:
        raise TransformError(
            f"{_rule_name}: {replacement!r} does not fit the groups of the pattern: {error}"
        ) from error

    def apply(stored: Node, _: Node) -> Node:
        found = False

        def renamed(path: Path) -> Path:
            nonlocal found
            new: list[str] = []
            done = 0
            for first, after, match in _trees.matches(compiled, path):
                found = True
                new += [*path[done:first], *filter(None, fill(match).split("/"))]
                done = after
            return (*new, *path[done:])

        tree = _trees.remap(stored, renamed, _rule_name)
        if not found:
            raise TransformError(
                f"{_rule_name}: matches nothing in the checkpoint; {_trees.near_names(pattern, stored)}"
            )
        return tree

    return apply


@rule
def move(_rule_name: str, source: str, to: str) -> Apply:
    """Move a subtree or leaf: ``move("model/params", "params")``.

    Args:
        source: literal path in the checkpoint.
        to: literal path of the destination; an existing subtree is merged. Empty makes ``source`` the whole tree and
            drops all else, as in ``move("params", "")``: parameters only, for inference.

    Raises:
        TransformError: when applied: the checkpoint has no such path.
        NameCollisionError: when applied: two leaves would get the same name.
    """

    def apply(stored: Node, target: Node) -> Node:
        start = _trees.find(stored, source, _rule_name)
        end = _trees.destination(to, target, stored)

        def moved(path: Path) -> Path | None:
            if path[: len(start)] == start:
                return end + path[len(start) :]
            return path if end else None

        return _trees.remap(stored, moved, _rule_name)

    return apply


@rule
def drop(_rule_name: str, *paths: str) -> Apply:
    """Drop subtrees or leaves, so that they are neither reported as unused nor in the way: ``drop("ema_params")``.

    Args:
        paths: literal paths of subtrees or leaves in the checkpoint.

    Raises:
        TransformError: no path; when applied: the checkpoint has no such path.
    """
    if not paths:
        raise TransformError(f"{_rule_name}: name at least one path")

    def apply(stored: Node, _: Node) -> Node:
        dropped = {_trees.find(stored, path, _rule_name) for path in paths}
        longest = max(map(len, dropped))

        def kept(path: Path) -> Path | None:
            return None if any(path[:end] in dropped for end in range(longest + 1)) else path

        return _trees.remap(stored, kept, _rule_name)

    return apply


@rule
def wrap(_rule_name: str, name: str, at: str = "") -> Apply:
    """Move the children of a subtree one level deeper: ``wrap("model", at="params")`` gives ``params/model/…``.

    Args:
        name: of the new level; ``a/b`` makes two levels.
        at: literal path of the subtree; empty for the whole tree.

    Raises:
        TransformError: no name; when applied: the checkpoint has no such path, or a leaf there.
    """
    levels = _trees.names_in(name)
    if not levels:
        raise TransformError(f"{_rule_name}: the new level needs a name")

    def apply(stored: Node, _: Node) -> Node:
        start = _trees.find(stored, at, _rule_name)
        _expect_children(stored, start, _rule_name)
        size = len(start)
        return _trees.remap(
            stored, lambda path: (*start, *levels, *path[size:]) if path[:size] == start else path, _rule_name
        )

    return apply


@rule
def unwrap(_rule_name: str, name: str, at: str = "") -> Apply:
    """Remove a level, the inverse of `wrap`: ``unwrap("model", at="params")`` gives ``params/…``.

    Args:
        name: of the level, or levels (``a/b``); its siblings stay in place.
        at: literal path of the subtree that holds it; empty for the whole tree.

    Raises:
        TransformError: when applied: the checkpoint has no such level, or a leaf there.
        NameCollisionError: when applied: a child has the name of something beside the level.
    """

    def apply(stored: Node, _: Node) -> Node:
        start = _trees.find(stored, at, _rule_name)
        level = _trees.find(stored, f"{at}/{name}" if at else name, _rule_name)
        _expect_children(stored, level, _rule_name)
        return _trees.remap(
            stored, lambda path: start + path[len(level) :] if path[: len(level)] == level else path, _rule_name
        )

    return apply


def _expect_children(stored: Node, path: Path, rule_name: str) -> None:
    node = _trees.node_at(stored, path)
    if not isinstance(node, Branch) or not node.children:
        raise TransformError(
            f"{rule_name}: {show_path(path)} is a leaf or empty, expected a subtree", leaf=show_path(path)
        )
