"""Tell what one directory of Orbax holds, by names, first bytes and records: a tree, an array, items, JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import MissingPathError
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import foreign

# Any of these marks a directory as an Orbax pytree; Flax itself checks for the first two.
TREE_MARKERS = (layout.TREE_METADATA, layout.MANIFEST)
ITEMS_MARKERS = (layout.STEP_METADATA, layout.V1_MARKER)
MARKERS = (*TREE_MARKERS, *ITEMS_MARKERS)  # that only Orbax writes
FINISHED = (layout.STEP_METADATA, layout.COMMIT_FILE)  # custom handlers leave these too
STEP_DIRECTORY = re.compile(r"(.*_)?(\d+)", re.DOTALL)  # as Orbax's managers name them
RANDOM_KEYS = (layout.JAX_KEY, layout.NUMPY_KEY)  # the tree inside an item of Orbax's random key handlers
_PARTS = (layout.SHARDING, layout.STRINGS, layout.ARRAY_METADATAS)  # other files of a tree
_DATA_FILE = re.compile(layout.DATA_FILE_PATTERN)
_FIRST_BYTES = 512
_ARRAY_TYPE = re.compile(rb'"value_type": ?"(jax\.Array|np\.ndarray|scalar)"(?!, ?"skip_deserialize": ?true)')
_MAX_RECORD_BYTES = 16 * 2**20  # of STEP_METADATA, in which users may store their own
# The first keys of the msgpack file of T5X, and the beginnings of the names of its arrays' folders (t5x 2021 to 2024,
# documented in its checkpoint importer). Version 0 begins with the state itself, as Orbax's files may; but in the place
# of each array it has a spec, whose first keys are these.
_T5X_KEYS = (b"\xa9optimizer", b"\xa7version", b"\xaeflax_optimizer")
_T5X_STATE_KEYS, _T5X_SPEC = (b"\xa6target", b"\xa5state"), b"\xa6driver\xa4zarr"
_T5X_ARRAYS = ("target.", "state.", "param_states.")
_NO_ITEMS = {layout.DESCRIPTOR}
_OF_STEPS = {*FINISHED, *ITEMS_MARKERS}
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
    # Read, and never written by Flax, Orbax's checkpointers or this library.
    T5X = "T5X"
    ARRAYS = "arrays without a tree"  # of jax's own array serialization
    # Of other programs: read by its own path, and something else than a checkpoint for all look-ups.
    READ_ONLY = "of another program"


class ItemKind(enum.Enum):
    """Kind of an item, by the handler of Orbax that reads it."""

    TREE = "tree"
    ARRAY = "array"
    KEY = "random key"
    JSON = "JSON"
    UNKNOWN = "of an unknown kind"


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One tree, or other item, of a checkpoint."""

    format: Format | None  # on-disk format; None for a plain JSON item
    location: Location  # the file or directory of this item
    # In that directory, if they were listed.
    names: set[str] | None = dataclasses.field(default=None, compare=False, repr=False)
    layout: str = ""  # name of its `layouts.ReadOnlyLayout`; leaves are restored by the rules of the format

    def unlisted(self) -> Item:
        """Return this item without a listing."""
        return dataclasses.replace(self, location=self.location.unlisted())


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """Description of a directory by the rules for those of Orbax."""

    layout: Layout | None
    missing: str = ""  # what a checkpoint lacks; empty for a complete one
    items: Mapping[str, Item] = dataclasses.field(default_factory=dict)  # as in `Contents`
    unknown: tuple[str, ...] = ()  # names of directories beside the items that are not items


def names_in(path: Location) -> set[str]:
    """Return the names in a directory; none if it is not one."""
    with suppress(MissingPathError):  # removed meanwhile
        return set(path.listdir()) if path.isdir() else set()
    return set()


def holds_files(path: Location) -> bool:
    """Return whether a path is a file or a link, or a directory with one at any depth; a commit file does not count."""
    if path.isfile() or presence.islink(path.path):
        return True
    names = names_in(path).difference((layout.COMMIT_FILE,))
    return any(holds_files(path / name) for name in names)


def is_tree(path: Location, names: set[str]) -> bool:
    """Return whether a directory with these names is a pytree, or a single array."""
    if names.intersection(TREE_MARKERS):
        return True
    child = path / layout.MSGPACK_FILE
    # Orbax's handler of single arrays calls its array by the same name.
    return layout.MSGPACK_FILE in names and (_begins_like_aggregate(_first_bytes(child)) or is_array(child))


