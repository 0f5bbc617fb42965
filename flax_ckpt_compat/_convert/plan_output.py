"""Describe what a job writes: trees in the containers that the result gets, files to copy, and metadata."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._convert import safetensors, stored_trees
from flax_ckpt_compat._convert.jobs import FILES, TO_STEPS, Job
from flax_ckpt_compat._convert.stored_trees import kind_of
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError, MissingLeavesError, NameCollisionError, UnsupportedLeafError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, show_path
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._discovery.orbax_directory import Layout
from flax_ckpt_compat._discovery.orbax_items import RANDOM_KEYS, ItemKind, kind_of_item, recorded_handlers
from flax_ckpt_compat._discovery.orbax_trees import beside_tree, names_in
from flax_ckpt_compat._view import metadata

# The names of a step's only tree, as Orbax's managers write it by default.
ITEM = {"manager": "default", "v1": "state", "orbax": "default"}
# The handlers of Orbax 0.12.8 (measured).
_V0, _V1 = "orbax.checkpoint._src.handlers.", "orbax.checkpoint.experimental.v1._src.handlers."
_HANDLERS = {
    ItemKind.TREE: f"{_V0}standard_checkpoint_handler.StandardCheckpointHandler",
    ItemKind.ARRAY: f"{_V0}array_checkpoint_handler.ArrayCheckpointHandler",
    ItemKind.KEY: f"{_V0}random_key_checkpoint_handler.{{}}RandomKeyCheckpointHandler",
    ItemKind.JSON: f"{_V0}json_checkpoint_handler.JsonCheckpointHandler",  # v1 reads what it has written, too
}
_V1_TREE, _V1_METRICS = f"{_V1}pytree_handler.PyTreeHandler", f"{_V1}json_handler.MetricsHandler"
_V1_JSON = "data.json"


@dataclasses.dataclass(slots=True)
class Output:
    """The parts of a result; an item called '' is the whole result."""

    to: str  # name of the layout
    trees: dict[str, Node] = dataclasses.field(default_factory=dict)  # item → tree of leaf handles to write
    copied: dict[str, Node] = dataclasses.field(default_factory=dict)  # likewise, of items that are copied
    handlers: dict[str, str] = dataclasses.field(default_factory=dict)  # item → name of its handler, or ''
    # Relative path → the file to copy, the bytes to write, or None for a folder.
    files: dict[str, Location | bytes | None] = dataclasses.field(default_factory=dict)
    custom: dict[str, Any] = dataclasses.field(default_factory=dict)  # Orbax's custom metadata of the checkpoint
    custom_of_trees: dict[str, Any] = dataclasses.field(default_factory=dict)  # item → that of the tree alone
    rich_types: dict[str, str] = dataclasses.field(default_factory=dict)  # item → Orbax's record of its containers
    notes: list[str] = dataclasses.field(default_factory=list)  # what to know about the result
    left_out: list[str] = dataclasses.field(default_factory=list)  # what it lacks of the source

    @property
    def has_items(self) -> bool:
        """Return whether the result is a directory of items, and not one of them."""
        return "" not in self.handlers

    @property
    def leaves(self) -> list[Any]:
        """Return all leaves and empty containers."""
        return [leaf for tree in (*self.trees.values(), *self.copied.values()) for _, leaf in iter_leaves(tree)]

    @property
    def nbytes(self) -> int:
        """Return the size of all arrays in memory, in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves if kind_of(leaf) in (LeafKind.ARRAY, LeafKind.PRNG_KEY))


def output_of(opened: Opened, job: Job) -> Output:
    """Return what a job writes of an open checkpoint.

    Raise MissingLeavesError if the target has other leaves, and UnsupportedLeafError for an item that the layout has no
    place for."""
    items, found = _Items(opened, job), Output(job.to)
    if job.to in FILES:
        items.check_all_are_leaves()
    if job.transforms is None:
        trees = _stored(items, found.notes)
    else:
        if not opened.items:
            raise UnsupportedLeafError(
                f"{opened.path}: only their own handlers read its items, so there is nothing to transform; convert it "
                "without transforms",
                path=opened.path,
            )
        from flax_ckpt_compat._convert import transformed  # it imports jax

        trees, items.is_mapping = transformed.trees_of(opened, job, items.rewritten, found.notes)
    if job.to in FILES:
        renamed = {(job.items or {}).get(name) or name: tree for name, tree in trees.items()}
        found.trees = {"": Branch(renamed) if items.is_mapping else next(iter(trees.values()))}
        found.handlers = {"": ""}
    else:
        _arrange(found, items, trees)
    if any(kind_of(leaf) is LeafKind.PRNG_KEY for leaf in found.leaves):
        import jax  # noqa: F401  (the Orbax format records a device for PRNG keys that have none)
    if job.to == "safetensors":
        found.trees[""], notes = safetensors.as_stored(found.trees[""])
        found.notes += notes
    described = metadata.read_metadata(opened)
    _add_beside(found, items)
    _add_metadata(found, items, described)
    if job.to == "msgpack" and described.writer is None and job.target is None:
        found.notes += _note_of_nones(opened, trees)
    if job.items is not None:  # what lies beside an item was not asked for
        found.notes += [f"not converted: {what}" for what in found.left_out]
        found.left_out = []
    return found


