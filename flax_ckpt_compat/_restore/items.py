"""Plan a restore of a checkpoint of one item or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle, Reader
from flax_ckpt_compat._core.errors import NameCollisionError, UnrecognizedFormatError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, Node, Path, map_leaves
from flax_ckpt_compat._discovery import opening
from flax_ckpt_compat._discovery.log_once import log_once
from flax_ckpt_compat._restore.item_choice import ALL, choose_item
from flax_ckpt_compat._restore.match import plan_tree
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._restore.plan import RestorePlan, TreePlan
from flax_ckpt_compat._trees.state_dict import TargetTree


def plan_all(opened: opening.Opened, target: Any, options: RestoreOptions) -> RestorePlan:
    """Plan a restore of a checkpoint of one tree or several; raise if the target does not say which.

    Without a target, raise UnrecognizedFormatError if an item cannot be given: a part is never taken for the whole."""
    if target is None:
        _check_all_known(opened)
    if target is None and not opened.is_mapping:
        _log_omitted_json(opened)
        return RestorePlan({name: _plan_item(opened, name, None, options) for name in opened.parts}, False)
    if target is None:
        return _plan_everything(opened, options)
    if "" in opened.items:
        return RestorePlan({"": _plan_item(opened, "", described(target), options)}, False)
    is_mapping = _names_items(opened, target)
    if is_mapping and len(opened.trees) < 2:
        return RestorePlan(_plan_items(opened, target, options), True)
    target_tree = described(target)
    names_some = is_mapping or _names_some_items(opened, target, target_tree.node)
    name, fits = choose_item(opened, target_tree.node, options, prefers_all=names_some)
    if name == ALL and is_mapping:
        return RestorePlan(_plan_items(opened, target, options), True, fits)
    if name == ALL:
        return RestorePlan({"": _plan_as_one_tree(opened, target_tree, options)}, False, fits)
    return RestorePlan({name: _plan_item(opened, name, target_tree, options)}, False, fits)


def _check_all_known(opened: opening.Opened) -> None:
    if unread := opened.contents.unread:
        name = next(iter(opened.items))
        raise UnrecognizedFormatError(
            f"{opened.path} has items that only the handlers which wrote them can read: {', '.join(unread)}. Pass a "
            f"target for the others, or restore one: item={name!r} of restore, or its path, {opened.location / name}.",
            path=opened.path,
        )


def described(target: Any) -> TargetTree:
    """Return the tree of a target."""
    with memory.pause_gc():
        return TargetTree(target)


def _log_omitted_json(opened: opening.Opened) -> None:
    rest = [name for name in opened.items if name not in opened.trees]
    if opened.trees and rest:
        shown = ", ".join(rest)
        message = f"{opened.path}: left out of the result, which is one tree: JSON of {shown}"
        log_once(
            (opened.path, "json"),
            f"{message}; pass a target with these names, or restore one: item={rest[0]!r} of restore, or "
            f"its path, {opened.items[rest[0]].location}",
        )


def _names_items(opened: opening.Opened, target: Any) -> bool:
    """Return whether the target is a mapping of item names, and not a tree like that of the only item."""
    if not isinstance(target, Mapping) or not target.keys() <= opened.items.keys() or "" in opened.items:
        return False
    if len(opened.trees) != 1:
        return bool(target) or not opened.trees
    tree = opened.reader(next(iter(opened.trees))).tree
    return bool(target) and not (isinstance(tree, Branch) and target.keys() <= tree.children.keys())


def _names_some_items(opened: opening.Opened, target: Any, node: Node) -> bool:
    """Return whether the target's top-level names match items better than the leaves of the only tree."""
    if "" in opened.items:
        return False
    names = target.keys() if isinstance(target, Mapping) else node.children.keys() if isinstance(node, Branch) else ()
    if opened.trees.keys().isdisjoint(names):
        return False
    if len(opened.trees) > 1:
        return True  # `choose_item` compares how well they fit
    tree = opened.reader(next(iter(opened.trees))).tree
    inside = tree.children.keys() if isinstance(tree, Branch) else set[str]()
    return len(inside & set(names)) < len(opened.items.keys() & set(names))


