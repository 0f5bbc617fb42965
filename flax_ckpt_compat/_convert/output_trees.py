"""Describe what a job writes: the trees of the source, in the containers that the result gets, and items to copy."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax_ckpt_compat._convert import item_copies, safetensors, stored_trees
from flax_ckpt_compat._convert.item_copies import Copy
from flax_ckpt_compat._convert.jobs import FILES, TO_STEPS, Job
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    MissingLeavesError,
    NameCollisionError,
    UnsupportedLeafError,
)
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, KeyData, Node, Path, StoredArray, iter_leaves, show_path
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._discovery.orbax_directory import Layout
from flax_ckpt_compat._discovery.orbax_items import RANDOM_KEYS, ItemKind, kind_of_item, recorded_handlers
from flax_ckpt_compat._discovery.orbax_trees import beside_tree, names_in
from flax_ckpt_compat._view import metadata

# The names of a step's only tree, as Orbax's managers write it by default.
ITEM = {"manager": "default", "v1": "state", "orbax": "default"}
_HANDLERS = "orbax.checkpoint._src.handlers."
_V1_HANDLERS = "orbax.checkpoint.experimental.v1._src.handlers."
# The handlers of Orbax 0.12.8 (measured).
_TREES = {
    "v1": f"{_V1_HANDLERS}pytree_handler.PyTreeHandler",
    "": f"{_HANDLERS}standard_checkpoint_handler.StandardCheckpointHandler",
}
_ARRAY = f"{_HANDLERS}array_checkpoint_handler.ArrayCheckpointHandler"
_KEY = f"{_HANDLERS}random_key_checkpoint_handler.{{}}RandomKeyCheckpointHandler"
_JSON = f"{_HANDLERS}json_checkpoint_handler.JsonCheckpointHandler"  # v1 reads what it has written, too
_METRICS = f"{_V1_HANDLERS}json_handler.MetricsHandler"  # v1's for the item of this name
_OF_LEAVES = (ItemKind.TREE, ItemKind.ARRAY, ItemKind.KEY)


@dataclasses.dataclass(slots=True)
class Output:
    """Trees, other items and metadata of a result."""

    trees: dict[str, Node]  # item name → tree to write; the only item of a layout without items is ''
    # Item name → item to copy as it is, and the tree of one that this library reads, to compare and to count.
    copies: dict[str, Copy] = dataclasses.field(default_factory=dict)
    copied_trees: dict[str, Node] = dataclasses.field(default_factory=dict)
    files: dict[str, Location] = dataclasses.field(default_factory=dict)  # relative path → other file, to copy
    handlers: dict[str, str] = dataclasses.field(default_factory=dict)  # item name → name of the handler that reads it
    custom: dict[str, Any] = dataclasses.field(default_factory=dict)  # Orbax's custom metadata of the checkpoint
    custom_of_trees: dict[str, Any] = dataclasses.field(default_factory=dict)  # item name → that of the tree alone
    # Item name → Orbax's record of a tree's tuples and namedtuples.
    rich_types: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)  # what to know about the result
    left_out: list[str] = dataclasses.field(default_factory=list)  # what it lacks of the source

    @property
    def has_items(self) -> bool:
        """Return whether the result is a directory of items, and not one of them."""
        return "" not in self.trees and "" not in self.copies

    @property
    def leaves(self) -> dict[tuple[str, Path], Any]:
        """Return (item, key path) → leaf or empty container."""
        trees = {**self.trees, **self.copied_trees}
        return {(item, path): leaf for item, tree in trees.items() for path, leaf in iter_leaves(tree)}

    @property
    def nbytes(self) -> int:
        """Return the size of all arrays in memory, in bytes."""
        return sum(array_nbytes(leaf) for leaf in self.leaves.values())


def array_nbytes(leaf: Any) -> int:
    """Return the size of an array, in bytes; 0 for other leaves."""
    array = leaf.data if isinstance(leaf, KeyData) else leaf
    return array.nbytes if isinstance(array, StoredArray) else 0


def output_of(opened: Opened, job: Job) -> Output:
    """Return what a job writes of an open checkpoint.

    Raise MissingLeavesError if the target has other leaves, and UnsupportedLeafError for an item that the layout has no
    place for."""
    notes: list[str] = []
    items = _Items(opened, job)
    if job.to in FILES:
        items.check_all_are_leaves()
    if job.transforms is None:
        trees = _stored(items, notes)
    else:
        if not opened.items:
            raise UnsupportedLeafError(
                f"{opened.path}: only their own handlers read its items, so there is nothing to transform; convert it "
                "without transforms",
                path=opened.path,
            )
        from flax_ckpt_compat._convert import transformed  # it imports jax

        trees, items.is_mapping = transformed.trees_of(opened, job, items.rewritten, notes)
    if any(isinstance(leaf, KeyData) for tree in trees.values() for _, leaf in iter_leaves(tree)):
        import jax  # noqa: F401  (the Orbax format records a device for PRNG keys that have none)
    found = _arranged(trees, items)
    if job.to not in FILES:
        found.trees = {name: stored_trees.in_stored_order(tree) for name, tree in found.trees.items()}
    if job.sharding == "drop":
        found.trees = {name: stored_trees.without_shardings(tree) for name, tree in found.trees.items()}
    if job.to == "safetensors":
        found.trees = {"": safetensors.prepared(found.trees[""])}
        notes += safetensors.note_of_others(found.trees[""])
    found.notes = notes
    if items.beside:
        others = f"other files in its directory: {one_line(items.names_beside)}"
        if job.to in FILES:
            found.left_out.append(others)
        else:
            notes.append(f"copied: {others}")
    if unknown := [name for name, copy in found.copies.items() if copy.kind is ItemKind.UNKNOWN]:
        whole = "" in unknown
        notes.append(
            "copied byte for byte, as only the handler that wrote it reads it"
            if whole
            else f"copied byte for byte, as only their own handlers read them: {one_line(unknown)}"
        )
    described = metadata.read_metadata(opened)
    _add_metadata(found, items, described)
    if job.to == "msgpack" and described.writer is None and job.target is None:
        notes.extend(_note_of_nones(opened, trees))
    if job.items is not None:  # what lies beside an item was not asked for
        notes.extend(f"not converted: {what}" for what in found.left_out)
        found.left_out = []
    return found


def _add_metadata(found: Output, items: _Items, described: metadata.Metadata) -> None:
    """Add the custom metadata that the layout keeps, and name what it does not."""
    job = items.job
    if job.to not in FILES:
        found.custom = dict(described.custom)
    elif described.custom:
        found.left_out.append("custom metadata")
    for name, custom in described.custom_of_trees.items():
        if job.to not in FILES and name not in items.rewritten:
            continue  # its copy has it
        if job.to not in FILES and name in items.names and isinstance(custom, dict):
            found.custom_of_trees[items.names[name]] = custom
        else:
            found.left_out.append("custom metadata of trees")
            break
    if job.to not in FILES and job.target is None and job.transforms is None:
        found.rich_types = {
            items.names[name]: text for name, text in described.rich_types.items() if name in items.names
        }


class _Items:
    """The items of a source that a job converts."""

    def __init__(self, opened: Opened, job: Job):
        """Tell their kinds; raise CheckpointError if one does not decode."""
        self.opened, self.job = opened, job
        recorded = recorded_handlers(opened.location, names_in(opened.location))
        handlers = {"": recorded} if isinstance(recorded, str) else recorded
        unknown = opened.contents.unread
        unknown += [name for name in opened.contents.unknown if name in handlers and name not in unknown]
        self.handlers = {name: handlers.get(name, "") for name in (*opened.items, *unknown)}
        self.kinds = {name: kind_of_item(item, self.handlers[name]) for name, item in opened.items.items()}
        self.kinds |= dict.fromkeys(unknown, ItemKind.UNKNOWN)
        self.opaque = unknown  # what this library does not read
        for name, kind in self.kinds.items():
            if kind is ItemKind.UNKNOWN and name in opened.items:
                try:
                    opened.reader(name)
                except CheckpointError:  # it only looks like a tree
                    self.opaque = [*self.opaque, name]
            elif kind is not ItemKind.UNKNOWN:
                opened.reader(name)
        self.names: dict[str, str] = {}  # the items that are converted → their names in the result
        # Item and name of files and folders that Orbax does not write, in the directory of the step ('') or of a tree.
        self.beside = _others(opened, self._taken_apart, of_step=job.items is None)
        self.is_mapping = len(opened.trees) > 1  # a file has their names at the top

    @property
    def rewritten(self) -> list[str]:
        """Return the items that are trees, which are written anew; all others are copied."""
        return [name for name, kind in self.kinds.items() if kind is ItemKind.TREE]

    @property
    def names_beside(self) -> list[str]:
        """Return the relative paths of files and folders that Orbax does not write."""
        return [f"{item}/{name}" if item else name for item, name in self.beside]

    @property
    def _taken_apart(self) -> list[str]:
        """Return the items whose directories are not copied: a file has the leaves of arrays and keys alone, too."""
        if self.job.to not in FILES:
            return self.rewritten
        return [name for name, kind in self.kinds.items() if kind in _OF_LEAVES]

    def check_all_are_leaves(self) -> None:
        """Raise UnsupportedLeafError if there is more than trees, arrays and keys: a file has no place for it."""
        kinds = [
            (name, kind)
            for name, kind in self.kinds.items()
            if name not in self.opened.trees or (kind is ItemKind.UNKNOWN and not self._is_only_tree(name))
        ]
        others = [f"{name or 'its files'} ({kind.value})" for name, kind in kinds]
        if not others:
            return
        trees = [name for name in self.rewritten if name]
        alone = f"convert one item alone (item={trees[0]!r}, --item {trees[0]}), or all" if trees else "convert it"
        raise UnsupportedLeafError(
            f"{self.opened.path}: a {self.job.to} file has no place for {one_line(others)}; {alone} to 'orbax', "
            "'manager' or 'v1', which keep every item",
            path=self.opened.path,
        )

    def _is_only_tree(self, name: str) -> bool:
        """Return whether the item of an unknown handler holds nothing but a tree that this library reads."""
        return name not in self.opaque and not _beside(self.opened, name)

    def copy(self, name: str) -> Copy:
        """Return an item to copy."""
        folder = self.opened.location / name
        found = Copy(folder, self.kinds[name], is_whole=not name)
        if found.kind is ItemKind.JSON and self.job.to != "v1":
            found = item_copies.with_v0_names(found)
        return item_copies.without_sharding(found) if self.job.sharding == "drop" else found

    def files(self) -> dict[str, Location]:
        """Return the path in the result of each file that lies beside an item, or in a folder beside one."""
        found: dict[str, Location] = {}
        for item, name in self.beside:
            source = self.opened.location / item / name if item else self.opened.location / name
            # Transforms may make one tree of several. A manager would take a folder beside a tree's for an item.
            above = self.names.get(item, "" if "" in self.names else item) if item or source.isdir() else ""
            final = f"{above}/{name}" if above else name
            if source.isdir():
                found |= {f"{final}/{path}": file for path, file in item_copies.files_below(source)}
            elif found.setdefault(final, source) is not source:
                raise NameCollisionError(
                    f"{self.opened.path}: {final} would be both {found[final]} and {source}; give the item a name "
                    f"(--item {item}={item}), or rename a file",
                    path=self.opened.path,
                )
        return found

    def handler(self, name: str) -> str:
        """Return the name of the handler that reads an item in the result: the recorded one, if it can; or ''."""
        is_v1, kind, recorded = self.job.to == "v1", self.kinds.get(name, ItemKind.TREE), self.handlers.get(name, "")
        fits = recorded if recorded and (is_v1 or ".v1." not in recorded) else ""
        if kind is ItemKind.TREE:
            return _TREES["v1"] if is_v1 else fits or _TREES[""]
        if kind is ItemKind.JSON:
            return _METRICS if is_v1 and self.name_of_result(name) == "metrics" else fits or _JSON
        if kind is ItemKind.ARRAY:
            return fits or _ARRAY
        if kind is ItemKind.KEY:
            return fits or _KEY.format("Jax" if self.opened.items[name].location.name == layout.JAX_KEY else "Numpy")
        return recorded

    def name_of_result(self, name: str) -> str:
        """Return the name of an item in a step: its own, or that of Orbax for the only tree of a step."""
        if renamed := (self.job.items or {}).get(name):
            return renamed
        if self.job.items is not None or (name and self.rewritten != [name]):
            return name
        is_by_v1 = ".v1." in self.handlers.get(name, "") or (self.opened.location / layout.V1_MARKER).isfile()
        is_of_v1 = name in ("state", "pytree") and is_by_v1
        return ITEM[self.job.to] if is_of_v1 or name in ("", ITEM["manager"]) else name


def _others(opened: Opened, trees: list[str], *, of_step: bool) -> list[tuple[str, str]]:
    """Return (item, name) of what lies beside the items in a step's directory, and in those of its trees."""
    here = opened.location
    if opened.contents.layout in (Layout.TREE, Layout.T5X):
        return [("", name) for name in _beside(opened, "")] if of_step and trees else []
    if opened.contents.layout is not Layout.ITEMS:
        return []
    known = (*opened.items, *opened.contents.unknown, *layout.STEP_FILES)
    names = sorted(names_in(here).difference(known)) if of_step else []
    found = [("", name) for name in names if (here / name).isfile()]
    return found + [(item, name) for item in trees for name in _beside(opened, item)]


