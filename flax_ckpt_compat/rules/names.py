"""Say what each leaf of the target comes from: other names, the target itself, another checkpoint. No value changes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.location import as_text
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, map_leaves, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, handles_of, shape_and_dtype
from flax_ckpt_compat.rules import _nodes
from flax_ckpt_compat.rules._nodes import Replacement, prefix_in
from flax_ckpt_compat.rules._rule import Rule, Trees, applied, named, rule
from flax_ckpt_compat.rules.optimizers import FIELDS


@rule
def rename(trees: Trees, pattern: str | Mapping[str, Replacement], replacement: Replacement | None = None) -> Node:
    """Rename wherever a pattern matches whole names of a key path: ``rename("Dense_0", "encoder")``.

    Args:
        pattern: regular expression that matches one or several whole names (``layer_(\\d+)``, ``params/Dense_0``)
            anywhere in a key path, or from its root if it begins with ``^``. A mapping of patterns to replacements
            applies them all at once, so that ``rename({"a": "b", "b": "a"})`` swaps two names; of those that
            overlap, the one that begins first is taken, then the one that matches the most names, then the first.
        replacement: the new names, as in ``re.sub``: text that may refer to groups (``block_\\1``) and contain ``/``,
            or a function that takes the match and returns such text.
    """
    if isinstance(pattern, Mapping) == (replacement is not None) or not pattern:
        raise TransformError("expected a pattern and a replacement, or a mapping of such pairs")
    given: Mapping[str, Replacement] = pattern if isinstance(pattern, Mapping) else {pattern: replacement or ""}
    names = _nodes.Names(given)
    fills = [*map(_nodes.filled, names.compiled, given.values())]
    unmatched = dict(enumerate(given))

    def renamed(path: Path, leaf: Node) -> list[tuple[Path, Node]]:
        new, done = list[str](), 0
        for number, first, after, match in names.matches(path):
            unmatched.pop(number, None)
            new += [*path[done:first], *filter(None, fills[number](match).split("/"))]
            done = after
        return [((*new, *path[done:]) if done else path, leaf)]

    tree = _nodes.rebuild(trees.stored, renamed)
    for text in unmatched.values():
        what = "nothing that other patterns leave" if len(given) > 1 else "nothing in the checkpoint"
        raise TransformError(f"{text!r} matches {what}; {_nodes.near_names(text, trees.stored)}")
    return tree


@rule
def move(trees: Trees, source: str, to: Replacement) -> Node:
    """Move subtrees or leaves: ``move("model/params", "params")``, ``move("(.*)/attn/qkv", r"\\1/qkv")``.

    Args:
        source: pattern of whole key paths in the checkpoint.
        to: key path of the destination, as in ``re.sub``; an existing subtree is merged. Empty makes ``source`` the
            whole tree and drops all else, as in ``move("params", "")``: parameters only, for inference.
    """
    ends = _destinations(trees, source, to)
    return _moved(trees.stored, {start: [end] for start, end in ends.items()}, drops_rest=() in ends.values())


@rule
def copy(trees: Trees, source: str, to: Replacement) -> Node:
    """Copy subtrees or leaves, such as parameters for a new EMA: ``copy("params", "ema_params")``.

    Args:
        source: pattern of whole key paths in the checkpoint.
        to: key path of the copy, as in ``re.sub``; the values are read once and share no memory. A Python number
            becomes an array where the target has one: ``copy("step", "opt_state/1/count")`` lets a new schedule go on.
    """
    ends = _destinations(trees, source, to)
    tree = _moved(trees.stored, {start: [start, end] for start, end in ends.items()})
    for start, end in ends.items():
        if (number := _as_array(node_at(trees.stored, start), node_at(trees.target, end))) is not None:
            tree = _nodes.put(tree, end, number)
    return tree


def _destinations(trees: Trees, source: str, to: Replacement) -> dict[Path, Path]:
    """Return the key paths for new places: as the target or the checkpoint has them, else split at each ``/``."""
    fill, ends = _nodes.filled(_nodes.compiled(source), to), dict[Path, Path]()
    for start, match in _nodes.select(trees.stored, [source]).items():
        text = fill(match)
        there = (path for tree in (trees.target, trees.stored) for path in _nodes.paths_of(tree, text))
        ends[start] = next(there, tuple(text.split("/")))
    return ends


def _moved(stored: Node, ends: Mapping[Path, Sequence[Path]], *, drops_rest: bool = False) -> Node:
    """Give every leaf at or below some key paths other beginnings, or none to drop it."""

    def moved(path: Path, leaf: Node) -> list[tuple[Path, Node]]:
        start = prefix_in(path, ends)
        if start is None:
            return [] if drops_rest else [(path, leaf)]
        return [(end + path[len(start) :], leaf) for end in ends[start]]

    return _nodes.rebuild(stored, moved)


def _as_array(leaf: Node, wanted: Node) -> Derived | None:
    """Return a stored number as the array that the target has for its copy, such as a schedule's count; else None."""
    shape, dtype = shape_and_dtype(wanted)
    is_number = isinstance(leaf, LeafHandle) and leaf.kind in (LeafKind.INT, LeafKind.FLOAT, LeafKind.BOOL)
    if not is_number or shape != () or not isinstance(dtype, np.dtype) or isinstance(wanted, np.generic):
        return None
    return Derived((leaf,), lambda value: np.asarray(value, dtype), (), dtype, f"a number as {dtype}")


