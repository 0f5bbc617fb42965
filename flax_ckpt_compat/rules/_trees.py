"""What the rules share: finding literal paths, giving leaves new paths, errors that name near names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.folding import one_line
from flax_ckpt_compat._core.similar import nearest
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, from_leaves, iter_leaves, show_path

# Flags that hold for a whole expression, which Python wants at its very beginning.
_FLAGS = re.compile(r"\A(?:\(\?[aiLmsux]+\))+")


def near_names(wanted: str, tree: Node) -> str:
    """The end of a message: paths of a tree that are similar to one that it lacks, or what it has at the top."""
    names = list(
        dict.fromkeys("/".join(path[:end]) for path, _ in iter_leaves(tree) for end in range(1, len(path) + 1))
    )
    if close := nearest(wanted, names):
        return f"near it: {', '.join(close)}"
    top = list(tree.children) if isinstance(tree, Branch) else []
    return f"at the top it has: {one_line(top) or 'no names'}"


def find(tree: Node, text: str, who: str, *, whose: str = "the checkpoint") -> Path:
    """The key path of the node that a literal path means.

    Args:
        tree: where to look.
        text: names joined with ``/``, each of which may contain ``/`` itself; empty for the whole tree.
        who: the rule, for the message.
        whose: the tree, for the message.

    Raises:
        TransformError: there is no such node, or two, because names contain ``/``.
    """
    found = list(_paths_of(tree, text))
    if len(found) == 1:
        return found[0]
    if found:
        raise TransformError(f"{who}: {text} means {len(found)} things in {whose}, whose names contain /", leaf=text)
    raise TransformError(f"{who}: {whose} has no {text}; {near_names(text, tree)}", leaf=text)


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
    """The key path for a literal path that need not exist: as one of these trees has it, else cut at each ``/``."""
    for tree in trees:
        if found := next(_paths_of(tree, text), ()):
            return found
    return names_in(text)


def destination_in(tree: Node, text: str) -> Path:
    """The key path of the node that a literal path means, or () where there is none."""
    return next(_paths_of(tree, text), ()) if text else ()


def names_in(text: str) -> Path:
    """Text cut at each ``/``; nothing for the empty text."""
    return tuple(text.split("/")) if text else ()


def node_at(tree: Node, path: Path) -> Node:
    """The node at a key path that exists."""
    for name in path:
        tree = tree.children[name]
    return tree


def remap(stored: Node, new_path: Callable[[Path], Path | None], who: str) -> Node:
    """The tree with every leaf at another key path, in the containers that keep the names of their children.

    Args:
        stored: the tree.
        new_path: of a leaf's key path, or None where the leaf is dropped.
        who: the rule, for the message.

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
            raise _collision(f"{who}: {first} and {second} would both be called {show_path(new)}", new)
        leaves[new], origins[new] = leaf, old
    try:
        tree = from_leaves(leaves, like=stored)
    except NameCollisionError as error:
        raise NameCollisionError(f"{who}: {error}; drop or move one of them first", leaf=error.leaf) from None
    _take_containers(tree, stored, origins)
    return tree


def _collision(message: str, path: Path) -> NameCollisionError:
    return NameCollisionError(f"{message}; drop or move one of them first", leaf=show_path(path))


def _take_containers(tree: Node, stored: Node, origins: dict[Path, Path]) -> None:
    """Marks the branches that went elsewhere as the lists and tuples that they were."""
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


def whole_names(pattern: str, who: str) -> re.Pattern[str]:
    """A regular expression that matches whole names, one or several, of a key path joined with ``/``.

    Raises:
        TransformError: it is none.
    """
    try:
        # By itself first: errors count from its own beginning, and its flags hold for what is put around it.
        flags = re.compile(pattern).flags
        rest = _FLAGS.sub("", pattern)
        end = "\n" if flags & re.VERBOSE else ""  # which ends a comment
        return re.compile(rf"(?<![^/])(?:{rest}{end})(?![^/])", flags)
    except re.error as error:
        raise TransformError(f"{who}: {pattern!r} is no regular expression: {error}") from error


def matches(pattern: re.Pattern[str], path: Path) -> Iterator[tuple[int, int, re.Match[str]]]:
    """Where a pattern of `whole_names` matches in a key path, from left to right without overlaps.

    Yields:
        Number of the first name, number of the name after the last, and the match. A ``/`` inside a name is a
        character like others for the pattern, but no place where a match can begin or end.
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


def everywhere(stored: Node, change: Callable[[Branch, Path], Branch | None], who: str, *, near: str) -> Node:
    """The tree with every branch changed that is concerned, the inner ones first.

    Args:
        stored: the tree.
        change: gives the new branch, or None where the branch is not concerned.
        who: the rule, for the message.
        near: what was looked for, for the message.

    Raises:
        TransformError: no branch is concerned.
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
        raise TransformError(f"{who}: matches nothing in the checkpoint; {near_names(near, stored)}")
    return tree


def replaced(branch: Branch, path: Path, old: Sequence[Path], new: Sequence[tuple[Path, Node]], who: str) -> Branch:
    """A branch with nodes below it taken out and others put in, where the first of the old ones was.

    Args:
        branch: which stays as it is.
        path: where it is, for the message.
        old: paths below the branch.
        new: (path below the branch, node) each.
        who: the rule, for the message.

    Raises:
        NameCollisionError: something is there already.
    """
    result = Branch({})
    for name, child in branch.children.items():
        inside = [where for where in old if where[0] == name]
        if inside and inside[0] == old[0]:
            for where, node in new:
                _put(result, where, node, path, who)
        kept = _without(child, [where[1:] for where in inside])
        if kept is not None or not inside:
            _put(result, (name,), kept, path, who)
    return result


def _without(node: Node, old: Sequence[Path]) -> Node:
    """The node less what is at these paths below it; None where nothing is left."""
    if () in old:
        return None
    if not old or not isinstance(node, Branch):
        return node
    children = {}
    for name, child in node.children.items():
        inside = [where[1:] for where in old if where[0] == name]
        if (kept := _without(child, inside)) is not None or not inside:
            children[name] = kept
    return Branch(children) if children else None


def _put(branch: Branch, where: Path, node: Node, path: Path, who: str) -> None:
    """Puts a node below a branch; where both have a subtree, the children are merged."""
    name = where[0]
    for inner in reversed(where[1:]):
        node = Branch({inner: node})
    present = branch.children.get(name)
    if name not in branch.children:
        branch.children[name] = node
    elif isinstance(present, Branch) and isinstance(node, Branch):
        for inner, child in node.children.items():
            _put(present, (inner,), child, (*path, name), who)
    else:
        raise _collision(f"{who}: there already is {show_path((*path, name))}", (*path, name))
