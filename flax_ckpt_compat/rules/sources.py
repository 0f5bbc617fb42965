"""Choose where leaves of the target come from: the target itself, another checkpoint, other names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.location import as_text
from flax_ckpt_compat._core.tree import Node, Path, iter_leaves, joined, map_leaves, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Own
from flax_ckpt_compat.rules import _edit_tree, _patterns
from flax_ckpt_compat.rules._patterns import Replacement
from flax_ckpt_compat.rules._rule import Apply, OpenTree, Rule, RuleError, applied, named, rule


@rule
def from_target(*patterns: str) -> Apply:
    """Keep the target's own values, whatever is stored: ``from_target("batch_stats", ".*/lora_[ab]")``.

    Args:
        patterns: of whole key paths of subtrees or leaves in the target.

    Raises:
        TransformError: no pattern, or a bad one; when applied: the target has no such path, or the checkpoint has a
            leaf where the target has a subtree around it.
    """
    _patterns.check(patterns)

    def apply(stored: Node, target: Node) -> Node:
        for path in _patterns.select(target, patterns, whose="the target"):
            own = map_leaves(lambda _, __: Own.KEEP_TARGET, node_at(target, path))
            stored = _edit_tree.put(stored, path, own)
        return stored

    return apply


@rule
def from_checkpoint(
    path: str | os.PathLike[str],
    *patterns: str,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    transforms: Sequence[Rule] = (),
) -> Apply:
    """Take subtrees from another checkpoint, of any format: ``from_checkpoint("runs/b", "params/head")``.

    Only the leaves that are needed are read, all in one restore. Nothing of these subtrees is taken from the first
    checkpoint.

    Args:
        path: a checkpoint, or a directory of checkpoints.
        patterns: of whole key paths of subtrees or leaves in the target (without a target: in that checkpoint).
        step: the step in the directory; None for the latest.
        prefix: of the checkpoints' names in the directory.
        transforms: rules for that checkpoint, such as renames, before the subtrees are taken.

    Raises:
        TransformError: no pattern, or a bad one; no list of rules; when applied: the target or that checkpoint has no
            such path.
        CheckpointNotFoundError: when applied: there is no such checkpoint.
        CheckpointError: while the leaves are read: that checkpoint was replaced meanwhile.
    """
    _patterns.check(patterns)
    where, prefix = as_text(path), as_text(prefix, "prefix")
    if not isinstance(transforms, list | tuple) or not all(isinstance(one, Rule) for one in transforms):
        raise RuleError(f"transforms= is a list of rules, found {transforms!r:.100}")

    def apply(stored: Node, target: Node, open_tree: OpenTree) -> Node:
        located, other = open_tree(where, step, prefix)
        other = map_leaves(lambda _, leaf: _named_after(leaf, located), other)
        for one in transforms:
            other = one.apply_to(other, target, open_tree)
        whole, whose = (other, located) if target is None else (target, "the target")
        for place in _patterns.select(whole, patterns, whose=whose):
            start = next(_patterns.paths_of(other, joined(place)), None)
            if start is None:
                shown = show_path(place)
                near = _patterns.near_names(shown, other)
                raise RuleError(f"{located} has no {shown}; {near}", leaf=shown)
            stored = _edit_tree.put(stored, place, node_at(other, start))
        return stored

    # The decorator passes it on to the rule.
    apply.opens = ((where, prefix), *(other for one in transforms for other in one.opens))  # type: ignore[attr-defined]
    return apply


def _named_after(leaf: Any, located: str) -> Any:
    """Return a leaf handle whose path, which plans and messages show, begins with its checkpoint."""
    if not isinstance(leaf, LeafHandle):
        return leaf
    return dataclasses.replace(leaf, path=(*located.split("/"), *leaf.path), stored_name=leaf.name)


def from_names(mapping: Mapping[str, Replacement]) -> Rule:
    """Return the rule for a mapping of the target's names to stored ones: ``{"params/encoder": "params/Dense_0"}``.

    Its keys are patterns of whole key paths of subtrees or leaves in the target, its values key paths in the
    checkpoint, as in ``re.sub``. All are taken at once."""
    name = "".join(("{", ", ".join(f"{new!r}: {old!r}" for new, old in mapping.items()), "}"))
    with named(name):
        fills = {new: _patterns.filled(_patterns.compiled(new), old) for new, old in mapping.items()}

    def apply(stored: Node, target: Node) -> Node:
        if target is None:
            raise RuleError("maps names of a target, and there is none; use rules.rename or rules.move")
        places: dict[Path, Path] = {}
        keys: dict[Path, str] = {}  # by place, of those that match it the last one
        examples: dict[str, Path] = {}  # a place of each key
        for new, fill in fills.items():
            for place, match in _patterns.select(target, [new], whose="the target").items():
                old = fill(match)
                found = list(_patterns.paths_of(stored, old)) or list(
                    _patterns.paths_of(stored, old.replace(r"\/", "/"))
                )
                if len(found) != 1:
                    problem = f"means {len(found)} things" if found else "is not stored"
                    near = _patterns.near_names(old, stored)
                    raise RuleError(f"{old}, for the target's {show_path(place)}, {problem}; {near}", leaf=old)
                places[place] = found[0]
                keys[place], examples[new] = new, place
        for idle in examples.keys() - set(keys.values()):
            shown = show_path(examples[idle])
            raise RuleError(
                f"{idle!r} matches only what {keys[examples[idle]]!r} matches, too, such as {shown}, and the later "
                "key is taken; leave one of them out",
                leaf=shown,
            )
        tree = stored
        for place in sorted(places, key=len):
            tree = _edit_tree.put(tree, place, node_at(stored, places[place]))
        # What was taken and has no place of its own in the target is used, and gone from its old place.
        wanted, taken = {path for path, _ in iter_leaves(target)}, set(places.values())

        def stays(path: Path) -> bool:
            was_taken, has_place = (_edit_tree.prefix_in(path, ends) is not None for ends in (taken, places))
            return path in wanted or not was_taken or has_place

        return _edit_tree.remap(tree, lambda path: [path] if stays(path) else [])

    return Rule(name, applied(name, apply))