@rule
def drop(trees: Trees, *patterns: str) -> Node:
    """Drop subtrees or leaves, so that they are neither reported as unused nor in the way: ``drop("ema_params")``."""
    return _moved(trees.stored, dict.fromkeys(_nodes.select(trees.stored, patterns), ()))


@rule
def wrap(trees: Trees, name: str, at: str = "") -> Node:
    """Move the children of a subtree one level deeper: ``wrap("model", at="params")`` gives ``params/model/…``.

    ``a/b`` makes two levels. ``at`` is a pattern of whole key paths of subtrees; empty for the whole tree."""
    levels = _nodes.new_names(name)
    return _moved_children(trees.stored, {start: [(*start, *levels)] for start in _nodes.select(trees.stored, [at])})


@rule
def unwrap(trees: Trees, name: str, at: str = "") -> Node:
    """Remove a level, the inverse of `wrap`: ``unwrap("model", at="params")`` gives ``params/…``.

    The name is a pattern of the level, or levels (``a/b``), below ``at``; its siblings stay in place."""
    ends: dict[Path, list[Path]] = {}
    for start in _nodes.select(trees.stored, [at]):
        levels = _nodes.select(node_at(trees.stored, start), [name], whose=show_path(start))
        ends |= {(*start, *level): [start] for level in levels}
    return _moved_children(trees.stored, ends)


def _moved_children(stored: Node, ends: dict[Path, list[Path]]) -> Node:
    for path in ends:
        node = node_at(stored, path)
        if not isinstance(node, Branch) or not node.children:
            raise _nodes.misfit(path, "is a leaf or empty, expected a subtree; match one, or use rename or move")
    return _moved(stored, ends)


@rule
def nest(trees: Trees, separator: str = "/", at: str = "") -> Node:
    """Split names that hold a whole key path into levels: with ``nest(".")``, ``a.b.c`` becomes ``a/b/c``.

    Names below ``at`` are split, a pattern of whole key paths of subtrees; empty for the whole tree."""
    if not separator:
        raise TransformError("the separator is empty")
    ends: dict[Path, list[Path]] = {}
    for start in _nodes.select(trees.stored, [at]):
        for path, _ in iter_leaves(node_at(trees.stored, start)):
            if any(separator in name for name in path):
                parts = (part for name in path for part in filter(None, name.split(separator)))
                ends[(*start, *path)] = [(*start, *parts)]
    if not ends:
        near = _nodes.near_names(separator, trees.stored)
        raise TransformError(f"no name in the checkpoint has {separator!r} in it; {near}")
    return _moved(trees.stored, ends)


@rule
def from_target(trees: Trees, *patterns: str) -> Node:
    """Keep the target's own values, whatever is stored: ``from_target("batch_stats", ".*/lora_[ab]")``.

    The patterns are of whole key paths of subtrees or leaves in the target."""
    tree = trees.stored
    for path in _nodes.select(trees.target, patterns, whose="the target"):
        tree = _nodes.put(tree, path, map_leaves(lambda *_: Own.KEEP_TARGET, node_at(trees.target, path)))
    return tree