def _beside(opened: Opened, item: str) -> list[str]:
    """Return what lies beside a tree and is no part of it; old releases of Orbax had folders named like leaves."""
    folder = opened.items[item].location
    if folder.name in RANDOM_KEYS:
        names = names_in(folder.parent).difference(layout.STEP_FILES)
        return sorted(name for name in names if name.removesuffix("_metadata") != folder.name)
    of_leaves = {layout.leaf_name(path).partition("/")[0] for path, _ in iter_leaves(opened.reader(item).tree)}
    return [name for name in beside_tree(folder, names_in(folder)) if name not in of_leaves]


def _stored(items: _Items, notes: list[str]) -> dict[str, Node]:
    """Return the trees as they are stored, in the containers of the target, or those that the format records."""
    opened, job = items.opened, items.job
    trees = {name: opened.reader(name).tree for name in opened.trees if name not in items.opaque}
    if job.target is not None:
        from flax_ckpt_compat._trees import state_dict  # it imports jax

        target = state_dict.describe(job.target)
        is_each = _names_items(target, items, trees)
        for name in items.rewritten:
            like = target.children.get(name) if is_each else target
            trees[name] = _like_target(trees[name], like, opened.path)
    elif job.to not in FILES:
        for name, tree in trees.items():
            if opened.items[name].format is Format.MSGPACK:
                trees[name], guessed = stored_trees.with_guessed_lists(tree)
                if guessed:
                    note = "dicts of 0, 1, … are written as lists, which msgpack stores like that; give a target if not"
                    notes.append(f"{note}: {one_line(map(show_path, guessed))}")
    return {name: stored_trees.to_write(tree) for name, tree in trees.items()}


