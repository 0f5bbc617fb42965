"""Describe what a job writes: the trees of the source, in the containers that the result gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

from flax_ckpt_compat._convert import stored_trees
from flax_ckpt_compat._convert.jobs import TO_STEPS, Job
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import MissingLeavesError
from flax_ckpt_compat._core.fold_names import one_line
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, KeyData, Node, Path, StoredArray, iter_leaves, show_path
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._view import metadata

# The names of a step's only tree, as Orbax's managers write it by default.
ITEM = {"manager": "default", "v1": "state"}


@dataclasses.dataclass(slots=True)
class Contents:
    """Trees and metadata of a result."""

    trees: dict[str, Node]  # item name → tree to write; the only item of a layout without items is ''
    json: dict[str, Location] = dataclasses.field(default_factory=dict)  # item name → file of a JSON item, to copy
    custom: dict[str, Any] = dataclasses.field(default_factory=dict)  # Orbax's custom metadata of the checkpoint
    notes: list[str] = dataclasses.field(default_factory=list)  # what to know about the result

    @property
    def leaves(self) -> dict[tuple[str, Path], Any]:
        """Return (item, key path) → leaf or empty container."""
        return {(item, path): leaf for item, tree in self.trees.items() for path, leaf in iter_leaves(tree)}

    @property
    def nbytes(self) -> int:
        """Return the size of all arrays in memory, in bytes."""
        return sum(array_nbytes(leaf) for leaf in self.leaves.values())


def array_nbytes(leaf: Any) -> int:
    """Return the size of an array, in bytes; 0 for other leaves."""
    array = leaf.data if isinstance(leaf, KeyData) else leaf
    return array.nbytes if isinstance(array, StoredArray) else 0


def contents_of(opened: Opened, job: Job) -> Contents:
    """Return what a job writes of an open checkpoint; MissingLeavesError if the target has other leaves."""
    notes: list[str] = []
    if job.transforms is None:
        trees = _stored(opened, job, notes)
    else:
        from flax_ckpt_compat._convert import transformed  # it imports jax

        trees = transformed.trees_of(opened, job.target, job.transforms, notes)
    if any(isinstance(leaf, KeyData) for tree in trees.values() for _, leaf in iter_leaves(tree)):
        import jax  # noqa: F401  (the Orbax format records a device for PRNG keys that have none)
    json = {name: item.location for name, item in opened.items.items() if item.format is None and job.to in TO_STEPS}
    found = Contents(_arranged(trees, opened, job, json), json, notes=notes)
    for name in json:
        opened.reader(name)  # raises if it does not decode
    others = [name for name in opened.items if name not in opened.parts]
    if others and job.to not in TO_STEPS:
        notes.append(f"not converted: JSON of {', '.join(others)}")
    described = metadata.read_metadata(opened)
    if job.to in ("msgpack", "safetensors"):
        notes.extend(["not converted: custom metadata"] if described.custom else [])
    else:
        found.custom = dict(described.custom)
    if described.custom_of_trees:
        notes.append("not converted: custom metadata of trees")
    if job.to == "msgpack" and described.writer is None and job.target is None:
        notes.extend(_note_of_nones(opened, trees))
    return found


def _stored(opened: Opened, job: Job, notes: list[str]) -> dict[str, Node]:
    """Return the trees as they are stored, in the containers of the target, or those that the format records."""
    trees = {name: opened.reader(name).tree for name in opened.parts}
    if job.target is not None:
        from flax_ckpt_compat._trees import state_dict  # it imports jax

        target = state_dict.describe(job.target)
        is_each = opened.is_mapping and isinstance(target, Branch)
        trees = {
            name: _like_target(tree, target.children.get(name) if is_each else target, opened.path)
            for name, tree in trees.items()
        }
    elif job.to not in ("msgpack", "safetensors"):
        for name, tree in trees.items():
            if opened.items[name].format is Format.MSGPACK:
                trees[name], guessed = stored_trees.with_guessed_lists(tree)
                if guessed:
                    note = "dicts of 0, 1, … are written as lists, which msgpack stores like that; give a target if not"
                    notes.append(f"{note}: {one_line(map(show_path, guessed))}")
    return {name: stored_trees.to_write(tree) for name, tree in trees.items()}


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


def _name_of_only_item(opened: Opened, to: str) -> str:
    """Return the name of the only tree of a step: that of the source, unless it is Orbax's own for a step of one."""
    name = next(iter(opened.trees)) if len(opened.trees) == 1 else ""
    is_of_v1 = name in ("state", "pytree") and (opened.location / layout.V1_MARKER).isfile()
    return ITEM[to] if is_of_v1 or name in ("", ITEM["manager"]) else name


def _arranged(trees: dict[str, Node], opened: Opened, job: Job, json: Container[str]) -> dict[str, Node]:
    """Return item name → tree, as the layout has them."""
    is_mapping = opened.is_mapping and set(trees) != {""}
    if job.to in TO_STEPS:
        if not is_mapping:
            trees = {_name_of_only_item(opened, job.to): next(iter(trees.values()))}
        else:
            trees = {name: tree for name, tree in trees.items() if name not in json}
    else:
        trees = {"": Branch(dict(trees)) if is_mapping else next(iter(trees.values()))}
    if job.to in ("msgpack", "safetensors"):
        return trees
    return {name: stored_trees.in_stored_order(tree) for name, tree in trees.items()}
