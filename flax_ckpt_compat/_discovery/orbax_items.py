"""Tell the items of a step of Orbax: the kind of each, by its recorded handler or content, and what it lacks."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import CorruptCheckpointError, MissingPathError
from flax_ckpt_compat._core.local import temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.orbax_trees import (
    FINISHED,
    ITEMS_MARKERS,
    TREE_MARKERS,
    is_array,
    is_tree,
    missing_in_tree,
    names_in,
)

RANDOM_KEYS = (layout.JAX_KEY, layout.NUMPY_KEY)  # the tree inside an item of Orbax's random key handlers
NO_ITEMS = {layout.DESCRIPTOR}  # that handlers are recorded for
_MAX_RECORD_BYTES = 16 * 2**20  # of STEP_METADATA, in which users may store their own


class ItemKind(enum.Enum):
    """Kind of an item, by the handler of Orbax that reads it."""

    TREE = "tree"
    ARRAY = "array"
    KEY = "random key"
    JSON = "JSON"
    UNKNOWN = "of an unknown kind"


_KINDS = {  # by the beginning of the handler's name
    **dict.fromkeys(("Json", "Metrics"), ItemKind.JSON),
    "ArrayCheckpoint": ItemKind.ARRAY,
    **dict.fromkeys(("PyTree", "StandardCheckpoint"), ItemKind.TREE),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One tree, or other item, of a checkpoint."""

    format: Format | None  # on-disk format; None for a plain JSON item
    location: Location  # the file or directory of this item
    # In that directory, if they were listed.
    names: set[str] | None = dataclasses.field(default=None, compare=False, repr=False)
    layout: str = ""  # name of its layout, of those of `layouts`; leaves are restored by the rules of the format

    def unlisted(self) -> Item:
        """Return this item without a listing."""
        return dataclasses.replace(self, location=self.location.unlisted())


def recorded_handlers(path: Location, names: set[str]) -> Mapping[str, str]:
    """Return the handlers that a step's metadata records: of each item, or of '', the one tree; empty without a record.

    Orbax writes them since 0.11.6 when the save is complete: each item that was saved, and no other (measured)."""
    handlers = (_record(path, names) or {}).get("item_handlers")
    if isinstance(handlers, str):
        return {"": handlers} if handlers else {}
    found = handlers.items() if isinstance(handlers, dict) else ()
    return {name: handler for name, handler in found if name and isinstance(handler, str)}


def check_record(path: Location, names: set[str]) -> None:
    """Raise CorruptCheckpointError if a step's metadata does not decode: nothing tells then what the step had."""
    if _record(path, names) is None:
        raise CorruptCheckpointError(
            f"{path / layout.STEP_METADATA} does not decode, so nothing tells whether all of {path} is there; restore "
            "that file from a backup, or another step",
            path=path.path,
        )


def _record(path: Location, names: set[str]) -> Mapping[str, Any] | None:
    """Return a step's metadata, empty without any; None if they do not decode."""
    file = path / layout.STEP_METADATA
    if layout.STEP_METADATA not in names or not file.isfile():
        return {}
    try:
        text = file.read(0, _MAX_RECORD_BYTES)
        content = json.loads(text) if len(text) < _MAX_RECORD_BYTES else {}
    except MissingPathError:  # removed meanwhile
        return {}
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def kind_of_handler(handler: str) -> ItemKind:
    """Return the kind of the items that a handler of Orbax, v0 or v1, writes; a user's own may have a name alike."""
    package, name = handler.partition(".")[0], handler.rpartition(".")[2]
    if package != "orbax":
        return ItemKind.UNKNOWN
    if "RandomKey" in name:
        return ItemKind.KEY
    return next((kind for beginning, kind in _KINDS.items() if name.startswith(beginning)), ItemKind.UNKNOWN)


def kind_of_item(item: Item, handler: str) -> ItemKind:
    """Return the kind of an item, by its recorded handler, or without one ('') by what is in it."""
    if handler:
        return kind_of_handler(handler)
    if item.format is None:
        return ItemKind.JSON
    if item.location.name in RANDOM_KEYS:
        return ItemKind.KEY
    is_one = item.format is Format.ORBAX and not names_in(item.location).intersection(TREE_MARKERS)
    return ItemKind.ARRAY if is_one and is_array(item.location / layout.SINGLE_ARRAY) else ItemKind.TREE


def json_file(path: Location, names: set[str], handler: str = "") -> Location | None:
    """Return the one file of a JSON item, or None.

    With a recorded ``handler`` of JSON, that file may have any name, or others beside it."""
    rest = names.difference(FINISHED)
    known = rest.intersection(layout.JSON_FILES)
    is_json = kind_of_handler(handler) is ItemKind.JSON
    found = rest if len(rest) == 1 and (known or is_json) else known if len(known) == 1 and is_json else ()
    return next((path / name for name in found if (path / name).isfile()), None)