def _names_items(target: Node, items: _Items, trees: dict[str, Node]) -> bool:
    """Return whether a target has the items by their names, and is not that of the only tree."""
    if not isinstance(target, Branch) or "" in trees:
        return False
    if len(items.rewritten) != 1:
        return True
    (name,) = items.rewritten
    own = trees[name].children.keys() if isinstance(trees[name], Branch) else ()
    return name in target.children and name not in own and target.children.keys() <= items.kinds.keys()


def _note_of_nones(opened: Opened, trees: dict[str, Node]) -> list[str]:
    formats = {name: item.format for name, item in opened.items.items()}
    stored = [tree for name, tree in trees.items() if formats.get(name, Format.ORBAX) is Format.ORBAX]
    nones = [show_path(path) for tree in stored for path, leaf in iter_leaves(tree) if leaf is None]
    what = (
        "None is written as it is stored, also for optax.EmptyState, which real Flax expects as a dict; give a target"
    )
    return [f"{what}: {one_line(nones)}"] if nones else []


def _like_target(tree: Node, target: Node, path: str) -> Node:
    here, there = (dict(iter_leaves(one)) for one in (tree, target))
    missing = [show_path(one) for one in there if one not in here]
    extra = [show_path(one) for one in here if one not in there]
    if missing or extra:
        parts = [f"not in the checkpoint: {one_line(missing)}"] if missing else []
        parts += [f"not in the target: {one_line(extra)}"] if extra else []
        raise MissingLeavesError(
            f"{path}: the target does not have the leaves of the checkpoint ({'; '.join(parts)}); pass the state that "
            "was saved, or transforms= that map the checkpoint to this target",
            path=path,
            missing=tuple(missing),
        )
    return stored_trees.with_containers_of(tree, target)