def beside_tree(path: Location, names: set[str]) -> list[str]:
    """Return the names of files and folders in the directory of a tree that are no part of it, as a configuration."""
    has_database = layout.MANIFEST in names
    others = []
    for name in sorted(names.difference(layout.TREE_FILES, layout.STEP_FILES, (layout.ARRAY_METADATAS,))):
        child = path / name
        if child.isfile():
            is_part = bool(layout.ZARR2_CHUNK.fullmatch(name))
        elif has_database:
            is_part = name == layout.DATA_DIRECTORY or name.startswith(layout.PROCESS_PREFIX)
        else:
            is_part = name.startswith(layout.PROCESS_PREFIX) or holds_array(child)
        if not is_part and not temporaries.is_temporary(name) and holds_files(child):
            others.append(name)
    return others


def holds_array(path: Location) -> bool:
    """Return whether a directory is an array, or has one at any depth."""
    names = names_in(path)
    return bool(names.intersection(layout.ARRAY_METADATA_FILES)) or any(holds_array(path / name) for name in names)


def is_array(path: Location) -> bool:
    """Return whether a directory has the zarr metadata of one array."""
    return any((path / name).isfile() for name in layout.ARRAY_METADATA_FILES)


def is_t5x(path: Location, names: set[str]) -> bool:
    """Return whether a directory is a checkpoint of T5X: a msgpack file of TensorStore specs, arrays beside it."""
    if layout.MSGPACK_FILE not in names or names.intersection(MARKERS):
        return False
    has_arrays = any(name.startswith(_T5X_ARRAYS) for name in names)
    if not has_arrays:
        return False
    first = _first_bytes(path / layout.MSGPACK_FILE)
    is_state = first[1:].startswith(_T5X_STATE_KEYS) and _T5X_SPEC in first
    return first[:1] in (b"\x81", b"\x82", b"\x83") and (is_state or any(key in first for key in _T5X_KEYS))


def is_never_merged(path: Location, names: set[str]) -> bool:
    """Return whether Orbax 0.4.3 to 0.4.7 wrote it without OCDBT: one process' database, and empty array folders."""
    folders = [name for name in names if (path / name).isdir()]
    databases = [name for name in folders if name.startswith(layout.PROCESS_PREFIX)]
    finished = names.issuperset((layout.TREE_METADATA, layout.MSGPACK_FILE)) and not names & {
        layout.STEP_METADATA,
        layout.DATA_DIRECTORY,
    }
    return finished and len(databases) == 1 and len(folders) > 1


def recorded_handlers(path: Location, names: set[str]) -> Mapping[str, str] | str:
    """Return the handlers that a step's metadata records: of each item, or of the one tree; empty without a record.

    Orbax writes them since 0.11.6 when the save is complete: each item that was saved, and no other (measured)."""
    if layout.STEP_METADATA not in names:
        return {}
    file = path / layout.STEP_METADATA
    if not file.isfile():
        return {}
    try:
        content = json.loads(file.read(0, _MAX_RECORD_BYTES))
    except (ValueError, RecursionError, MissingPathError):  # Orbax takes what does not decode as missing
        return {}
    handlers = content.get("item_handlers") if isinstance(content, dict) else None
    if isinstance(handlers, dict):
        return {name: handler for name, handler in handlers.items() if isinstance(handler, str)}
    return handlers if isinstance(handlers, str) else {}


def kind_of_handler(handler: str) -> ItemKind:
    """Return the kind of the items that a handler of Orbax, v0 or v1, writes; a user's own may have a name alike."""
    package, name = handler.partition(".")[0], handler.rpartition(".")[2]
    if package != "orbax":
        return ItemKind.UNKNOWN
    if "RandomKey" in name:
        return ItemKind.KEY
    if name.startswith(("Json", "Metrics")):
        return ItemKind.JSON
    if name.startswith("ArrayCheckpoint"):
        return ItemKind.ARRAY
    if name.startswith(("PyTree", "StandardCheckpoint")):
        return ItemKind.TREE
    return ItemKind.UNKNOWN


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


def missing_part(path: Location, names: set[str], handler: str) -> str | None:
    """Return the path, relative to an item, of a file or folder that its handler has written and that is not there.

    ``names`` are those in the item's directory. None also if nothing is known of the handler."""
    kind = kind_of_handler(handler)
    if kind is ItemKind.TREE and layout.TREE_METADATA not in names:
        return layout.TREE_METADATA
    if kind is ItemKind.ARRAY and not names.intersection((layout.SINGLE_ARRAY, layout.MANIFEST)):
        return layout.SINGLE_ARRAY
    if kind is ItemKind.JSON and not names.difference(FINISHED):
        return "data.json" if ".v1." in handler else layout.JSON_FILES[0]
    if kind is ItemKind.KEY:
        key = layout.JAX_KEY if "Jax" in handler else layout.NUMPY_KEY
        wanted = (key, f"{key}_metadata")
        absent = [name for name in wanted if not names_in(path / name)]
        return f"{absent[0]}/" if absent else None
    return lost_manifest_in(path, names) if kind in (ItemKind.TREE, ItemKind.ARRAY) else None