class _Items:
    """The items of a source that a job converts."""

    def __init__(self, opened: Opened, job: Job):
        """Tell their kinds; raise CheckpointError if one does not decode."""
        self.opened, self.job = opened, job
        recorded = recorded_handlers(opened.location, names_in(opened.location))
        handlers = {"": recorded} if isinstance(recorded, str) else recorded
        unread = opened.contents.unread
        # What this library does not read.
        self.opaque = [name for name in opened.contents.unknown if name in handlers or name in unread]
        self.handlers = {name: handlers.get(name, "") for name in (*opened.items, *self.opaque)}
        self.kinds = {name: kind_of_item(item, self.handlers[name]) for name, item in opened.items.items()}
        self.kinds |= dict.fromkeys(self.opaque, ItemKind.UNKNOWN)
        for name in opened.items:
            try:
                opened.reader(name)
            except CheckpointError:
                if self.kinds[name] is not ItemKind.UNKNOWN:
                    raise
                self.opaque.append(name)  # it only looks like a tree
        # The trees are written anew, all others are copied; transforms may make one tree of several.
        self.rewritten = [name for name, kind in self.kinds.items() if kind is ItemKind.TREE]
        self.is_mapping = len(opened.trees) > 1  # a file has their names at the top
        self.names: dict[str, str] = {}  # the items that are converted → their names in the result

    def check_all_are_leaves(self) -> None:
        """Raise UnsupportedLeafError if there is more than trees, arrays and keys: a file has no place for it."""
        others = []
        for name, kind in self.kinds.items():
            is_tree = name in self.opened.trees and name not in self.opaque
            if not is_tree or (kind is ItemKind.UNKNOWN and _beside(self.opened, name)):
                others.append(f"{name or 'its files'} ({kind.value})")
        if not others:
            return
        trees = [name for name in self.rewritten if name]
        alone = f"convert one item alone (item={trees[0]!r}, --item {trees[0]}), or all" if trees else "convert it"
        raise UnsupportedLeafError(
            f"{self.opened.path}: a {self.job.to} file has no place for {one_line(others)}; {alone} to 'orbax', "
            "'manager' or 'v1', which keep every item",
            path=self.opened.path,
        )

    def handler(self, name: str) -> str:
        """Return the name of the handler that reads an item in the result: the recorded one, if it can; or ''."""
        is_v1, kind, recorded = self.job.to == "v1", self.kinds.get(name, ItemKind.TREE), self.handlers.get(name, "")
        if is_v1 and kind is ItemKind.TREE:
            return _V1_TREE
        if is_v1 and kind is ItemKind.JSON and self.name_of_result(name) == "metrics":
            return _V1_METRICS
        if kind is ItemKind.UNKNOWN or (recorded and (is_v1 or ".v1." not in recorded)):
            return recorded
        is_of_jax = name in self.opened.items and self.opened.items[name].location.name == layout.JAX_KEY
        return _HANDLERS[kind].format("Jax" if is_of_jax else "Numpy")

    def name_of_result(self, name: str) -> str:
        """Return the name of an item in a step: its own, or that of Orbax for the only tree of a step."""
        if renamed := (self.job.items or {}).get(name):
            return renamed
        if self.job.items is not None or (name and self.rewritten != [name]):
            return name
        is_by_v1 = ".v1." in self.handlers.get(name, "") or (self.opened.location / layout.V1_MARKER).isfile()
        is_of_v1 = name in ("state", "pytree") and is_by_v1
        return ITEM[self.job.to] if is_of_v1 or name in ("", ITEM["manager"]) else name

    def names_of_result(self, names: list[str]) -> dict[str, str]:
        """Return the names of all items in the result; '' for one that becomes the whole result."""
        job = self.job
        if len(names) == 1 and job.to not in TO_STEPS and not any((job.items or {}).values()):
            (only,) = names
            kinds = {ItemKind.TREE, ItemKind.ARRAY}
            if not only or job.items is not None:  # else a restore of JSON gives a dict of the item
                kinds.add(ItemKind.JSON)
            if not only or self.kinds.get(only, ItemKind.TREE) in kinds:
                return {only: ""}
        found = {name: self.name_of_result(name) for name in names}
        if len(set(found.values())) < len(found):
            raise NameCollisionError(f"two items would both be called one of {', '.join(found.values())}; rename one")
        return found


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
        guessed: list[Path] = []
        for name, tree in trees.items():
            if opened.items[name].format is Format.MSGPACK:
                trees[name] = stored_trees.with_guessed_lists(tree, guessed)
        if guessed:
            note = "dicts of 0, 1, … are written as lists, which msgpack stores like that; give a target if not"
            notes.append(f"{note}: {one_line(map(show_path, guessed))}")
    return trees