def _arranged(trees: dict[str, Node], items: _Items) -> Output:
    """Return the trees and copies as the layout has them; raise NameCollisionError for two of one name."""
    if items.job.to in FILES:
        named = {(items.job.items or {}).get(name) or name: tree for name, tree in trees.items()}
        return Output({"": Branch(named) if items.is_mapping else next(iter(trees.values()))})
    copied = [name for name in items.kinds if name not in items.rewritten]
    written = [name for name in trees if name not in copied]
    names = {name: items.name_of_result(name) for name in (*written, *copied)}
    if items.job.to not in TO_STEPS and len(names) == 1 and not items.job.renames:
        (only,) = names
        kinds = [ItemKind.TREE, ItemKind.ARRAY]
        if not only or items.job.items is not None:
            kinds.append(ItemKind.JSON)  # else, a restore gives a dict of the item
        if items.kinds.get(only, ItemKind.TREE) in kinds or not only:
            names = {only: ""}
    if len(set(names.values())) < len(names):
        raise NameCollisionError(f"two items would both be called one of {', '.join(names.values())}; rename one")
    items.names = names
    return Output(
        {names[name]: trees[name] for name in written},
        {names[name]: items.copy(name) for name in copied},
        {names[name]: trees[name] for name in copied if name in trees},
        items.files(),
        {new: handler for name, new in names.items() if (handler := items.handler(name))},
    )
