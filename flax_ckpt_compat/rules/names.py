"""Rules that give stored leaves other names; no value changes."""

from __future__ import annotations

import re

from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.template import compile_template
from flax_ckpt_compat._core.tree import Branch, Node, Path, show_path
from flax_ckpt_compat.rules import _trees
from flax_ckpt_compat.rules._rule import Apply, rule


@rule
def rename(who: str, pattern: str, replacement: str) -> Apply:
    """Renames wherever the pattern matches whole names of a key path: ``rename("Dense_0", "encoder")``.

    Args:
        pattern: regular expression over the key path joined with ``/``; it matches whole names, one or several
            (``layer_(\\d+)``, ``params/Dense_0``), anywhere in the path, or from its root if it begins with ``^``.
        replacement: what stands in their place; may refer to groups (``block_\\1``), and may contain ``/``.

    Raises:
        TransformError: a bad pattern or replacement; when applied: it matches nothing in the checkpoint.
        NameCollisionError: when applied: two leaves would get the same name.
    """
    compiled = _trees.whole_names(pattern, who)
    try:
        fill = compile_template(compiled, replacement)
    except (re.error, IndexError) as error:
        raise TransformError(f"{who}: {replacement!r} does not fit the groups of the pattern: {error}") from error

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

        tree = _trees.remap(stored, renamed, who)
        if not found:
            raise TransformError(f"{who}: matches nothing in the checkpoint; {_trees.near_names(pattern, stored)}")
        return tree

    return apply


@rule
def move(who: str, source: str, to: str) -> Apply:
    """Moves a subtree or leaf elsewhere: ``move("model/params", "params")``.

    Args:
        source: literal path in the checkpoint.
        to: literal path where it goes; where there is a subtree already, the children are merged. Empty makes it the
            whole tree and drops all else, as for ``move("params", "")``: parameters only, for inference.

    Raises:
        TransformError: when applied: the checkpoint has no such path.
        NameCollisionError: when applied: two leaves would get the same name.
    """

    def apply(stored: Node, target: Node) -> Node:
        start = _trees.find(stored, source, who)
        end = _trees.destination(to, target, stored)

        def moved(path: Path) -> Path | None:
            if path[: len(start)] == start:
                return end + path[len(start) :]
            return path if end else None

        return _trees.remap(stored, moved, who)

    return apply


@rule
def drop(who: str, *paths: str) -> Apply:
    """Leaves out what is not wanted, so that it is neither unused nor in the way: ``drop("ema_params")``.

    Args:
        paths: literal paths of subtrees or leaves in the checkpoint.

    Raises:
        TransformError: no path; when applied: the checkpoint has no such path.
    """
    if not paths:
        raise TransformError(f"{who}: name at least one path")

    def apply(stored: Node, _: Node) -> Node:
        dropped = {_trees.find(stored, path, who) for path in paths}
        longest = max(map(len, dropped))

        def kept(path: Path) -> Path | None:
            return None if any(path[:end] in dropped for end in range(longest + 1)) else path

        return _trees.remap(stored, kept, who)

    return apply


@rule
def wrap(who: str, name: str, at: str = "") -> Apply:
    """Moves the children of a subtree one level deeper: ``wrap("model", at="params")`` gives ``params/model/…``.

    Args:
        name: of the new level; ``a/b`` makes two levels.
        at: literal path of the subtree; empty for the whole tree.

    Raises:
        TransformError: no name; when applied: the checkpoint has no such path, or a leaf there.
    """
    levels = _trees.names_in(name)
    if not levels:
        raise TransformError(f"{who}: the new level needs a name")

    def apply(stored: Node, _: Node) -> Node:
        start = _trees.find(stored, at, who)
        _expect_children(stored, start, who)
        size = len(start)
        return _trees.remap(stored, lambda path: (*start, *levels, *path[size:]) if path[:size] == start else path, who)

    return apply


@rule
def unwrap(who: str, name: str, at: str = "") -> Apply:
    """Takes a level away, the inverse of `wrap`: ``unwrap("model", at="params")`` gives ``params/…``.

    Args:
        name: of the level, or levels (``a/b``); what lies beside it stays where it is.
        at: literal path of the subtree that holds it; empty for the whole tree.

    Raises:
        TransformError: when applied: the checkpoint has no such level, or a leaf there.
        NameCollisionError: when applied: a child has the name of something beside the level.
    """

    def apply(stored: Node, _: Node) -> Node:
        start = _trees.find(stored, at, who)
        level = _trees.find(stored, f"{at}/{name}" if at else name, who)
        _expect_children(stored, level, who)
        return _trees.remap(
            stored, lambda path: start + path[len(level) :] if path[: len(level)] == level else path, who
        )

    return apply


def _expect_children(stored: Node, path: Path, who: str) -> None:
    node = _trees.node_at(stored, path)
    if not isinstance(node, Branch) or not node.children:
        raise TransformError(f"{who}: {show_path(path)} is a leaf or empty, expected a subtree", leaf=show_path(path))