def _names_items(target: Node, items: _Items, trees: dict[str, Node]) -> bool:
    """Return whether a target has the items by their names, and is not that of the only tree."""
    if not isinstance(target, Branch) or "" in trees:
        return False
    if len(items.rewritten) != 1:
        return True
    (name,) = items.rewritten
    own = trees[name].children.keys() if isinstance(trees[name], Branch) else ()
    return name in target.children and name not in own and target.children.keys() <= items.kinds.keys()


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


def _note_of_nones(opened: Opened, trees: dict[str, Node]) -> list[str]:
    others = [name for name, item in opened.items.items() if item.format is not Format.ORBAX]
    stored = [tree for name, tree in trees.items() if name not in others]
    nones = [show_path(path) for tree in stored for path, leaf in iter_leaves(tree) if leaf is None]
    what = "None is written as it is stored, also for optax.EmptyState, which real Flax expects as a dict"
    return [f"{what}; give a target: {one_line(nones)}"] if nones else []


def _arrange(found: Output, items: _Items, trees: dict[str, Node]) -> None:
    """Add the trees and copies, as a directory of Orbax has them."""
    copied = [name for name in items.kinds if name not in items.rewritten]
    items.names = items.names_of_result([*(name for name in trees if name not in copied), *copied])
    for name, new in items.names.items():
        found.handlers[new] = items.handler(name)
        if name not in copied:
            found.trees[new] = stored_trees.in_stored_order(trees[name])
            continue
        if name in trees:
            found.copied[new] = trees[name]
        for path, content in _files_of_copy(items, name).items():
            found.files[f"{new}/{path}" if new else path] = content
    if unknown := [new for name, new in items.names.items() if items.kinds.get(name) is ItemKind.UNKNOWN]:
        whose = "only the handler that wrote it reads it" if "" in unknown else "only their own handlers read them"
        names = "" if "" in unknown else f": {one_line(unknown)}"
        found.notes.append(f"copied byte for byte, as {whose}{names}")


def _files_of_copy(items: _Items, name: str) -> dict[str, Location | bytes | None]:
    """Return the relative paths of all that a copy of an item consists of, as its handler reads it."""
    kind, folder = items.kinds[name], items.opened.location / name
    files: dict[str, Location | bytes | None] = dict(files_below(folder))
    if kind is not ItemKind.UNKNOWN or not name:  # the step has its own; a user's handler may have such a file
        files.pop(layout.STEP_METADATA, None)
    if kind is not ItemKind.UNKNOWN:
        files.setdefault(layout.COMMIT_FILE, layout.COMMITTED)
    if kind is ItemKind.JSON and items.job.to != "v1" and layout.JSON_FILES[0] not in files and _V1_JSON in files:
        files[layout.JSON_FILES[0]] = files.pop(_V1_JSON)  # the handlers of v0 and v1 both read this name
    at = {ItemKind.ARRAY: "", ItemKind.KEY: f"{layout.JAX_KEY}/"}.get(kind)
    tree = folder / f"{at}{layout.TREE_METADATA}"
    if items.job.sharding == "drop" and at is not None and f"{at}{layout.SHARDING}" in files and tree.isfile():
        del files[f"{at}{layout.SHARDING}"]
        described = json.loads(tree.read(), object_hook=without_device)
        files[f"{at}{layout.TREE_METADATA}"] = json.dumps(described).encode()
    return files


