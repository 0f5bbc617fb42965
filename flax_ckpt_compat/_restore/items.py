"""Plan a restore of a checkpoint of one item or several: the target's structure decides which, names between equals."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from typing import Any, NamedTuple

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    KindMismatchError,
    NameCollisionError,
    UnrecognizedFormatError,
)
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, map_leaves
from flax_ckpt_compat._discovery import opening
from flax_ckpt_compat._discovery.saved_steps import log_once
from flax_ckpt_compat._restore.match import plan_tree
from flax_ckpt_compat._restore.plan import RestoreOptions, RestorePlan, TreePlan
from flax_ckpt_compat._trees.state_dict import TargetTree

_ALL = ""  # in place of an item's name: the target has items by their names
_MAX_SHOWN = 8


def plan_all(opened: opening.Opened, target: Any, options: RestoreOptions) -> RestorePlan:
    """Plan a restore of a checkpoint of one tree or several; raise if the target does not say which.

    Without a target, raise UnrecognizedFormatError if an item cannot be given: a part is never taken for the whole."""
    if target is None:
        _check_all_known(opened)
        if opened.is_mapping:
            return _plan_items(opened, None, options)
        _log_omitted_json(opened)
        return RestorePlan({name: _plan_item(opened, name, None, options) for name in opened.parts}, False)
    with memory.pause_gc():
        target_tree = TargetTree(target)
    if "" in opened.items:
        return RestorePlan({"": _plan_item(opened, "", target_tree, options)}, False)
    is_mapping = _names_items(opened, target)
    if is_mapping and len(opened.trees) < 2:
        return _plan_items(opened, target, options)
    prefers_all = is_mapping or _names_some_items(opened, target, target_tree.node)
    name, fits = _choose_item(opened, target_tree.node, options, prefers_all=prefers_all)
    if name == _ALL and is_mapping:
        return dataclasses.replace(_plan_items(opened, target, options), fits=fits)
    if name == _ALL:
        tree = map_leaves(at_whole_path, Branch({name: opened.reader(name).tree for name in opened.items}))
        tree = options.transforms.apply_rules(tree, target_tree.node, opened.path)
        reader = opened.reader(next(iter(opened.trees)))
        return RestorePlan({"": plan_tree(reader, tree, target_tree, options, opened.location)}, False, fits)
    return RestorePlan({name: _plan_item(opened, name, target_tree, options)}, False, fits)


def _check_all_known(opened: opening.Opened) -> None:
    if unread := opened.contents.unread:
        name = next(iter(opened.items))
        raise UnrecognizedFormatError(
            f"{opened.path} has items that only the handlers which wrote them can read: {one_line(unread)}. Pass a "
            f"target for the others, or restore one: item={name!r} of restore, or its path, {opened.location / name}.",
            path=opened.path,
        )


def _log_omitted_json(opened: opening.Opened) -> None:
    rest = [name for name in opened.items if name not in opened.trees]
    if opened.trees and rest:
        log_once(
            (opened.path, "json"),
            f"{opened.path}: left out of the result, which is one tree: JSON of {one_line(rest)}; pass a target with "
            f"these names, or restore one: item={rest[0]!r} of restore, or its path, {opened.items[rest[0]].location}",
        )


def _names_items(opened: opening.Opened, target: Any) -> bool:
    """Return whether the target is a mapping of item names, and not a tree like that of the only item."""
    if not isinstance(target, Mapping) or not target.keys() <= opened.items.keys():
        return False
    if len(opened.trees) != 1:
        return bool(target) or not opened.trees
    return bool(target) and not target.keys() <= _names_in_only_tree(opened)


def _names_some_items(opened: opening.Opened, target: Any, node: Node) -> bool:
    """Return whether the target's top-level names match items better than the leaves of the only tree."""
    names = target.keys() if isinstance(target, Mapping) else node.children.keys() if isinstance(node, Branch) else ()
    if opened.trees.keys().isdisjoint(names):
        return False
    if len(opened.trees) > 1:
        return True  # `_choose_item` compares how well they fit
    return len(_names_in_only_tree(opened) & set(names)) < len(opened.items.keys() & set(names))


