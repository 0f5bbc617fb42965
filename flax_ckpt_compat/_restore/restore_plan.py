"""What a restore is going to do, tree by tree: which target leaf gets what. Reads no array data."""

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
    """One tree that is to be restored.

    Attributes:
        path: of its file or directory, for messages.
        reader: of the checkpoint's tree.
        target: the user's tree, or None.
        tree: the checkpoint's tree after the rules.
        match: what each leaf gets. Without a target, its sources are a tree like the checkpoint's.
        own_rules: the target's nodes that take whatever there is.
        adaptation: the caller's rules and transforms.
    """

    path: str
    reader: Any
    target: state_dict.TargetTree | None
    tree: Node
    match: matching.Match
    own_rules: frozenset[Path]
    adaptation: TransformSpec

    @property
    def is_short(self) -> bool:
        """Whether carrying it out takes well under a second: few bytes, on a local disk, and no functions of others."""
        is_plain = not self.adaptation.rules and not self.adaptation.orbax_semantics
        return is_plain and not paths.is_url(self.path) and _nbytes(self.tree) < _SHORT_BYTES

    @property
    def arrays(self) -> int:
        """How many arrays of the target come from stored ones."""
        return sum(
            isinstance(one.node, LeafHandle) and one.node.kind is LeafKind.ARRAY and hasattr(one.target, "shape")
            for one in _stored(self.match.sources)
        )

    def suggest(self) -> Any:
        """The `flax_ckpt_compat._suggest.Suggestion` for what is missing or of another shape, or None."""
        from flax_ckpt_compat import _suggest  # most restores need none of it

        if self.target is None or not (self.match.missing or self.match.shapes):
            return None
        try:
            return _suggest.suggest(self.tree, self.target.node)
        except Exception:  # noqa: BLE001  (a guess that fails must not hide what is missing)
            _log.debug("no suggestion for %s", self.path, exc_info=True)
            return None

    def without_own_rules(self) -> TreePlan:
        """The same, leaf by leaf also below nodes that have rules of their own."""
        assert self.target is not None  # only targets have rules
        match = _match(self.tree, self.target.node, self.adaptation, frozenset())
        return dataclasses.replace(self, match=match, own_rules=frozenset())


def _stored(sources: Any) -> Iterator[FromCheckpoint]:
    if isinstance(sources, dict):
        for child in sources.values():
            yield from _stored(child)
    elif isinstance(sources, FromCheckpoint):
        yield sources


def _nbytes(node: Node) -> int:
    """Bytes of a tree of leaf handles."""
    if isinstance(node, Branch):
        # Most children are leaves, and a call for each would take as long as the sum.
        children = node.children.values()
        return sum([child.nbytes if type(child) is LeafHandle else _nbytes(child) for child in children])
    return node.nbytes if isinstance(node, LeafHandle) else 0


def plan_tree(reader: Any, tree: Node, target: Any, adaptation: TransformSpec, path: str) -> TreePlan:
    """Decides what a restore of one tree does.

    Args:
        reader: of the checkpoint.
        tree: its tree, or a part of it.
        target: the user's tree, or None.
        adaptation: the caller's rules and transforms.
        path: for messages.

    Raises:
        TransformError, NameCollisionError: a rule or transform that does not fit.
    """
    with memory.pause_gc():
        described = None if target is None else state_dict.TargetTree(target)
    node = None if described is None else described.node
    return _decide(reader, adaptation.through_rules(tree, node, path), described, adaptation, path)


def _decide(
    reader: Any, tree: Node, target: state_dict.TargetTree | None, adaptation: TransformSpec, path: str
) -> TreePlan:
    """Decides where rules have been applied."""
    if target is None:
        match = matching.Match(sources=map_leaves(lambda _, leaf: FromCheckpoint(leaf, None), tree))
        return TreePlan(path, reader, target, tree, match, frozenset(), adaptation)
    with memory.pause_gc():
        own_rules = frozenset(target.custom_serialized_paths())
        match = _match(tree, target.node, adaptation, own_rules)
    return TreePlan(path, reader, target, tree, match, own_rules, adaptation)