def without_device(described: dict[str, Any]) -> dict[str, Any]:
    """Return Orbax's record of a leaf as that of a numpy array, which needs no device; others as they are."""
    if described.get("value_type") != layout.JAX_ARRAY:
        return described
    return {**{key: one for key, one in described.items() if key != "write_shape"}, "value_type": layout.NP_ARRAY}


def files_below(folder: Location, above: str = "") -> Iterator[tuple[str, Location | None]]:
    """Yield the relative path of each file below a folder, also by links, with its location; of folders with None."""
    for name in sorted(folder.listdir()):
        path = folder / name
        if path.isdir():
            yield f"{above}{name}", None
            yield from files_below(path, f"{above}{name}/")
        else:
            yield f"{above}{name}", path


def _add_beside(found: Output, items: _Items) -> None:
    """Add what lies beside the items in a step's directory, and in those of its trees, or name it as left out."""
    opened, job = items.opened, items.job
    of_leaves = (ItemKind.TREE, ItemKind.ARRAY, ItemKind.KEY) if job.to in FILES else (ItemKind.TREE,)
    trees = [name for name, kind in items.kinds.items() if kind in of_leaves]
    beside: list[tuple[str, str]] = []  # item, and name in its directory
    if opened.contents.layout in (Layout.TREE, Layout.T5X) and trees and job.items is None:
        beside = [("", name) for name in _beside(opened, "")]
    elif opened.contents.layout is Layout.ITEMS:
        known = (*opened.items, *opened.contents.unknown, *layout.STEP_FILES)
        names = sorted(names_in(opened.location).difference(known)) if job.items is None else []
        beside = [("", name) for name in names if (opened.location / name).isfile()]
        beside += [(item, name) for item in trees for name in _beside(opened, item)]
    if not beside:
        return
    others = f"other files in its directory: {one_line('/'.join(filter(None, one)) for one in beside)}"
    if job.to in FILES:
        found.left_out.append(others)
        return
    found.notes.append(f"copied: {others}")
    for item, name in beside:
        source = opened.location / item / name
        # A manager would take a folder beside a tree's for an item.
        above = items.names.get(item, "" if "" in items.names else item) if item or source.isdir() else ""
        final = f"{above}/{name}" if above else name
        if final in found.files:
            raise NameCollisionError(f"{opened.path}: {final} would be two files; rename one", path=opened.path)
        found.files[final] = None if source.isdir() else source
        found.files |= {f"{final}/{path}": file for path, file in files_below(source)} if source.isdir() else {}


def _beside(opened: Opened, item: str) -> list[str]:
    """Return what lies beside a tree and is no part of it; old releases of Orbax had folders named like leaves."""
    folder = opened.items[item].location
    if folder.name in RANDOM_KEYS:
        names = names_in(folder.parent).difference(layout.STEP_FILES)
        return sorted(name for name in names if name.removesuffix("_metadata") != folder.name)
    of_leaves = {layout.leaf_name(path).partition("/")[0] for path, _ in iter_leaves(opened.reader(item).tree)}
    return [name for name in beside_tree(folder, names_in(folder)) if name not in of_leaves]


def _add_metadata(found: Output, items: _Items, described: metadata.Metadata) -> None:
    """Add the custom metadata that the layout keeps, and name what it does not."""
    is_file, names = items.job.to in FILES, items.names
    if not is_file:
        found.custom = dict(described.custom)
    elif described.custom:
        found.left_out.append("custom metadata")
    # A copy has its own.
    customs = {name: one for name, one in described.custom_of_trees.items() if is_file or name in items.rewritten}
    kept = {names[name]: one for name, one in customs.items() if name in names and isinstance(one, dict)}
    found.custom_of_trees = kept
    if len(kept) < len(customs):
        found.left_out.append("custom metadata of trees")
    if is_file or items.job.target is not None or items.job.transforms is not None:
        return
    hook = without_device if items.job.sharding == "drop" else None
    for name, text in described.rich_types.items():
        leaves = [leaf for _, leaf in iter_leaves(found.trees[names[name]])] if name in items.rewritten else []
        if hook is not None and any(kind_of(leaf) is LeafKind.PRNG_KEY for leaf in leaves):
            found.notes.append("tuples and namedtuples beside random keys are written without their types")
        elif leaves:
            with suppress(ValueError, RecursionError):  # no record of Orbax
                found.rich_types[names[name]] = json.dumps(json.loads(text, object_hook=hook))