@rule
def from_checkpoint(
    trees: Trees,
    path: str | os.PathLike[str],
    *patterns: str,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    transforms: Sequence[Rule] = (),
) -> Node:
    """Take subtrees from another checkpoint, of any format: ``from_checkpoint("runs/b", "params/head")``.

    Only the leaves that are needed are read, all in one restore. Nothing of these subtrees is taken from the first
    checkpoint.

    Args:
        path: a checkpoint, or a directory of checkpoints.
        patterns: of whole key paths of subtrees or leaves in the target (without a target: in that checkpoint).
        step: the step in the directory; None for the latest.
        prefix: of the checkpoints' names in the directory.
        transforms: rules for that checkpoint, such as renames, before the subtrees are taken.
    """
    tree, target, open_tree = trees
    located, other = open_tree(as_text(path), step, as_text(prefix, "prefix"))
    other = map_leaves(lambda _, leaf: _named_after(leaf, located), other)
    for one in transforms:
        other = one.apply_to(other, target, open_tree)
    whole, whose = (other, located) if target is None else (target, "the target")
    for place, match in _nodes.select(whole, patterns, whose=whose).items():
        found = [*_nodes.paths_of(other, match[0])]
        if place not in found and len(found) != 1:
            shown = show_path(place)
            problem = f"{located} has no {shown}; {_nodes.near_names(shown, other)}"
            if found:
                problem = f"{shown} means several things in {located}, whose names contain /; match what is above them"
            raise TransformError(problem, leaf=shown)
        tree = _nodes.put(tree, place, node_at(other, place if place in found else found[0]))
    return tree


def _named_after(leaf: Any, located: str) -> Any:
    """Return a leaf handle whose path, which plans and messages show, begins with its checkpoint."""
    if not isinstance(leaf, LeafHandle):
        return leaf
    return dataclasses.replace(leaf, path=(*located.split("/"), *leaf.path), stored_name=leaf.name)


def from_names(mapping: Mapping[str, Replacement]) -> Rule:
    """Return the rule for a mapping of places in the target, as patterns, to stored ones, all taken at once."""
    name = "".join(("{", ", ".join(f"{new!r}: {old!r}" for new, old in mapping.items()), "}"))
    with named(name):
        fills = {new: _nodes.filled(_nodes.compiled(new), old) for new, old in mapping.items()}
    return Rule(name, applied(name, _from_names, fills))


def _from_names(trees: Trees, fills: Mapping[str, _nodes.Fill]) -> Node:
    stored, target, _ = trees
    if target is None:
        raise TransformError("maps names of a target, and there is none; use rules.rename or rules.move")
    sources: dict[Path, Path] = {}  # by place in the target
    keys: dict[Path, str] = {}  # by place, the last of those that match it
    for new, fill in fills.items():
        for place, match in _nodes.select(target, [new], whose="the target").items():
            old = fill(match)
            found = [*_nodes.paths_of(stored, old)] or [*_nodes.paths_of(stored, old.replace(r"\/", "/"))]
            if len(found) != 1:
                problem = f"means {len(found)} things" if found else "is not stored"
                near = _nodes.near_names(old, stored)
                raise TransformError(f"{old}, for the target's {show_path(place)}, {problem}; {near}", leaf=old)
            sources[place], keys[place] = found[0], new
    if idle := fills.keys() - set(keys.values()):
        shown = show_path(next(iter(_nodes.select(target, [min(idle)]))))
        raise TransformError(f"{min(idle)!r} matches only what later keys match, too; leave it out", leaf=shown)
    tree = stored
    for place in sorted(sources, key=len):
        tree = _nodes.put(tree, place, node_at(stored, sources[place]))
    # What was taken and has no place of its own in the target is used, and gone from its old place.
    wanted, taken = {path for path, _ in iter_leaves(target)}, set(sources.values())

    def kept(path: Path, leaf: Node) -> list[tuple[Path, Node]]:
        was_taken, has_place = (prefix_in(path, ends) is not None for ends in (taken, sources))
        return [(path, leaf)] if path in wanted or not was_taken or has_place else []

    return _nodes.rebuild(tree, kept)


def unused_moments(stored: Node, tree: Node, target: Node) -> list[str]:
    """Return the stored moments of parameters that are restored, where the target's begin anew in their place."""

    def moments(path: Path) -> list[Path]:  # what is below the first field; parameters may have such names, too
        return [path[at + 1 :] for at, name in enumerate(path) if at and name in FIELDS and path[0] != "params"][:1]

    def ends(path: Path) -> list[Path]:
        return [path[at:] for at in range(len(path))]

    leaves = [(path, leaf) for path, leaf in iter_leaves(tree) if node_at(target, path) is not None]
    used = {one.path for _, leaf in leaves for one in handles_of(leaf)}
    begun = {end for path, leaf in leaves if leaf is Own.KEEP_TARGET for end in moments(path)}
    rest = {leaf.path for _, leaf in iter_leaves(stored) if isinstance(leaf, LeafHandle)} - used
    goes_on = {end for path in used for end in moments(path)}
    sources = [one.path for path, leaf in leaves if not begun.isdisjoint(ends(path)) for one in handles_of(leaf)]
    idle = {end for path in sources for end in ends(path)} - goes_on
    return [show_path(path) for path in sorted(rest) if not idle.isdisjoint(moments(path))]