def _names_in_only_tree(opened: opening.Opened) -> Set[str]:
    tree = opened.reader(next(iter(opened.trees))).tree
    return tree.children.keys() if isinstance(tree, Branch) else set()


def at_whole_path(path: Path, leaf: Any) -> Any:
    """Return a leaf with its path in the whole checkpoint instead of in its item."""
    is_elsewhere = isinstance(leaf, LeafHandle) and leaf.path != path
    return dataclasses.replace(leaf, path=path, stored_name=leaf.name) if is_elsewhere else leaf


def _plan_item(opened: opening.Opened, name: str, target: TargetTree | None, options: RestoreOptions) -> TreePlan:
    """Plan a restore of one item, to which the rules are applied first."""
    reader, location = opened.reader(name), opened.items[name].location
    tree = options.transforms.apply_rules(reader.tree, None if target is None else target.node, location.path)
    return plan_tree(reader, tree, target, options, location)


def _plan_items(opened: opening.Opened, targets: Mapping[str, Any] | None, options: RestoreOptions) -> RestorePlan:
    """Plan the items that a target names, or, without one, all that the rules make of them, under whatever names."""
    parts = {name: TargetTree(part) for name, part in (targets or {}).items() if part is not None}
    nodes = {name: part.node for name, part in parts.items()}
    # Rules see all items as one tree with their names at the top.
    tree: Node = Branch({name: opened.reader(name).tree for name in opened.trees})
    tree = options.transforms.apply_rules(tree, Branch(nodes) if nodes else None, opened.path)
    if targets is None and not isinstance(tree, Branch):
        reader = opened.reader(next(iter(opened.trees)))
        return RestorePlan({"": plan_tree(reader, tree, None, options, opened.location)}, False)
    names = targets if targets is not None else _names_of_result(opened, tree)
    plans = {name: _plan_part(opened, name, tree, parts.get(name), options) for name in names}
    if isinstance(tree, Branch):
        as_stored = {name: tree.children.get(name) for name in names}  # items without a target
        for name, plan in plans.items():
            plan.item, plan.all_items = name, (tree, Branch(as_stored | nodes))
    return RestorePlan(plans, True)


def _names_of_result(opened: opening.Opened, tree: Branch) -> Collection[str]:
    json = [name for name in opened.parts if name not in opened.trees]
    if taken := [name for name in json if name in tree.children]:
        raise NameCollisionError(
            f"{opened.path}: a rule gives a subtree the name of the JSON item {taken[0]!r}; give it another",
            path=opened.path,
            leaf=taken[0],
        )
    known = [name for name in opened.parts if name in tree.children or name in json]
    return dict.fromkeys([*known, *tree.children])


def _plan_part(
    opened: opening.Opened, name: str, tree: Node, target: TargetTree | None, options: RestoreOptions
) -> TreePlan:
    """Plan one item of a tree of items, or another name that rules gave."""
    part = tree.children.get(name, Branch({})) if isinstance(tree, Branch) else Branch({})
    if name not in opened.items:
        return plan_tree(opened.reader(next(iter(opened.trees))), part, target, options, opened.location)
    reader, location = opened.reader(name), opened.items[name].location
    if name not in opened.trees:  # JSON items are restored as they are; targets and rules do not apply
        return plan_tree(reader, reader.tree, None, RestoreOptions(options.settings), location)
    return plan_tree(reader, part, target, options, location)


class _Fit(NamedTuple):
    """A comparison of one item with a target."""

    name: str
    found: int = 0  # leaves of the target that it has
    unused: int = 0  # leaves that it has besides
    error: CheckpointError | None = None  # it does not open, or the rules do not fit it

    def shown(self, wanted: int) -> str:
        """Return the item, and how many of the target's leaves it has."""
        if self.error is not None:
            return f"{self.name} (does not open)"
        if self.name == _ALL:
            return f"all of them, by their names ({self.found} of {wanted} leaves)"
        besides = f", {self.unused} besides" if self.unused else ""
        return f"{self.name} ({self.found} of {wanted} leaves{besides})"


