"""Describe a directory by the rules for those of Orbax: one tree, arrays, items, JSON; whole or not."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import MissingPathError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import foreign, orbax_items, orbax_trees
from flax_ckpt_compat._discovery.orbax_items import Item, ItemKind
from flax_ckpt_compat._discovery.orbax_trees import FINISHED, MARKERS, names_in

STEP_DIRECTORY = re.compile(r"(.*_)?(\d+)", re.DOTALL)  # as Orbax's managers name them
_OF_STEPS = {*FINISHED, *orbax_trees.ITEMS_MARKERS}
_LOST_STRUCTURE = (
    f"there are arrays, but no {layout.TREE_METADATA} and no msgpack file '{layout.MSGPACK_FILE}', which say where "
    f"they belong, nor the {layout.ZARR2_METADATA} of a single one (what jax's own array serialization wrote has "
    "none: TensorStore reads each array)"
)


class Layout(enum.Enum):
    """The layouts of checkpoints on disk."""

    FILE = "msgpack file"
    TREE = "one tree in a directory"
    ITEMS = "items of a step"
    JSON = "JSON alone"
    CUSTOM = "files of a custom handler"
    T5X = "T5X"  # read, and never written by Flax, Orbax's checkpointers or this library
    ARRAYS = "arrays without a tree"  # of a tree that lost it, or of jax's own serialization; never complete
    # Of other programs: read by its own path, and something else than a checkpoint for all look-ups.
    READ_ONLY = "of another program"


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """Description of a directory by the rules for those of Orbax."""

    layout: Layout | None
    missing: str = ""  # what a checkpoint lacks; empty for a complete one
    items: Mapping[str, Item] = dataclasses.field(default_factory=dict)  # as in `Contents`
    unknown: tuple[str, ...] = ()  # names of directories beside the items that are not items


def is_one_checkpoint(path: Location, names: set[str], found: Description) -> bool:
    """Return whether a directory is one checkpoint, whole or not, and not a directory of checkpoints."""
    if found.layout is not Layout.ITEMS:
        return found.layout is not None
    # Before Orbax 0.5.11 nothing but names, and what only a composite has, tells items from checkpoints.
    is_named = bool(names.intersection((*orbax_trees.ITEMS_MARKERS, *layout.TREE_ITEMS, *orbax_items.RANDOM_KEYS)))
    return is_named or orbax_items.only_orbax_has(found.items) or STEP_DIRECTORY.fullmatch(path.name) is not None


def describe(path: Location, names: set[str]) -> Description:
    """Describe a directory by the rules for those of Orbax; incomplete if it is none, too."""
    if orbax_trees.is_tree(path, names):
        kind = Layout.T5X if orbax_trees.is_t5x(path, names) else Layout.TREE
        why = orbax_trees.missing_in_tree(path, names)
        items = {"": Item(Format.ORBAX, path)}
        return Description(kind, why or "", items)
    if _is_without_tree(path, names):
        return Description(Layout.ARRAYS, _LOST_STRUCTURE)
    handlers = orbax_items.recorded_handlers(path, names)
    if isinstance(handlers, str):
        return _flat_without_tree(path, names, handlers)
    if file := orbax_items.json_file(path, names):
        return Description(Layout.JSON, items={"": Item(None, file)})
    items = orbax_items.items_in(path, names, handlers)
    if items or handlers:
        rest = names - items.keys() - orbax_items.NO_ITEMS
        unknown = tuple(sorted(name for name in rest if (path / name).isdir()))
        why = next(orbax_items.missing_in_items(path, names, items, handlers), None)
        return Description(Layout.ITEMS, why or "", items, unknown)
    return _without_items(path, names)


def _is_without_tree(path: Location, names: set[str]) -> bool:
    """Return whether there are folders of arrays, and nothing that is the tree of them, nor a single array."""
    others = (*layout.ARRAY_METADATA_FILES, *FINISHED, *orbax_trees.PARTS)
    return not names.intersection(others) and orbax_trees.is_folder_of_arrays(path, names)


def _flat_without_tree(path: Location, names: set[str], handler: str) -> Description:
    """Describe a checkpoint of one item whose handler is recorded, and which has no sign of a tree."""
    if part := orbax_items.missing_part(path, names, handler):
        layout_of_lost = Layout.JSON if "Json" in handler else Layout.TREE
        return Description(layout_of_lost, orbax_items.recorded_but_missing(part))
    if file := orbax_items.json_file(path, names, handler):
        return Description(Layout.JSON, items={"": Item(None, file)})
    if orbax_items.kind_of_handler(handler) is ItemKind.KEY:
        key = layout.JAX_KEY if layout.JAX_KEY in names else layout.NUMPY_KEY
        return Description(Layout.TREE, items={"": Item(Format.ORBAX, path / key)})
    return _without_items(path, names)


def _without_items(path: Location, names: set[str]) -> Description:
    if orbax_trees.lost_structure(path, names):
        return Description(Layout.TREE, _LOST_STRUCTURE)
    if names.issuperset(FINISHED) and any(orbax_trees.holds_files(path / name) for name in names.difference(FINISHED)):
        return Description(Layout.CUSTOM)
    missing = f"none of {layout.TREE_METADATA}, {layout.MANIFEST} or item directories is in it"
    return Description(Layout.CUSTOM if names <= _OF_STEPS else None, missing)


def looks_begun(path: Location, names: set[str]) -> bool:
    """Return whether a directory has no file, or is a checkpoint that was begun: it, or an item, has a marker."""
    if names.intersection(MARKERS) or orbax_trees.lost_structure(path, names) or not orbax_trees.holds_files(path):
        return True
    inside = {(path / name): names_in(path / name) for name in names}
    if any(_is_whole_checkpoint(child, found) for child, found in inside.items()):
        return False  # a directory of checkpoints, which would be lost with it
    if _has_sign(path, names) or any(_has_sign(child, found) for child, found in inside.items()):
        return True
    return orbax_items.only_orbax_has(orbax_items.items_in(path, names))


def _is_whole_checkpoint(path: Location, inside: set[str]) -> bool:
    """Return whether a path in a directory without markers is a checkpoint of its own; ``inside`` has its names."""
    name = path.name
    if steps.is_foreign(name) or layout.is_upload_marker(name):
        return False
    if inside:
        return orbax_items.is_checkpoint_itself(name, inside, is_marked=False) and _has_sign(path, inside)
    try:
        return steps.ends_in_step(name) and path.isfile() and foreign.may_be_msgpack_tree(path)
    except MissingPathError:  # removed meanwhile
        return False


def _has_sign(path: Location, names: set[str]) -> bool:
    # A checkpoint that is being removed from a store may have only commit_success.txt left.
    if names.intersection((*MARKERS, *FINISHED)) or orbax_trees.lost_structure(path, names):
        return True
    return any(layout.TEMPORARY in name or layout.is_upload_marker(name) for name in names)
