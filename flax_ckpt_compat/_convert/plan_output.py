"""Describe what a job writes: trees in the containers that the result gets, files to copy, and metadata."""

from __future__ import annotations

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
from flax_ckpt_compat._discovery import orbax_directory
from flax_ckpt_compat._discovery.contents import Layout
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._discovery.orbax_directory import RANDOM_KEYS, ItemKind, names_in
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


class Output:
    """The parts of an open checkpoint that a job writes; an item called '' is the whole result."""

    def __init__(self, opened: Opened, job: Job):
        """Tell the kinds of the source's items; raise CheckpointError if one does not decode."""
        self.opened, self.job, self.to = opened, job, job.to
        # Item of the result → tree of leaf handles to write; likewise, of items that are copied; name of its handler.
        self.trees, self.copied, self.handlers = dict[str, Node](), dict[str, Node](), dict[str, str]()
        # Relative path → the file to copy, the bytes to write, or None for a folder.
        self.files: dict[str, Location | bytes | None] = {}
        self.custom: dict[str, Any] = {}  # Orbax's custom metadata of the checkpoint
        self.custom_of_trees: dict[str, Any] = {}  # item of the result → that of the tree alone
        self.rich_types: dict[str, str] = {}  # item of the result → Orbax's record of its containers
        # What to know about the result, and what it lacks of the source.
        self.notes, self.left_out = list[str](), list[str]()

        handlers = orbax_directory.recorded_handlers(opened.location, names_in(opened.location))
        unread = opened.contents.unread
        self.opaque = [name for name in opened.contents.unknown if name in handlers or name in unread]  # not read here
        self.recorded = {name: handlers.get(name, "") for name in (*opened.items, *self.opaque)}
        self.kinds = {
            name: orbax_directory.kind_of_item(item, self.recorded[name]) for name, item in opened.items.items()
        }
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

    def check_all_are_leaves(self) -> None:
        """Raise UnsupportedLeafError if there is more than trees, arrays and keys: a file has no place for it."""
        trees = [name for name in self.opened.trees if name not in self.opaque]
        others = [
            f"{name or 'its files'} ({kind.value})"
            for name, kind in self.kinds.items()
            if name not in trees or (kind is ItemKind.UNKNOWN and _beside(self.opened, name))
        ]
        if others:
            named = next(filter(None, self.rewritten), "")
            alone = f"one item alone (item={named!r}, --item {named}), or all" if named else "it"
            raise UnsupportedLeafError(
                f"{self.opened.path}: a {self.to} file has no place for {one_line(others)}; convert {alone} to "
                "'orbax', 'manager' or 'v1', which keep every item",
                path=self.opened.path,
            )

    def handler_of(self, name: str) -> str:
        """Return the name of the handler that reads an item in the result: the recorded one, if it can; or ''."""
        is_v1, kind, recorded = self.to == "v1", self.kinds.get(name, ItemKind.TREE), self.recorded.get(name, "")
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
        is_by_v1 = ".v1." in self.recorded.get(name, "") or (self.opened.location / layout.V1_MARKER).isfile()
        is_of_v1 = name in ("state", "pytree") and is_by_v1
        return ITEM[self.job.to] if is_of_v1 or name in ("", ITEM["manager"]) else name

    def names_of_result(self, names: list[str]) -> dict[str, str]:
        """Return the names of all items in the result; '' for one that becomes the whole result."""
        if len(names) == 1 and self.to not in TO_STEPS and not any((self.job.items or {}).values()):
            (only,) = names
            kinds = {ItemKind.TREE, ItemKind.ARRAY}
            if self.job.items is not None:  # else a restore of JSON gives a dict of the item
                kinds.add(ItemKind.JSON)
            if not only or self.kinds.get(only, ItemKind.TREE) in kinds:
                return {only: ""}
        found = {name: self.name_of_result(name) for name in names}
        if len(set(found.values())) < len(found):
            raise NameCollisionError(f"two items would both be called one of {', '.join(found.values())}; rename one")
        return found