def _match(tree: Node, described: Node, adaptation: TransformSpec, own_rules: frozenset[Path]) -> matching.Match:
    return matching.match(
        tree,
        described,
        lenient=adaptation.orbax_semantics,
        takes_anything=own_rules.__contains__,
        choose=adaptation.chooser(tree),
        cast=config.current().dtype == "target",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RestorePlan:
    """All that a restore of a checkpoint does.

    Attributes:
        items: item name → its work; '' for a checkpoint, or a target, that is one tree.
        is_mapping: whether the result is a mapping of item name → tree.
    """

    items: Mapping[str, TreePlan]
    is_mapping: bool


def plan_all(opened: opening.Opened, target: Any, adaptation: TransformSpec) -> RestorePlan:
    """Decides what a restore of a checkpoint of one tree or several does.

    Raises:
        CheckpointError: several trees, and a target that does not say which.
    """
    if target is None and not opened.is_mapping:
        _tell_what_is_left_out(opened)
        return RestorePlan({name: _item(opened, name, None, adaptation) for name in opened.parts}, False)
    if target is None:
        return RestorePlan(_items(opened, dict.fromkeys(opened.parts), adaptation), True)
    if _names_items(opened, target):
        return RestorePlan(_items(opened, target, adaptation), True)
    name = "" if "" in opened.items else main_item(opened)
    return RestorePlan({name: _item(opened, name, target, adaptation)}, False)


def _tell_what_is_left_out(opened: opening.Opened) -> None:
    rest = [name for name in opened.items if name not in opened.trees]
    if opened.trees and rest:
        shown = ", ".join(rest)
        message = f"{opened.path}: left out of the result, which is one tree: JSON of {shown}"
        notices.tell_once(
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


def _item(opened: opening.Opened, name: str, target: Any, adaptation: TransformSpec) -> TreePlan:
    reader, path = opened.reader(name), opened.items[name].path
    return plan_tree(reader, reader.tree, target, adaptation, path)


def _items(opened: opening.Opened, targets: Mapping[str, Any], adaptation: TransformSpec) -> dict[str, TreePlan]:
    """The works of several items; rules see them as one tree, whose first names are those of the items."""
    described = {name: state_dict.TargetTree(part) for name, part in targets.items() if part is not None}
    trees: Node = Branch({name: opened.reader(name).tree for name in opened.trees})
    if adaptation.rules:
        nodes = {name: part.node for name, part in described.items()}
        trees = adaptation.through_rules(trees, Branch(nodes) if nodes else None, opened.path)
    works = {}
    for name in targets:
        reader, path = opened.reader(name), opened.items[name].path
        if name not in opened.trees:
            # Neither a target nor a rule says anything about a JSON item, which is restored as it is.
            works[name] = plan_tree(reader, reader.tree, None, TransformSpec(None), path)
            continue
        tree = trees.children.get(name, Branch({})) if isinstance(trees, Branch) else Branch({})
        across = _Across(reader, path) if adaptation.rules else reader
        works[name] = _decide(across, tree, described.get(name), adaptation, path)
    return works


class _Across:
    """Reads leaves of all items, since a rule may move them from one to another."""

    def __init__(self, reader: Any, path: str):
        self.format, self.path = reader.format, path

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:
        """See `flax_ckpt_compat._core.backend.Reader.read`."""
        owners = [(one.handle if isinstance(one, ArraySlice) else one).reader for one in handles]
        values: dict[int, Any] = {}
        for owner in {id(owner): owner for owner in owners}.values():
            mine = [number for number, one in enumerate(owners) if one is owner]
            values.update(zip(mine, owner.read([handles[number] for number in mine], mapped=mapped), strict=True))
        return [values[number] for number in range(len(handles))]


def main_item(opened: opening.Opened) -> str:
    """The item that a target means which is no mapping of items.

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