def lost_manifest_in(path: Location, names: set[str]) -> str | None:
    """Return the name of the manifest if a directory has an array database, or a tree of arrays, without it."""
    return layout.MANIFEST if lost_manifest(path, names) else None


def lost_manifest(path: Location, names: set[str]) -> bool:
    """Return whether a directory has an array database, or a tree of arrays, without the manifest that locates them.

    An interrupted copy leaves that, as the manifest's name is the last one; so does a rename where a bucket is mounted
    as a file system, which copies file by file (s3fs, measured)."""
    if names.intersection((layout.MANIFEST, layout.MSGPACK_FILE, *layout.ARRAY_METADATA_FILES)):
        return False  # without OCDBT, the array of a bare leaf lies in the directory itself
    data_files = _data_files(path, names)
    if data_files is not None:  # or those of an array of that name
        return all(map(_DATA_FILE.fullmatch, data_files))
    # Without OCDBT there is a folder for each array: look at no more than the first.
    others = names - {layout.ARRAY_METADATAS}
    if layout.TREE_METADATA not in names or any((path / name).isdir() for name in others):
        return False
    return bool(_ARRAY_TYPE.search((path / layout.TREE_METADATA).read()))  # perhaps a tree without arrays


def _data_files(path: Location, names: set[str]) -> set[str] | None:
    """Return the names in the folder that a database has for its data; None if there is no such folder."""
    data = path / layout.DATA_DIRECTORY
    return names_in(data) if layout.DATA_DIRECTORY in names and data.isdir() else None


def lost_structure(path: Location, names: set[str]) -> bool:
    """Return whether a directory has parts of a tree of Orbax, but lost the structure file."""
    if names.intersection(_PARTS) or any(name.startswith(layout.PROCESS_PREFIX) for name in names):
        return True
    if any(map(_DATA_FILE.fullmatch, _data_files(path, names) or ())):
        return True
    chunks = path / layout.MSGPACK_FILE  # of an array item that lost the metadata of its one array
    if layout.MSGPACK_FILE in names and chunks.isdir() and any(map(layout.ZARR2_CHUNK.fullmatch, names_in(chunks))):
        return True
    return bool(names.intersection(FINISHED)) and is_folder_of_arrays(path, names)


def is_folder_of_arrays(path: Location, names: set[str]) -> bool:
    """Return whether a directory has nothing but folders of single arrays, some of them with zarr metadata.

    Beside other files, a folder of a single array is a data set."""
    folders = [(path / name) for name in names.difference(FINISHED) if not steps.is_foreign(name)]
    return all(folder.isdir() for folder in folders) and any(
        names_in(one).intersection(layout.ARRAY_METADATA_FILES) for one in folders
    )


def json_name(names: set[str], handler: str = "") -> str | None:
    """Return the name of the file of a JSON item among the names in its directory, or None.

    With a recorded ``handler`` of JSON, that file may have any name, or others beside it."""
    rest = names.difference(FINISHED)
    known = rest.intersection(layout.JSON_FILES)
    is_json = kind_of_handler(handler) is ItemKind.JSON
    if len(rest) == 1 and (known or is_json):
        return next(iter(rest))
    return next(iter(known)) if len(known) == 1 and is_json else None


def json_file(path: Location, names: set[str], handler: str = "") -> Location | None:
    """Return the one file of a JSON item that was saved as a checkpoint of its own, or None."""
    name = json_name(names, handler)
    return path / name if name is not None and (path / name).isfile() else None


def _first_bytes(file: Location) -> bytes:
    """Return the first bytes of a file; none of what is not a file."""
    return file.read(0, _FIRST_BYTES) if file.isfile() else b""


