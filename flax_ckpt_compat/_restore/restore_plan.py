"""Plan a restore, tree by tree: the source of every target leaf. Reads no array data."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._core import memory, paths
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Branch, Node, Path, map_leaves
from flax_ckpt_compat._discovery import detect, notices, opening
from flax_ckpt_compat._restore import matching
from flax_ckpt_compat._restore.transform_spec import TransformSpec
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import FromCheckpoint

_log = logging.getLogger("flax_ckpt_compat")
_SHORT_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class TreePlan:
    """Plan for one tree.

    Attributes:
        path: file or directory, for messages.
        reader: of the checkpoint's tree.
        target: the user's tree, or None.
        tree: the checkpoint's tree after the rules.
        match: the source of each leaf. Without a target, its sources are a tree like the checkpoint's.
        custom_paths: key paths of target nodes with custom serialization, which take any stored structure.
        transforms: the caller's rules and transforms.
    """

    path: str
    reader: Any
    target: state_dict.TargetTree | None
    tree: Node
    match: matching.Match
    custom_paths: frozenset[Path]
    transforms: TransformSpec

    @property
    def is_short(self) -> bool:
        """Return whether it takes well under a second: few bytes, on a local disk, without rules or transforms."""
        is_plain = not self.transforms.rules and not self.transforms.orbax_semantics
        return is_plain and not paths.is_url(self.path) and _nbytes(self.tree) < _SHORT_BYTES

    @property
    def arrays(self) -> int:
        """Return the number of target arrays that come from stored ones."""
        return sum(
            isinstance(one.node, LeafHandle) and one.node.kind is LeafKind.ARRAY and hasattr(one.target, "shape")
            for one in _stored(self.match.sources)
        )

    def suggest(self) -> Any:
        """Return the `flax_ckpt_compat._suggest.Suggestion` for missing leaves and other shapes, or None."""
        from flax_ckpt_compat import _suggest  # most restores need none of it

        if self.target is None or not (self.match.missing or self.match.shapes):
            return None
        try:
            return _suggest.suggest(self.tree, self.target.node)
        except Exception:  # noqa: BLE001  (a guess that fails must not hide what is missing)
            _log.debug("no suggestion for %s", self.path, exc_info=True)
            return None

    def without_custom_paths(self) -> TreePlan:
        """Return the plan matched leaf by leaf below nodes with custom serialization too."""
        assert self.target is not None
        match = _match(self.tree, self.target.node, self.transforms, frozenset())
        return dataclasses.replace(self, match=match, custom_paths=frozenset())


def _stored(sources: Any) -> Iterator[FromCheckpoint]:
    if isinstance(sources, dict):
        for child in sources.values():
            yield from _stored(child)
    elif isinstance(sources, FromCheckpoint):
        yield sources


def _nbytes(node: Node) -> int:
    """Return the size of a tree of leaf handles in bytes."""
    if isinstance(node, Branch):
        # Most children are leaves, and a call for each would take as long as the sum.
        children = node.children.values()
        return sum([child.nbytes if type(child) is LeafHandle else _nbytes(child) for child in children])
    return node.nbytes if isinstance(node, LeafHandle) else 0


def plan_tree(reader: Any, tree: Node, target: Any, transforms: TransformSpec, path: str) -> TreePlan:
    """Plan a restore of one tree.

    Args:
        reader: of the checkpoint.
        tree: its tree, or a part of it.
        target: the user's tree, or None.
        transforms: the caller's rules and transforms.
        path: for messages.

    Raises:
        TransformError, NameCollisionError: a rule or transform that does not fit.
    """
    with memory.pause_gc():
        target_tree = None if target is None else state_dict.TargetTree(target)
    node = None if target_tree is None else target_tree.node
    return _plan_node(reader, transforms.apply_rules(tree, node, path), target_tree, transforms, path)


def _plan_node(
    reader: Any, tree: Node, target: state_dict.TargetTree | None, transforms: TransformSpec, path: str
) -> TreePlan:
    """Plan a tree whose rules have been applied."""
    if target is None:
        match = matching.Match(sources=map_leaves(lambda _, leaf: FromCheckpoint(leaf, None), tree))
        return TreePlan(path, reader, target, tree, match, frozenset(), transforms)
    with memory.pause_gc():
        custom_paths = frozenset(target.custom_serialized_paths())
        match = _match(tree, target.node, transforms, custom_paths)
    return TreePlan(path, reader, target, tree, match, custom_paths, transforms)


def _match(tree: Node, target: Node, transforms: TransformSpec, custom_paths: frozenset[Path]) -> matching.Match:
    return matching.match(
        tree,
        target,
        lenient=transforms.orbax_semantics,
        is_custom=custom_paths.__contains__,
        choose=transforms.chooser(tree),
        cast=config.current().dtype == "target",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RestorePlan:
    """Plan for a checkpoint.

    Attributes:
        items: item name → its plan; '' for a checkpoint, or a target, that is one tree.
        is_mapping: the result is a mapping of item name → tree.
    """

    items: Mapping[str, TreePlan]
    is_mapping: bool


def plan_all(opened: opening.Opened, target: Any, transforms: TransformSpec) -> RestorePlan:
    """Plan a restore of a checkpoint of one tree or several.

    Raises:
        CheckpointError: several trees, and a target that does not say which.
    """
    if target is None and not opened.is_mapping:
        _log_omitted_json(opened)
        return RestorePlan({name: _item(opened, name, None, transforms) for name in opened.parts}, False)
    if target is None:
        return RestorePlan(_items(opened, dict.fromkeys(opened.parts), transforms), True)
    if _names_items(opened, target):
        return RestorePlan(_items(opened, target, transforms), True)
    name = "" if "" in opened.items else main_item(opened)
    return RestorePlan({name: _item(opened, name, target, transforms)}, False)


def _log_omitted_json(opened: opening.Opened) -> None:
    rest = [name for name in opened.items if name not in opened.trees]
    if opened.trees and rest:
        shown = ", ".join(rest)
        message = f"{opened.path}: left out of the result, which is one tree: JSON of {shown}"
        notices.log_once(
            (opened.path, "json"), f"{message}; pass a target with these names, or restore {opened.items[rest[0]].path}"
        )


def _names_items(opened: opening.Opened, target: Any) -> bool:
    """Return whether the target is a mapping of item names, and not a tree like that of the only item."""
    if not isinstance(target, Mapping) or not target.keys() <= opened.items.keys() or "" in opened.items:
        return False
    if len(opened.trees) != 1:
        return bool(target) or not opened.trees
    tree = opened.reader(next(iter(opened.trees))).tree
    return bool(target) and not (isinstance(tree, Branch) and target.keys() <= tree.children.keys())


def _item(opened: opening.Opened, name: str, target: Any, transforms: TransformSpec) -> TreePlan:
    reader, path = opened.reader(name), opened.items[name].path
    return plan_tree(reader, reader.tree, target, transforms, path)


def _items(opened: opening.Opened, targets: Mapping[str, Any], transforms: TransformSpec) -> dict[str, TreePlan]:
    """Plan several items; rules see them as one tree with the item names at the top."""
    target_trees = {name: state_dict.TargetTree(part) for name, part in targets.items() if part is not None}
    trees: Node = Branch({name: opened.reader(name).tree for name in opened.trees})
    if transforms.rules:
        nodes = {name: part.node for name, part in target_trees.items()}
        trees = transforms.apply_rules(trees, Branch(nodes) if nodes else None, opened.path)
    plans = {}
    for name in targets:
        reader, path = opened.reader(name), opened.items[name].path
        if name not in opened.trees:
            # JSON items are restored as they are; targets and rules do not apply.
            plans[name] = plan_tree(reader, reader.tree, None, TransformSpec(None), path)
            continue
        tree = trees.children.get(name, Branch({})) if isinstance(trees, Branch) else Branch({})
        item_reader = _MultiItemReader(reader, path) if transforms.rules else reader
        plans[name] = _plan_node(item_reader, tree, target_trees.get(name), transforms, path)
    return plans


class _MultiItemReader:
    """Reader of the leaves of all items: a rule may move leaves from one item to another."""

    def __init__(self, reader: Any, path: str):
        self.format, self.path = reader.format, path

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:
        """See `flax_ckpt_compat._core.backend.Reader.read`."""
        owners = [(one.handle if isinstance(one, ArraySlice) else one).reader for one in handles]
        values: dict[int, Any] = {}
        for owner in dict.fromkeys(owners):
            mine = [number for number, one in enumerate(owners) if one is owner]
            values.update(zip(mine, owner.read([handles[number] for number in mine], mapped=mapped), strict=True))
        return [values[number] for number in range(len(handles))]


def main_item(opened: opening.Opened) -> str:
    """Return the item that a target stands for which is not a mapping of items.

    Raises:
        CheckpointError: several trees, none of which has a usual name.
    """
    if len(opened.trees) == 1:
        return next(iter(opened.trees))
    for name in detect.USUAL_ITEMS:
        if name in opened.trees:
            return name
    if not opened.trees:
        raise CheckpointError(
            f"{opened.path} holds no tree of arrays, only JSON ({', '.join(opened.items)}); restore it without a "
            "target, or with a dict of these names",
            path=opened.path,
        )
    raise CheckpointError(
        f"{opened.path} holds several trees ({', '.join(opened.items)}) and the target is not a dict of them; restore "
        f"one by its own path, such as {os.path.join(opened.path, next(iter(opened.items)))}.",
        path=opened.path,
    )