def _choose_item(
    opened: opening.Opened, target: Node, options: RestoreOptions, *, prefers_all: bool
) -> tuple[str, str]:
    """Return the item that a target means, or `_ALL`, and, if several were looked at, how each fits.

    An exact match comes first, then what has most of the target's leaves; between equals, all items if the target names
    them (``prefers_all``), else a usual name decides. Rules may give the items the target's names, so that all of them
    are a choice there too. Raise KindMismatchError if there is no tree, or nothing decides."""
    if not opened.trees:
        raise KindMismatchError(
            f"{opened.path} holds no tree of arrays, only JSON ({one_line(opened.items)}); restore it without a "
            "target, or with a dict of these names",
            path=opened.path,
        )
    if len(opened.trees) == 1:
        return _ALL if prefers_all else next(iter(opened.trees)), ""
    wanted = _paths(target)
    fits = [_fit(opened, name, target, wanted, options) for name in opened.trees]
    if prefers_all or options.transforms.rules:
        fits.append(_fit_of_all(fits, opened, target, wanted, options))
    more = f" and {len(fits) - _MAX_SHOWN} more" if len(fits) > _MAX_SHOWN else ""
    shown = ", ".join(fit.shown(len(wanted)) for fit in fits[:_MAX_SHOWN]) + more
    told = f"Its items fit the target so: {shown}."
    ranks = [(not fit.error and fit.found == len(wanted) and not fit.unused, fit.found) for fit in fits]
    equals = [fit for fit, rank in zip(fits, ranks, strict=True) if rank == max(ranks)]
    best = {fit.name: fit for fit in equals if fit.error is None} or {fit.name: fit for fit in equals}
    if _ALL in best and (prefers_all or len(best) == 1):
        return _ALL, told
    names = [name for name in best if name != _ALL]
    chosen = names[0] if len(names) == 1 else next((name for name in layout.TREE_ITEMS if name in names), None)
    if chosen is None:
        raise KindMismatchError(
            f"{opened.path} holds several trees ({shown}), equally like the target; pass a dict of them, or restore "
            f"one: item={names[0]!r} of restore, or its path, {opened.location / names[0]}.",
            path=opened.path,
        )
    if (error := best[chosen].error) is not None:
        raise error
    return chosen, told


def _fit_of_all(
    fits: list[_Fit], opened: opening.Opened, target: Node, wanted: set[Path], options: RestoreOptions
) -> _Fit:
    """Return how well all items as one tree, with their names at the top, fit a target that names some of them."""
    renamed = opened.items.keys() if options.transforms.rules else set[str]()
    named = renamed | ({path[0] for path in wanted if path} & opened.items.keys())
    tree: Node = Branch({fit.name: opened.reader(fit.name).tree for fit in fits if fit.name in named and not fit.error})
    if options.transforms.rules:
        with suppress(CheckpointError):
            tree = options.transforms.apply_rules(tree, target, opened.path, warns=False)
    there = _paths(tree)
    json = {path for path in wanted if path and path[0] in named and path[0] not in opened.trees}
    return _Fit(_ALL, len(there & wanted) + len(json), len(there - wanted))


def _fit(opened: opening.Opened, name: str, target: Node, wanted: set[Path], options: RestoreOptions) -> _Fit:
    try:
        tree = opened.reader(name).tree
        if options.transforms.rules:
            tree = options.transforms.apply_rules(tree, target, opened.items[name].location.path, warns=False)
    except CheckpointError as error:
        is_damage = isinstance(error, CorruptCheckpointError)
        return _Fit(name, error=error if is_damage or not options.transforms.rules else None)
    there = _paths(tree)
    return _Fit(name, len(there & wanted), len(there - wanted))


def _paths(tree: Node) -> set[Path]:
    """Return the key paths of leaves; None and ``...`` ask for nothing."""
    leaves = iter_leaves(tree)
    return {path for path, leaf in leaves if leaf is not None and leaf is not ... and not isinstance(leaf, Branch)}
