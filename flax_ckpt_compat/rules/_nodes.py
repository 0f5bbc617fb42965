"""Find nodes of trees by patterns, and move and replace them.

Patterns are regular expressions over key paths joined with ``/``, and match whole names, never a part of one.
Rules that take *places* (``drop``, ``at=``, …) match patterns with whole key paths (`select`); those that change *names
or arrays* (``rename``, ``stack``, ``cast``, …) find them anywhere, from the root if they begin with ``^`` (`Names`)."""

from __future__ import annotations

import bisect
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.text_formatting import literal, one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, from_leaves, iter_leaves, joined, show_path
from flax_ckpt_compat._trees.leaf_sources import Own, nearest

# Global flags, which Python requires at the beginning of an expression.
_FLAGS = re.compile(r"\A(?:\(\?[aiLmsux]+\))+")

Replacement = str | Callable[[re.Match[str]], str]
Fill = Callable[[re.Match[str]], str]


def misfit(path: Path, problem: str) -> TransformError:
    """Return the error for what is at a key path."""
    shown = show_path(path)
    return TransformError(f"{shown} {problem}", leaf=shown)


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern for `select`; raise TransformError if it is not a regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        problem = f"{pattern!r} is not a regular expression (literally it is {literal(pattern)!r}): {error}"
        raise TransformError(problem) from error


def whole_names(pattern: str) -> re.Pattern[str]:
    """Compile a pattern for `Names` and `below`; same errors as `compiled`."""
    # Compiled alone first: errors give positions in it, and its flags apply to the whole expression.
    flags = compiled(pattern).flags
    end = "\n" if flags & re.VERBOSE else ""  # ends a comment
    return re.compile(rf"(?<![^/])(?:{_FLAGS.sub('', pattern)}{end})(?![^/])", flags)


def filled(pattern: re.Pattern[str], replacement: Replacement) -> Fill:
    r"""Return a function that fills a replacement with a match: text with ``\1`` as in ``re.sub``, or a function."""
    if not callable(replacement):
        if not isinstance(replacement, str):
            raise TransformError(f"a replacement is text or a function, found {replacement!r:.100}")
        try:
            pattern.sub(replacement, "")  # which refuses groups that the pattern lacks, also where nothing matches
            return operator.methodcaller("expand", replacement) if "\\" in replacement else lambda _: replacement
        except (re.error, IndexError) as error:
            raise TransformError(f"{replacement!r} does not fit the groups of the pattern: {error}") from error

    def fill(match: re.Match[str]) -> str:
        text = replacement(match)
        if not isinstance(text, str):
            raise TransformError(f"the function returns {text!r:.100} for {match[0]}, expected text")
        return text

    return fill


class Names:
    """Patterns of whole names anywhere in a key path. Plain text is looked up: many searches would take long."""

    def __init__(self, patterns: Iterable[str]):
        """Compile them; raise TransformError as `compiled` does."""
        texts = list(patterns)
        self.compiled = [whole_names(text) for text in texts]
        self._plain = {text: n for n, text in enumerate(texts) if text == literal(text)}
        self._begin = {text.partition("/")[0] for text in self._plain}
        self._lengths = {text.count("/") + 1 for text in self._plain}
        self._searched = [n for n, text in enumerate(texts) if text not in self._plain]

    def matches(self, path: Path) -> Iterator[tuple[int, int, int, re.Match[str]]]:
        """Find the matches in a key path, from left to right without overlaps.

        Yields the index of the pattern; of the first name; after the last name; and the match. Of several that match
        from one name on, the one with the most names is taken, then the first. A ``/`` inside a name is an ordinary
        character, at which no match begins or ends."""
        text = joined(path)
        able, parts = self._searched, text.split("/")
        if not self._begin.isdisjoint(parts):
            some = ("/".join(parts[at : at + length]) for length in self._lengths for at in range(len(parts)))
            able = sorted({*able, *(self._plain[one] for one in some if one in self._plain)})
        hits = {number: hit for number in able if (hit := self.compiled[number].search(text))}
        if not hits:
            return
        starts = [0, *itertools.accumulate(len(name) + 1 for name in path)]
        ends = {start - 1: number for number, start in enumerate(starts)}
        while hits:
            first = bisect.bisect_left(starts, min(hit.start() for hit in hits.values()))
            found = [(number, match) for number in hits if (match := self.compiled[number].match(text, starts[first]))]
            lengths = [ends.get(match.end(), 0) for _, match in found]
            after = max(lengths, default=0)
            if after > first:
                number, match = found[lengths.index(after)]
                yield number, first, after, match
            first = max(after, first + 1)
            hits = {n: hit for n in hits if first < len(path) and (hit := self.compiled[n].search(text, starts[first]))}