def is_checkpoint_itself(name: str, inside: set[str], is_marked: bool) -> bool:
    """Return whether a directory is not an item, but a checkpoint in a directory of checkpoints.

    Since 0.5.11 a whole checkpoint has a metadata file, and its items have none. Before, a name that ends in a step
    decides, unless the parent directory has the metadata file.
    """
    return layout.STEP_METADATA in inside or (not is_marked and steps.ends_in_step(name))


def items_in(path: Location, names: set[str], handlers: Mapping[str, str] | None = None) -> dict[str, Item]:
    """Return the named items of a CheckpointManager step or an Orbax v1 directory; not those of an unknown kind.

    ``handlers`` are those that the step's metadata records."""
    handlers, is_marked = handlers or {}, bool(names.intersection(ITEMS_MARKERS))
    found, whole = dict[str, Item](), dict[str, set[str]]()
    items_of = dict[str, Item]()  # of those that may be checkpoints of their own
    for name in sorted(names):
        child = path / name
        # What a killed save left in a directory of runs, such as run_1, is not an item of a step.
        if name.startswith(layout.PROCESS_PREFIX) or temporaries.parse(name) or not child.isdir():
            continue
        inside = names_in(child)
        is_whole = name not in handlers and is_checkpoint_itself(name, inside, is_marked)
        if is_whole:
            whole[name] = inside
        if (item := _item(child, inside, handlers.get(name, ""))) is not None:
            (items_of if is_whole else found)[name] = item
    chosen = _items_among(path, found, whole, is_marked) if whole else ()
    return dict(sorted((found | {name: items_of[name] for name in chosen if name in items_of}).items()))


def _items_among(
    path: Location, items: Mapping[str, Item], whole: Mapping[str, set[str]], is_marked: bool
) -> Iterable[str]:
    """Return which directories are items although they look like checkpoints of their own.

    In a marked step, beside JSON, or in a step, a tree with a name that is not a step is an item that a checkpointer of
    its own wrote. And in the step of a manager before 0.5.11, which is named by its number, ``net_1`` is an item."""
    is_step = steps.parse_step(path.name.removeprefix("checkpoint_")) is not None
    named = {name for name in whole if not steps.ends_in_step(name)}
    has_json = any(item.format is None for item in items.values())
    if is_marked or (named and (has_json or (is_step and len(named) == len(whole)))):
        return named
    if not is_step or any(layout.STEP_METADATA in inside for inside in whole.values()):
        return ()
    return {name for name in whole if steps.parse_step(name.removeprefix("checkpoint_")) is None}


def _item(path: Location, names: set[str], handler: str) -> Item | None:
    """Return an item with these names in its directory; None if its kind is unknown."""
    if is_tree(path, names):
        return Item(Format.ORBAX, path, names)
    if keys := sorted(names.intersection(RANDOM_KEYS)):
        return Item(Format.ORBAX, path / keys[0])
    file = json_file(path, names, handler)
    return None if file is None else Item(None, file)


def missing_part(path: Location, names: set[str], handler: str) -> str | None:
    """Return what an item with these names lacks that its handler has written; None also of an unknown handler."""
    kind = kind_of_handler(handler)
    if kind is ItemKind.TREE and layout.TREE_METADATA not in names:
        return layout.TREE_METADATA
    if kind is ItemKind.ARRAY and not names.intersection((layout.SINGLE_ARRAY, layout.MANIFEST)):
        return layout.SINGLE_ARRAY
    if kind is ItemKind.JSON and not names.difference(FINISHED):
        return "data.json" if ".v1." in handler else layout.JSON_FILES[0]
    if kind is ItemKind.KEY:
        key = layout.JAX_KEY if "Jax" in handler else layout.NUMPY_KEY
        return next((f"{name}/" for name in (key, f"{key}_metadata") if not names_in(path / name)), None)
    return None


def recorded_but_missing(part: str) -> str:
    """Say that a file or folder is missing of which the step's metadata tells."""
    return f"{part} is missing, which {layout.STEP_METADATA} records"


def missing_in_items(
    path: Location, names: set[str], items: Mapping[str, Item], handlers: Mapping[str, str]
) -> Iterator[str]:
    """Yield what items of a step lack: recorded items anything that their handlers write, others a part of a tree."""
    for name, handler in handlers.items():
        child = path / name
        if name in NO_ITEMS:
            continue
        if name not in names or not child.isdir():
            yield recorded_but_missing(f"{name}/")
        elif part := missing_part(child, names_in(child), handler):
            yield recorded_but_missing(f"{name}/{part}")
    for name, item in items.items():
        inside = item.names or names_in(item.location)
        if item.format and is_tree(item.location, inside) and (missing := missing_in_tree(item.location, inside)):
            yield f"{name}/{missing}"


def only_orbax_has(items: Mapping[str, Item]) -> bool:
    """Return whether a tree is beside a JSON or key item: before 0.5.11 composites had no other marker."""
    kinds = {item.location.name in RANDOM_KEYS or item.format for item in items.values()}
    return True in kinds or kinds == {None, Format.ORBAX}