def _begins_like_aggregate(first: bytes) -> bool:
    """Return whether a file begins like Orbax's aggregate file: a map, an array, or a placeholder's text."""
    return bool(first) and (first[0] in range(0x80, 0xA0) or first[0] in (0xDC, 0xDD, 0xDE, 0xDF) or b"://" in first)


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
    inside = dict[str, set[str]]()
    for name in sorted(names):
        child = path / name
        # What a killed save left in a directory of runs, such as run_1, is not an item of a step.
        is_part = name.startswith(layout.PROCESS_PREFIX) or temporaries.is_temporary(name)
        if not is_part and child.isdir():
            inside[name] = names_in(child)
    whole = {
        name for name, found in inside.items() if name not in handlers and is_checkpoint_itself(name, found, is_marked)
    }
    found = {
        name: item
        for name in inside
        if name not in whole and (item := _item((path / name), inside[name], handlers.get(name, "")))
    }
    if whole and not is_marked:
        for name in _items_that_look_like_steps(path, found, {one: inside[one] for one in whole}):
            if (item := _item((path / name), inside[name], "")) is not None:
                found[name] = item
    return dict(sorted(found.items()))


def _items_that_look_like_steps(path: Location, items: Mapping[str, Item], whole: Mapping[str, set[str]]) -> set[str]:
    """Return which directories are items although their names end in numbers, or they have step metadata of their own.

    Beside JSON, or in a step, a tree with a name that is not a step is an item that a checkpointer of its own wrote.
    And in the step of a manager before 0.5.11, which is named by its number, ``net_1`` is an item."""
    step = path.name.removeprefix("checkpoint_")
    is_step = steps.parse_step(step) is not None
    has_json = any(item.format is None for item in items.values())
    named = {name for name in whole if not steps.ends_in_step(name)}
    if named and (has_json or (is_step and len(named) == len(whole))):
        return named
    unmarked = {name for name, inside in whole.items() if layout.STEP_METADATA not in inside}
    if not is_step or len(unmarked) < len(whole):
        return set()
    return {name for name in unmarked if steps.parse_step(name.removeprefix("checkpoint_")) is None}


def _item(path: Location, names: set[str], handler: str) -> Item | None:
    """Return an item with these names in its directory; None if its kind is unknown."""
    keys = sorted(names.intersection(RANDOM_KEYS))
    if is_tree(path, names):
        return Item(Format.ORBAX, path, names)
    if keys:
        return Item(Format.ORBAX, (path / keys[0]))
    file = json_file(path, names, handler)
    return Item(None, file) if file is not None else None


def only_orbax_has(items: Mapping[str, Item]) -> bool:
    """Return whether a tree is beside a JSON or key item: before 0.5.11 composites had no other marker."""
    kinds = {item.location.name in RANDOM_KEYS or item.format for item in items.values()}
    return True in kinds or kinds == {None, Format.ORBAX}


def is_one_checkpoint(path: Location, names: set[str], found: Description) -> bool:
    """Return whether a directory is one checkpoint, whole or not, and not a directory of checkpoints."""
    if found.layout is not Layout.ITEMS:
        return found.layout is not None
    # Before Orbax 0.5.11 nothing but names, and what only a composite has, tells items from checkpoints.
    is_named = bool(names.intersection((*ITEMS_MARKERS, *layout.TREE_ITEMS, *RANDOM_KEYS)))
    return is_named or only_orbax_has(found.items) or STEP_DIRECTORY.fullmatch(path.name) is not None


def describe(path: Location, names: set[str]) -> Description:
    """Describe a directory by the rules for those of Orbax; incomplete if it is none, too."""
    if is_tree(path, names):
        kind = Layout.T5X if is_t5x(path, names) else Layout.TREE
        why = _missing_in_tree(path, names)
        items = {"": Item(Format.ORBAX, path.content_root())}
        return Description(kind, why or "", items)
    is_one_array = bool(names.intersection(layout.ARRAY_METADATA_FILES))
    if not names.intersection(FINISHED) and (is_one_array or is_folder_of_arrays(path, names)):
        return _arrays(path, names)
    handlers = recorded_handlers(path, names)
    if isinstance(handlers, str):
        return _flat_without_tree(path, names, handlers)
    if file := json_file(path, names):
        return Description(Layout.JSON, items={"": Item(None, file)})
    items = items_in(path, names, handlers)
    if items or handlers:
        rest = names - items.keys() - _NO_ITEMS
        unknown = tuple(sorted(name for name in rest if (path / name).isdir()))
        why = next(_missing_in_items(path, names, items, handlers), None)
        return Description(Layout.ITEMS, why or "", items, unknown)
    return _without_items(path, names)