def output_of(opened: Opened, job: Job) -> Output:
    """Return what a job writes of an open checkpoint; raise for what the target, or the layout, has no place for."""
    found = Output(opened, job)
    if job.to in FILES:
        found.check_all_are_leaves()
    if job.transforms is None:
        trees = _stored(found)
    elif not opened.items:
        raise UnsupportedLeafError(
            f"{opened.path}: only their own handlers read its items, so there is nothing to transform; convert it "
            "without transforms",
            path=opened.path,
        )
    else:
        from flax_ckpt_compat._convert import transformed  # it imports jax

        trees, found.is_mapping = transformed.trees_of(opened, job, found.rewritten, found.notes)
    if job.to in FILES:
        renamed = {(job.items or {}).get(name) or name: tree for name, tree in trees.items()}
        found.trees = {"": Branch(renamed) if found.is_mapping else next(iter(trees.values()))}
        found.handlers = {"": ""}
    else:
        _arrange(found, trees)
    if any(kind_of(leaf) is LeafKind.PRNG_KEY for leaf in found.leaves):
        import jax  # noqa: F401  (the Orbax format records a device for PRNG keys that have none)
    if job.to == "safetensors":
        found.trees[""] = safetensors.as_stored(found.trees[""], found.notes)
    described = metadata.read_metadata(opened)
    _add_beside(found)
    _add_metadata(found, described)
    if job.to == "msgpack" and described.writer is None and job.target is None:
        _note_nones(found, trees)
    if job.items is not None:  # what lies beside an item was not asked for
        found.notes += [f"not converted: {what}" for what in found.left_out]
        found.left_out = []
    return found


def _stored(found: Output) -> dict[str, Node]:
    """Return the trees as they are stored, in the containers of the target, or those that the format records."""
    opened, job = found.opened, found.job
    trees = {name: opened.reader(name).tree for name in opened.trees if name not in found.opaque}
    if job.target is not None:
        from flax_ckpt_compat._trees import state_dict  # it imports jax

        target = state_dict.describe(job.target)
        is_each = _names_items(found, target, trees)
        for name in found.rewritten:
            like = target.children.get(name) if is_each else target
            trees[name] = _like_target(trees[name], like, opened.path)
    elif job.to not in FILES:
        guessed: list[Path] = []
        for name, tree in trees.items():
            if opened.items[name].format is Format.MSGPACK:
                trees[name] = stored_trees.with_guessed_lists(tree, guessed)
        if guessed:
            note = "dicts of 0, 1, … are written as lists, which msgpack stores like that; give a target if not"
            found.notes.append(f"{note}: {one_line(map(show_path, guessed))}")
    return trees


def _names_items(found: Output, target: Node, trees: dict[str, Node]) -> bool:
    """Return whether a target has the items by their names, and is not that of the only tree."""
    if not isinstance(target, Branch) or "" in trees:
        return False
    if len(found.rewritten) != 1:
        return True
    (name,) = found.rewritten
    own = trees[name].children if isinstance(trees[name], Branch) else ()
    return name in target.children and name not in own and target.children.keys() <= found.kinds.keys()


def _like_target(tree: Node, target: Node, path: str) -> Node:
    here, there = (dict(iter_leaves(one)) for one in (tree, target))
    missing = [show_path(one) for one in there if one not in here]
    extra = [show_path(one) for one in here if one not in there]
    if missing or extra:
        parts = [f"not in the checkpoint: {one_line(missing)}"] if missing else []
        parts += [f"not in the target: {one_line(extra)}"] if extra else []
        message = (
            f"{path}: the target does not have the leaves of the checkpoint ({'; '.join(parts)}); pass the state that "
            "was saved, or transforms= that map the checkpoint to this target"
        )
        raise MissingLeavesError(message, path=path, leaf=[*missing, *extra][0], missing=tuple(missing))
    return stored_trees.with_containers_of(tree, target)


def _note_nones(found: Output, trees: dict[str, Node]) -> None:
    others = [name for name, item in found.opened.items.items() if item.format is not Format.ORBAX]
    leaves = [pair for name, tree in trees.items() if name not in others for pair in iter_leaves(tree)]
    if nones := [show_path(path) for path, leaf in leaves if leaf is None]:
        what = "None is written as it is stored, also for optax.EmptyState, which real Flax expects as a dict"
        found.notes.append(f"{what}; give a target: {one_line(nones)}")