def _plan_as_one_tree(opened: opening.Opened, target: TargetTree, options: RestoreOptions) -> TreePlan:
    """Plan all items as one tree with their names at the top."""
    tree = Branch({name: opened.reader(name).tree for name in opened.items})
    reader = opened.reader(next(iter(opened.trees)))
    return plan_with_rules(reader, map_leaves(at_whole_path, tree), target, options, opened.location)


def at_whole_path(path: Path, leaf: Any) -> Any:
    """Return a leaf with its path in the whole checkpoint instead of in its item."""
    is_elsewhere = isinstance(leaf, LeafHandle) and leaf.path != path
    return dataclasses.replace(leaf, path=path, stored_name=leaf.name) if is_elsewhere else leaf


def _plan_item(opened: opening.Opened, name: str, target: TargetTree | None, options: RestoreOptions) -> TreePlan:
    reader = opened.reader(name)
    return plan_with_rules(reader, reader.tree, target, options, opened.items[name].location)


def plan_with_rules(
    reader: Reader, tree: Node, target: TargetTree | None, options: RestoreOptions, location: Location
) -> TreePlan:
    """Plan a restore of one tree, to which the rules are applied first; arguments as for `plan_tree`."""
    tree = options.transforms.apply_rules(tree, None if target is None else target.node, location.path)
    return plan_tree(reader, tree, target, options, location)


def _plan_everything(opened: opening.Opened, options: RestoreOptions) -> RestorePlan:
    """Plan several items without a target: all that the rules make of them, under whatever names."""
    tree = _tree_of_items(opened, {}, options)
    if not isinstance(tree, Branch):
        return RestorePlan({"": _plan_part(opened, "", tree, None, options)}, False)
    json = [name for name in opened.parts if name not in opened.trees]
    if taken := [name for name in json if name in tree.children]:
        raise NameCollisionError(
            f"{opened.path}: a rule gives a subtree the name of the JSON item {taken[0]!r}; give it another",
            path=opened.path,
            leaf=taken[0],
        )
    names = [name for name in opened.parts if name in tree.children or name in json]
    names += [name for name in tree.children if name not in names]
    return RestorePlan({name: _plan_part(opened, name, tree, None, options) for name in names}, True)


def _plan_items(opened: opening.Opened, targets: Mapping[str, Any], options: RestoreOptions) -> dict[str, TreePlan]:
    """Plan the items that a target names."""
    target_trees = {name: TargetTree(part) for name, part in targets.items() if part is not None}
    tree = _tree_of_items(opened, target_trees, options)
    plans = {name: _plan_part(opened, name, tree, target_trees.get(name), options) for name in targets}
    if isinstance(tree, Branch):
        # An item without a target is restored as it is.
        wanted = {
            name: target_trees[name].node if name in target_trees else tree.children.get(name) for name in targets
        }
        for plan in plans.values():
            plan.all_items = tree, Branch(wanted)
    return plans


def _tree_of_items(opened: opening.Opened, targets: Mapping[str, TargetTree], options: RestoreOptions) -> Node:
    """Return what rules make of all items: they see them as one tree with the item names at the top."""
    tree: Node = Branch({name: opened.reader(name).tree for name in opened.trees})
    nodes = {name: part.node for name, part in targets.items()}
    return options.transforms.apply_rules(tree, Branch(nodes) if nodes else None, opened.path)


def _plan_part(
    opened: opening.Opened, name: str, tree: Node, target: TargetTree | None, options: RestoreOptions
) -> TreePlan:
    """Plan one item of a tree of items, or another name that rules gave."""
    if name in opened.items and name not in opened.trees:
        # JSON items are restored as they are; targets and rules do not apply.
        reader = opened.reader(name)
        return plan_tree(reader, reader.tree, None, RestoreOptions(options.settings), opened.items[name].location)
    is_item = name in opened.items
    reader = opened.reader(name if is_item else next(iter(opened.trees)))
    location = opened.items[name].location if is_item else opened.location
    part = tree.children.get(name, Branch({})) if isinstance(tree, Branch) else Branch({}) if is_item else tree
    return plan_tree(reader, part, target, options, location)