def _arrays(path: Location, names: set[str]) -> Description:
    """Describe one array, or a folder of them. The arrays of a tree have its key paths, with dots, as names."""
    is_one = bool(names.intersection(layout.ARRAY_METADATA_FILES))
    if not is_one and any("." in name.strip(".") for name in names):
        return Description(Layout.TREE, _LOST_STRUCTURE)
    return Description(Layout.ARRAYS, items={"": Item(Format.ORBAX, path)})


def _missing_in_tree(path: Location, names: set[str]) -> str | None:
    unmerged = any(name.startswith(layout.PROCESS_PREFIX) for name in names) and layout.MANIFEST not in names
    if unmerged and not is_never_merged(path, names):
        return f"{layout.MANIFEST} is missing: the writers' databases were never merged"
    if lost_manifest(path, names):
        return _not_copied(layout.MANIFEST)
    if layout.STEP_METADATA in names and not names & {layout.TREE_METADATA, layout.MSGPACK_FILE}:
        return f"{layout.TREE_METADATA} is missing"
    return None


def _flat_without_tree(path: Location, names: set[str], handler: str) -> Description:
    """Describe a checkpoint of one item whose handler is recorded, and which has no sign of a tree."""
    if part := missing_part(path, names, handler):
        layout_of_lost = Layout.JSON if "Json" in handler else Layout.TREE
        return Description(layout_of_lost, _recorded(part))
    if file := json_file(path, names, handler):
        return Description(Layout.JSON, items={"": Item(None, file)})
    if kind_of_handler(handler) is ItemKind.KEY:
        key = layout.JAX_KEY if layout.JAX_KEY in names else layout.NUMPY_KEY
        return Description(Layout.TREE, items={"": Item(Format.ORBAX, path / key)})
    return _without_items(path, names)


def _missing_in_items(
    path: Location, names: set[str], items: Mapping[str, Item], handlers: Mapping[str, str]
) -> Iterator[str]:
    """Yield what items of a step lack: those that are recorded all that their handlers write, others a manifest."""
    for name, handler in handlers.items():
        child = path / name
        if name in _NO_ITEMS:
            continue
        if name not in names or not child.isdir():
            yield _recorded(f"{name}/")
        elif part := missing_part(child, names_in(child), handler):
            yield _recorded(f"{name}/{part}")
    for name, item in items.items():
        if name not in handlers and item.format and lost_manifest(item.location, item.names or names_in(item.location)):
            yield _not_copied(f"{item.location.path[len(path.path) + 1 :]}/{layout.MANIFEST}")


def _without_items(path: Location, names: set[str]) -> Description:
    if lost_structure(path, names):
        return Description(Layout.TREE, _LOST_STRUCTURE)
    if names.issuperset(FINISHED) and any(holds_files(path / name) for name in names.difference(FINISHED)):
        return Description(Layout.CUSTOM)
    missing = f"none of {layout.TREE_METADATA}, {layout.MANIFEST} or item directories is in it"
    return Description(Layout.CUSTOM if names <= _OF_STEPS else None, missing)


def _not_copied(file: str) -> str:
    return f"{file} is missing, so it was not copied, or renamed, to the end"


def _recorded(part: str) -> str:
    return f"{part} is missing, which {layout.STEP_METADATA} records"


def looks_begun(path: Location, names: set[str]) -> bool:
    """Return whether a directory has no file, or is a checkpoint that was begun: it, or an item, has a marker."""
    if names.intersection(MARKERS) or lost_structure(path, names) or not holds_files(path):
        return True
    inside = {(path / name): names_in(path / name) for name in names}
    if any(_is_whole_checkpoint(child, found) for child, found in inside.items()):
        return False  # a directory of checkpoints, which would be lost with it
    if _has_sign(path, names) or any(_has_sign(child, found) for child, found in inside.items()):
        return True
    return only_orbax_has(items_in(path, names))


def _is_whole_checkpoint(path: Location, inside: set[str]) -> bool:
    """Return whether a path in a directory without markers is a checkpoint of its own; ``inside`` has its names."""
    name = path.name
    if steps.is_foreign(name) or layout.is_upload_marker(name):
        return False
    if inside:
        return is_checkpoint_itself(name, inside, is_marked=False) and _has_sign(path, inside)
    try:
        return steps.ends_in_step(name) and path.isfile() and foreign.may_be_msgpack_tree(path)
    except MissingPathError:  # removed meanwhile
        return False


def _has_sign(path: Location, names: set[str]) -> bool:
    # A checkpoint that is being removed from a store may have only commit_success.txt left.
    if names.intersection((*MARKERS, *FINISHED)) or lost_structure(path, names):
        return True
    return any(layout.TEMPORARY in name or layout.is_upload_marker(name) for name in names)