def _arrange(found: Output, trees: dict[str, Node]) -> None:
    """Add the trees and copies, as a directory of Orbax has them."""
    copied = [name for name in found.kinds if name not in found.rewritten]
    found.names = found.names_of_result([*(name for name in trees if name not in copied), *copied])
    for name, new in found.names.items():
        found.handlers[new] = found.handler_of(name)
        if name not in copied:
            found.trees[new] = stored_trees.in_stored_order(trees[name])
            continue
        if name in trees:
            found.copied[new] = trees[name]
        found.files |= {f"{new}/{path}" if new else path: one for path, one in _files_of_copy(found, name).items()}
    unknown = [new or "all of it" for name, new in found.names.items() if found.kinds.get(name) is ItemKind.UNKNOWN]
    if unknown:
        found.notes.append(f"copied byte for byte, as only their own handlers read them: {one_line(unknown)}")


def _files_of_copy(found: Output, name: str) -> dict[str, Location | bytes | None]:
    """Return the relative paths of all that a copy of an item consists of, as its handler reads it."""
    kind, folder = found.kinds[name], found.opened.location / name
    files: dict[str, Location | bytes | None] = dict(files_below(folder))
    if kind is not ItemKind.UNKNOWN or not name:  # the step has its own; a user's handler may have such a file
        files.pop(layout.STEP_METADATA, None)
    if kind is not ItemKind.UNKNOWN:
        files.setdefault(layout.COMMIT_FILE, layout.COMMITTED)
    if kind is ItemKind.JSON and found.job.to != "v1" and layout.JSON_FILES[0] not in files and _V1_JSON in files:
        files[layout.JSON_FILES[0]] = files.pop(_V1_JSON)  # the handlers of v0 and v1 both read this name
    at = {ItemKind.ARRAY: "", ItemKind.KEY: f"{layout.JAX_KEY}/"}.get(kind)
    tree = folder / f"{at}{layout.TREE_METADATA}"
    if found.job.sharding == "drop" and at is not None and f"{at}{layout.SHARDING}" in files and tree.isfile():
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
        is_folder = path.isdir()
        yield f"{above}{name}", None if is_folder else path
        if is_folder:
            yield from files_below(path, f"{above}{name}/")


def _add_beside(found: Output) -> None:
    """Add what lies beside the items in a step's directory, and in those of its trees, or name it as left out."""
    opened, job = found.opened, found.job
    of_leaves = (ItemKind.TREE, ItemKind.ARRAY, ItemKind.KEY) if job.to in FILES else (ItemKind.TREE,)
    trees = [name for name, kind in found.kinds.items() if kind in of_leaves]
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
        above = found.names.get(item, "" if "" in found.names else item) if item or source.isdir() else ""
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
    of_leaves = {".".join(path).partition("/")[0] for path, _ in iter_leaves(opened.reader(item).tree)}
    return [name for name in orbax_directory.beside_tree(folder, names_in(folder)) if name not in of_leaves]


def _add_metadata(found: Output, described: metadata.Metadata) -> None:
    """Add the custom metadata that the layout keeps, and name what it does not."""
    is_file, names = found.job.to in FILES, found.names
    if not is_file:
        found.custom = dict(described.custom)
    elif described.custom:
        found.left_out.append("custom metadata")
    # A copy has its own.
    customs = {name: one for name, one in described.custom_of_trees.items() if is_file or name in found.rewritten}
    kept = {names[name]: one for name, one in customs.items() if name in names and isinstance(one, dict)}
    found.custom_of_trees = kept
    if len(kept) < len(customs):
        found.left_out.append("custom metadata of trees")
    if is_file or found.job.target is not None or found.job.transforms is not None:
        return
    hook = without_device if found.job.sharding == "drop" else None
    for name, text in described.rich_types.items():
        leaves = [leaf for _, leaf in iter_leaves(found.trees[names[name]])] if name in found.rewritten else []
        if hook is not None and any(kind_of(leaf) is LeafKind.PRNG_KEY for leaf in leaves):
            found.notes.append("tuples and namedtuples beside random keys are written without their types")
        elif leaves:
            with suppress(ValueError, RecursionError):  # no record of Orbax
                found.rich_types[names[name]] = json.dumps(json.loads(text, object_hook=hook))
