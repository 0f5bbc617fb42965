"""Share helpers of the rules: find literal paths, remap leaves, suggest similar names in errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.folding import one_line
from flax_ckpt_compat._core.similar import nearest
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, from_leaves, iter_leaves, show_path

# Global flags, which Python requires at the beginning of an expression.
_FLAGS = re.compile(r"\A(?:\(\?[aiLmsux]+\))+")


def near_names(wanted: str, tree: Node) -> str:
    """Return the end of a message: similar paths of a tree, or its top-level names."""
    names = list(
        dict.fromkeys("/".join(path[:end]) for path, _ in iter_leaves(tree) for end in range(1, len(path) + 1))
    )
    if close := nearest(wanted, names):
        return f"near it: {', '.join(close)}"
    top = list(tree.children) if isinstance(tree, Branch) else []
    return f"at the top it has: {one_line(top) or 'no names'}"


def find(tree: Node, text: str, rule_name: str, *, whose: str = "the checkpoint") -> Path:
    """Return the key path of the node at a literal path.

    Args:
        tree: the tree to search.
        text: names joined with ``/``, each of which may contain ``/`` itself; empty for the whole tree.
        rule_name: the rule, for the message.
        whose: name of the tree, for the message.

    Raises:
        TransformError: there is no such node, or two, because names contain ``/``.
    """
    found = list(_paths_of(tree, text))
    if len(found) == 1:
        return found[0]
    if found:
        raise TransformError(
            f"{rule_name}: {text} means {len(found)} things in {whose}, whose names contain /", leaf=text
        )
    raise TransformError(f"{rule_name}: {whose} has no {text}; {near_names(text, tree)}", leaf=text)


def _paths_of(tree: Node, text: str, path: Path = ()) -> Iterator[Path]:
    if not text and not path:
        yield path
        return
    for name, child in tree.children.items() if isinstance(tree, Branch) else ():
        if name == text:
            yield (*path, name)
        elif text.startswith(f"{name}/"):
            yield from _paths_of(child, text[len(name) + 1 :], (*path, name))


def destination(text: str, *trees: Node) -> Path:
    """Return the key path for a literal path: as in the first tree that has it, else split at each ``/``."""
    for tree in trees:
        if found := next(_paths_of(tree, text), ()):
            return found
    return names_in(text)


def destination_in(tree: Node, text: str) -> Path:
    """Return the key path of the node at a literal path, or () if there is none."""
    return next(_paths_of(tree, text), ()) if text else ()


def names_in(text: str) -> Path:
    """Split text at each ``/``; empty text gives ()."""
    return tuple(text.split("/")) if text else ()


def node_at(tree: Node, path: Path) -> Node:
    """Return the node at an existing key path."""
    for name in path:
        tree = tree.children[name]
    return tree


def remap(stored: Node, new_path: Callable[[Path], Path | None], rule_name: str) -> Node:
    """Give every leaf a new key path; containers whose children keep their names keep their type.

    Args:
        stored: the tree.
        new_path: maps a leaf's key path to the new one, or to None to drop the leaf.
        rule_name: the rule, for the message.

    Raises:
        NameCollisionError: two leaves get the same name, or one the name of a subtree.
    """
    leaves: dict[Path, Node] = {}
    origins: dict[Path, Path] = {}
    for old, leaf in iter_leaves(stored):
        new = new_path(old)
        if new is None:
            continue
        if new in leaves:
            first, second = show_path(origins[new]), show_path(old)
            raise _collision(f"{rule_name}: {first} and {second} would both be called {show_path(new)}", new)
        leaves[new], origins[new] = leaf, old
    try:
        tree = from_leaves(leaves, like=stored)
    except NameCollisionError as error:
        raise NameCollisionError(f"{rule_name}: {error}; drop or move one of them first", leaf=error.leaf) from None
    _take_containers(tree, stored, origins)
    return tree


def _collision(message: str, path: Path) -> NameCollisionError:
    return NameCollisionError(f"{message}; drop or move one of them first", leaf=show_path(path))


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


def whole_names(pattern: str, rule_name: str) -> re.Pattern[str]:
    """Compile a regular expression that matches one or more whole names of a key path joined with ``/``.

    Raises:
        TransformError: it is no regular expression.
    """
    try:
        # Compiled alone first: errors give positions in it, and its flags apply to the whole expression.
        flags = re.compile(pattern).flags
        rest = _FLAGS.sub("", pattern)
        end = "\n" if flags & re.VERBOSE else ""  # ends a comment
        return re.compile(rf"(?<![^/])(?:{rest}{end})(?![^/])", flags)
    except re.error as error:
        raise TransformError(f"{rule_name}: {pattern!r} is no regular expression: {error}") from error


def matches(pattern: re.Pattern[str], path: Path) -> Iterator[tuple[int, int, re.Match[str]]]:
    """Find the matches of a `whole_names` pattern in a key path, from left to right without overlaps.

    Yields:
        Index of the first name, index after the last name, and the match. A ``/`` inside a name is an ordinary
        character, at which no match begins or ends.
    """
    text = "/".join(path)
    if not pattern.search(text):
        return
    starts = [0]
    for name in path:
        starts.append(starts[-1] + len(name) + 1)
    ends = {start - 1: number for number, start in enumerate(starts)}
    first = 0
    while first < len(path):
        match = pattern.match(text, starts[first])
        after = ends.get(match.end(), 0) if match else 0
        if match and after > first:
            yield first, after, match
        first = max(after, first + 1)


def change_branches(
    stored: Node, change: Callable[[Branch, Path], Branch | None], rule_name: str, *, near: str
) -> Node:
    """Change every matching branch, inner ones first.

    Args:
        stored: the tree.
        change: returns the new branch, or None if the branch does not match.
        rule_name: the rule, for the message.
        near: the name searched for, for the message.

    Raises:
        TransformError: no branch matches.
    """
    found = False

    def visit(node: Node, path: Path) -> Node:
        nonlocal found
        if not isinstance(node, Branch):
            return node
        children = {name: visit(child, (*path, name)) for name, child in node.children.items()}
        branch = Branch(children, node.container, node.int_keys)
        changed = change(branch, path)
        found = found or changed is not None
        return branch if changed is None else changed

    tree = visit(stored, ())
    if not found:
        raise TransformError(f"{rule_name}: matches nothing in the checkpoint; {near_names(near, stored)}")
    return tree


def replaced(
    branch: Branch, path: Path, old: Sequence[Path], new: Sequence[tuple[Path, Node]], rule_name: str
) -> Branch:
    """Return a copy of a branch with nodes below it replaced, at the position of the first old one.

    Args:
        branch: the branch, not modified.
        path: its key path, for the message.
        old: paths below the branch.
        new: (path below the branch, node) each.
        rule_name: the rule, for the message.

    Raises:
        NameCollisionError: a new path is taken.
    """
    result = Branch({})
    for name, child in branch.children.items():
        inside = [at for at in old if at[0] == name]
        if inside and inside[0] == old[0]:
            for at, node in new:
                _put(result, at, node, path, rule_name)
        kept = _without(child, [at[1:] for at in inside])
        if kept is not None or not inside:
            _put(result, (name,), kept, path, rule_name)
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


def _put(branch: Branch, at: Path, node: Node, path: Path, rule_name: str) -> None:
    """Put a node below a branch, merging subtrees."""
    name = at[0]
    for inner in reversed(at[1:]):
        node = Branch({inner: node})
    present = branch.children.get(name)
    if name not in branch.children:
        branch.children[name] = node
    elif isinstance(present, Branch) and isinstance(node, Branch):
        for inner, child in node.children.items():
            _put(present, (inner,), child, (*path, name), rule_name)
    else:
        raise _collision(f"{rule_name}: there already is {show_path((*path, name))}", (*path, name))