def below(branch: Node, path: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield the topmost key paths below a branch that a `whole_names` pattern matches, each with its match."""
    start = len(joined(path)) + bool(path)

    def visit(node: Node, level: Path) -> Iterator[tuple[Path, re.Match[str]]]:
        if level and (match := pattern.fullmatch(joined((*path, *level)), start)):
            yield level, match
        elif isinstance(node, Branch):
            for name, child in node.children.items():
                yield from visit(child, (*level, name))

    return visit(branch, ())


def select(tree: Node, patterns: Sequence[str], *, whose: str = "the checkpoint") -> dict[Path, re.Match[str]]:
    """Return the key paths of the topmost nodes whose whole key path a pattern matches, each with its match.

    The empty pattern is the whole tree, which messages call ``whose``. Each has to match, and no two nodes alike."""
    found: dict[Path, re.Match[str]] = {}
    for text in patterns:
        pattern = compiled(text)
        # Plain names need no search of the whole tree; a pattern that matches the empty text is all of it.
        paths = paths_of(tree, text) if text == literal(text) else (path for path, _ in below(tree, (), pattern))
        paths = iter([()]) if pattern.fullmatch("") else paths
        seen: dict[str, re.Match[str]] = {}
        for path in paths:
            shown = joined(path)
            match = pattern.fullmatch(shown)
            if shown in seen or match is None:
                problem = f"{shown} means 2 things in {whose}, whose names contain /; match what is above them"
                raise TransformError(problem, leaf=shown)
            seen[shown] = found[path] = match
        if not seen:
            raise TransformError(f"{whose} has no {text}; {near_names(text, tree)}", leaf=text)
    return found


def only_place(tree: Node, pattern: str, whose: str) -> Path:
    """Return the only key path that a pattern matches, as `select` does."""
    found = list(select(tree, [pattern], whose=whose))
    if len(found) > 1:
        raise TransformError(f"{pattern!r} must match one place in {whose}, found {one_line(map(show_path, found))}")
    return found[0]


def paths_of(tree: Node, text: str, path: Path = ()) -> Iterator[Path]:
    """Yield the key paths that are this text when joined with ``/``."""
    if not text and not path:
        yield path
        return
    for name, child in tree.children.items() if isinstance(tree, Branch) else ():
        if name == text:
            yield (*path, name)
        elif text.startswith(f"{name}/"):
            yield from paths_of(child, text[len(name) + 1 :], (*path, name))


def new_names(text: str) -> Path:
    """Split the name of a new level, or levels, at each ``/``."""
    if not text:
        raise TransformError("a new name is empty")
    return tuple(text.split("/"))


def near_names(wanted: str, tree: Node) -> str:
    """Return the end of a message: similar paths of a tree, or its top-level names."""
    paths = dict.fromkeys(path[:end] for path, _ in iter_leaves(tree) for end in range(1, len(path) + 1))
    if close := nearest(wanted, map(show_path, paths)):
        return f"near it: {', '.join(close)}"
    top = list(tree.children) if isinstance(tree, Branch) else []
    return f"at the top it has: {one_line(top) or 'no names'}"


def rebuild(stored: Node, new_leaves: Callable[[Path, Any], Iterable[tuple[Path, Node]]]) -> Node:
    """Put new leaves, with their key paths, for each leaf; containers whose children keep their names keep their type.

    None and empty containers give way to what is put below them, and what was left to the target to a stored leaf."""
    leaves: dict[Path, Node] = {}
    origins: dict[Path, Path] = {}
    for old, before in iter_leaves(stored):
        for new, leaf in new_leaves(old, before):
            if leaf is Own.KEEP_TARGET and new in leaves:
                continue
            if leaves.pop(new, Own.KEEP_TARGET) is not Own.KEEP_TARGET:
                both = f"{show_path(origins[new])} and {show_path(old)}"
                problem = f"{both} would both be called {show_path(new)}; drop or move one of them first"
                raise NameCollisionError(problem, leaf=show_path(new))
            leaves[new], origins[new] = leaf, old
    if empty := {path for path, leaf in leaves.items() if is_empty(leaf)}:
        empty &= {path[:end] for path in leaves for end in range(len(path))}
    return from_leaves({path: leaf for path, leaf in leaves.items() if path not in empty}, stored, origins)


def prefix_in(path: Path, places: Collection[Path]) -> Path | None:
    """Return the shortest beginning of a key path that is among the places, or None."""
    return next((path[:end] for end in range(len(path) + 1) if path[:end] in places), None)


def put(stored: Node, path: Path, node: Node, *, depth: int = 0) -> Node:
    """Return a tree with a node replaced; ``stored`` is its subtree below the first ``depth`` names of the path."""
    if depth == len(path):
        return node
    was = Branch({}) if stored is None else stored
    if not isinstance(was, Branch):
        raise misfit(path[:depth], f"is a leaf, but {show_path(path)} lies below; move or drop it first")
    child = put(was.children.get(path[depth]), path, node, depth=depth + 1)
    return Branch({**was.children, path[depth]: child}, was.container, was.int_keys, was.type_name)


def leaves_of(node: Node) -> dict[Path, Any]:
    """Return the leaves of a node by key path, without empty branches."""
    return {path: leaf for path, leaf in iter_leaves(node) if not isinstance(leaf, Branch)}


def is_empty(node: Node) -> bool:
    """Return whether a node is None or a branch without children."""
    return node is None or (isinstance(node, Branch) and not node.children)
