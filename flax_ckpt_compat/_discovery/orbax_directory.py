"""Tell what a directory of Orbax holds, by names, first bytes and records, and what it lacks: trees, arrays, items."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import CorruptCheckpointError, MissingPathError
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import steps
from flax_ckpt_compat._discovery.formats import backend_for

# Any of these marks a directory as an Orbax pytree; Flax itself checks for the first two.
TREE_MARKERS = (layout.TREE_METADATA, layout.MANIFEST)
ITEMS_MARKERS = (layout.STEP_METADATA, layout.V1_MARKER)
MARKERS = (*TREE_MARKERS, *ITEMS_MARKERS)  # that only Orbax writes
FINISHED = (layout.STEP_METADATA, layout.COMMIT_FILE)  # custom handlers leave these too
PARTS = (layout.SHARDING, layout.STRINGS, layout.ARRAY_METADATAS, layout.CHECKSUMS)  # other files of a tree
_STRUCTURES = {layout.TREE_METADATA, layout.MSGPACK_FILE}  # either says where arrays belong
_DATA_FILE = re.compile(layout.DATA_FILE_PATTERN)
_ARRAY_TYPE = re.compile(rb'"value_type": ?"(jax\.Array|np\.ndarray|scalar)"(?!, ?"skip_deserialize": ?true)')
_FIRST_BYTES = 512
# The first keys of the msgpack file of T5X, and the beginnings of the names of its arrays' folders (t5x 2021 to 2024,
# documented in its checkpoint importer). Version 0 begins with the state itself, as Orbax's files may; but in the place
# of each array it has a spec, whose first keys are these.
_T5X_KEYS = (b"\xa9optimizer", b"\xa7version", b"\xaeflax_optimizer")
_T5X_STATE_KEYS, _T5X_SPEC = (b"\xa6target", b"\xa5state"), b"\xa6driver\xa4zarr"
_T5X_ARRAYS = ("target.", "state.", "param_states.")
RANDOM_KEYS = (layout.JAX_KEY, layout.NUMPY_KEY)  # the tree inside an item of Orbax's random key handlers
NO_ITEMS = {layout.DESCRIPTOR}  # that handlers are recorded for
RECORDED = f"is missing, which {layout.STEP_METADATA} records"
_MAX_RECORD_BYTES = 16 * 2**20  # of STEP_METADATA, in which users may store their own


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
            is_part = name.startswith(layout.PROCESS_PREFIX) or any(arrays_below(child))
        if not is_part and not temporaries.parse(name) and holds_files(child):
            others.append(name)
    return others


def arrays_below(path: Location) -> Iterator[Location]:
    """Yield the arrays that a directory is, or has at any depth."""
    names = names_in(path)
    if names.intersection(layout.ARRAY_METADATA_FILES):
        yield path
    else:
        for name in names:
            yield from arrays_below(path / name)


def is_array(path: Location) -> bool:
    """Return whether a directory has the zarr metadata of one array."""
    return any((path / name).isfile() for name in layout.ARRAY_METADATA_FILES)


def is_folder_of_arrays(path: Location, names: set[str]) -> bool:
    """Return whether a directory has only folders of arrays, some with metadata; beside files, they are a data set."""
    folders = [(path / name) for name in names.difference(FINISHED) if not steps.is_foreign(name)]
    return all(folder.isdir() for folder in folders) and any(
        names_in(one).intersection(layout.ARRAY_METADATA_FILES) for one in folders
    )


def is_t5x(path: Location, names: set[str]) -> bool:
    """Return whether a directory is a checkpoint of T5X: a msgpack file of TensorStore specs, arrays beside it."""
    has_arrays = any(name.startswith(_T5X_ARRAYS) for name in names)
    if layout.MSGPACK_FILE not in names or names.intersection(MARKERS) or not has_arrays:
        return False
    first = _first_bytes(path / layout.MSGPACK_FILE)
    is_state = first[1:].startswith(_T5X_STATE_KEYS) and _T5X_SPEC in first
    return first[:1] in (b"\x81", b"\x82", b"\x83") and (is_state or any(key in first for key in _T5X_KEYS))


def missing_in_tree(path: Location, names: set[str]) -> str | None:
    """Return what a tree in a directory lacks, in words; None for a whole one."""
    has_databases = any(name.startswith(layout.PROCESS_PREFIX) for name in names)
    has_structure = bool(names & _STRUCTURES)
    if layout.MANIFEST not in names:
        if has_databases and not _is_never_merged(path, names):
            return f"{layout.MANIFEST} is missing: the writers' databases were never merged"
        # An interrupted copy leaves that, as the manifest's name is the last one.
        is_other = names.intersection((layout.MSGPACK_FILE, *layout.ARRAY_METADATA_FILES))
        data = path / layout.DATA_DIRECTORY  # an array of that name has other files
        if not is_other and data.isdir() and all(map(_DATA_FILE.fullmatch, names_in(data))):
            return f"{layout.MANIFEST} is missing, so it was not copied, or renamed, to the end"
    if layout.STEP_METADATA in names and not has_structure:
        return f"{layout.TREE_METADATA} is missing"
    if layout.MANIFEST not in names:
        return _missing_folder(path, names) if layout.TREE_METADATA in names else None
    # Orbax and this library write more than one part of a database, so a copy that lost one shows it.
    has_values = layout.CHECKSUMS in names or has_databases
    is_whole = has_values and layout.DATA_DIRECTORY in names and has_structure
    lost = None if is_whole else cast(Any, backend_for(Format.ORBAX)).missing_file(path)
    return None if lost is None else f"{lost} is missing"


def _missing_folder(path: Location, names: set[str]) -> str | None:
    """Return what a tree lacks that has a folder for each array, in words."""
    if names.intersection((layout.MSGPACK_FILE, *layout.ARRAY_METADATA_FILES)):
        return None  # the array of a bare leaf lies in the directory itself
    text = (path / layout.TREE_METADATA).read()
    wanted = len(_ARRAY_TYPE.findall(text))
    found = [path / name for name in names.difference(layout.TREE_FILES, layout.STEP_FILES, (layout.ARRAY_METADATAS,))]
    if not wanted or (len(found) >= wanted and any(one.isdir() for one in found)):
        return None  # not all of thousands are looked at
    there = sum(1 for one in found for _ in arrays_below(one))
    stored = 0 if there else wanted  # where the file does not decode
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        entries = json.loads(text)["tree_metadata"].values()
        paths = [one["key_metadata"] for one in entries if _ARRAY_TYPE.search(json.dumps(one).encode())]
        stored = len({".".join(str(key["key"]) for key in path) for path in paths})  # a/b and a.b lie in one folder
    what = f"{stored - there} of the {stored} arrays are missing that {layout.TREE_METADATA} records"
    return what if there < stored else None


def lost_structure(path: Location, names: set[str]) -> bool:
    """Return whether a directory has parts of a tree of Orbax, but lost the structure file."""
    if names.intersection(PARTS) or any(name.startswith(layout.PROCESS_PREFIX) for name in names):
        return True
    # Data of a database, and chunks of an array item that lost the metadata of its one array.
    for name, part in ((layout.DATA_DIRECTORY, _DATA_FILE), (layout.MSGPACK_FILE, layout.ZARR2_CHUNK)):
        if name in names and any(map(part.fullmatch, names_in(path / name))):
            return True
    return bool(names.intersection(FINISHED)) and is_folder_of_arrays(path, names)


def _is_never_merged(path: Location, names: set[str]) -> bool:
    """Return whether Orbax 0.4.3 to 0.4.7 wrote it without OCDBT: one process' database, and empty array folders."""
    folders = [name for name in names if (path / name).isdir()]
    databases = [name for name in folders if name.startswith(layout.PROCESS_PREFIX)]
    is_whole = names >= _STRUCTURES and names.isdisjoint((layout.STEP_METADATA, layout.DATA_DIRECTORY))
    return is_whole and len(databases) == 1 and len(folders) > 1


def _first_bytes(file: Location) -> bytes:
    """Return the first bytes of a file; none of what is not a file."""
    return file.read(0, _FIRST_BYTES) if file.isfile() else b""


def _begins_like_aggregate(first: bytes) -> bool:
    """Return whether a file begins like Orbax's aggregate file: a map, an array, or a placeholder's text."""
    return bool(first) and (first[0] in range(0x80, 0xA0) or first[0] in (0xDC, 0xDD, 0xDE, 0xDF) or b"://" in first)


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
    layout: str = ""  # of a file of another program: see `formats`; leaves are restored by the rules of the format


def recorded_handlers(path: Location, names: set[str]) -> Mapping[str, str]:
    """Return the handlers that a step's metadata records: of each item, or of '', the one tree."""
    # Orbax writes them since 0.11.6 when the save is complete: each item that was saved, and no other (measured).
    handlers = (_record(path, names) or {}).get("item_handlers")
    if isinstance(handlers, str):
        return {"": handlers} if handlers else {}
    found = handlers.items() if isinstance(handlers, dict) else ()
    return {name: handler for name, handler in found if name and isinstance(handler, str)}


def check_record(path: Location, names: set[str]) -> None:
    """Raise CorruptCheckpointError if a step's metadata does not decode: nothing tells then what the step had."""
    if _record(path, names) is None:
        what = f"{path / layout.STEP_METADATA} does not decode, so nothing tells whether all of {path} is there"
        remedy = "restore that file from a backup, or another step"
        raise CorruptCheckpointError(f"{what}; {remedy}", path=path.path)


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


def is_checkpoint_itself(name: str, inside: set[str], is_marked: bool) -> bool:
    """Return whether a directory is not an item, but a checkpoint in a directory of checkpoints."""
    # Since Orbax 0.5.11 checkpoints have a metadata file, and items have none. Before, names that end in a step decide.
    return layout.STEP_METADATA in inside or (not is_marked and steps.split_step(name) is not None)


def items_in(path: Location, names: set[str], handlers: Mapping[str, str] | None = None) -> dict[str, Item]:
    """Return the named items of a manager's step or a v1 directory, of known kinds; ``handlers`` are the recorded."""
    handlers, is_marked = handlers or {}, bool(names.intersection(ITEMS_MARKERS))
    items, whole = dict[str, Item](), dict[str, set[str]]()  # what is in the second may be a checkpoint of its own
    for name in sorted(names):
        child = path / name
        # What a killed save left in a directory of runs, such as run_1, is not an item of a step.
        if name.startswith(layout.PROCESS_PREFIX) or temporaries.parse(name) or not child.isdir():
            continue
        inside = names_in(child)
        if (item := item_of(child, inside, handlers.get(name, ""))) is not None:
            items[name] = item
        if name not in handlers and is_checkpoint_itself(name, inside, is_marked):
            whole[name] = inside
    sure = {name: item for name, item in items.items() if name not in whole}
    chosen = _items_among(path, sure, whole, is_marked) if whole else ()
    return {name: item for name, item in items.items() if name in sure or name in chosen}


def _items_among(
    path: Location, items: Mapping[str, Item], whole: Mapping[str, set[str]], is_marked: bool
) -> Iterable[str]:
    """Return which directories are items although they look like checkpoints of their own."""
    # In a marked step, beside JSON, or in a step, a tree with a name that is not a step is an item that a checkpointer
    # of its own wrote. And in the step of a manager before 0.5.11, which is named by its number, net_1 is an item.
    is_step = steps.parse_step(path.name.removeprefix("checkpoint_")) is not None
    named = {name for name in whole if not steps.split_step(name)}
    has_json = any(item.format is None for item in items.values())
    if is_marked or (named and (has_json or (is_step and len(named) == len(whole)))):
        return named
    if not is_step or any(layout.STEP_METADATA in inside for inside in whole.values()):
        return ()
    return {name for name in whole if steps.parse_step(name.removeprefix("checkpoint_")) is None}


def item_of(path: Location, names: set[str], handler: str) -> Item | None:
    """Return an item with these names in its directory; None if its kind is unknown."""
    if is_tree(path, names):
        return Item(Format.ORBAX, path, names)
    is_json = kind_of_handler(handler) is ItemKind.JSON
    if not is_json and (keys := sorted(names.intersection(RANDOM_KEYS))):
        return Item(Format.ORBAX, path / keys[0])
    # The one file of a JSON item; with a recorded handler it may have any name, or others beside it.
    rest = names.difference(FINISHED)
    known = rest.intersection(layout.JSON_FILES)
    found = rest if len(rest) == 1 and (known or is_json) else known if len(known) == 1 and is_json else ()
    return next((Item(None, path / name) for name in found if (path / name).isfile()), None)


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


def missing_in_items(
    path: Location, names: set[str], items: Mapping[str, Item], handlers: Mapping[str, str]
) -> Iterator[str]:
    """Yield what items of a step lack: recorded items anything that their handlers write, others a part of a tree."""
    for name, handler in handlers.items():
        child = path / name
        if name in NO_ITEMS:
            continue
        if name not in names or not child.isdir():
            yield f"{name}/ {RECORDED}"
        elif part := missing_part(child, names_in(child), handler):
            yield f"{name}/{part} {RECORDED}"
    for name, item in items.items():
        inside = item.names or names_in(item.location)
        if item.format and is_tree(item.location, inside) and (missing := missing_in_tree(item.location, inside)):
            yield f"{name}/{missing}"


def only_orbax_has(items: Mapping[str, Item]) -> bool:
    """Return whether a tree is beside a JSON or key item: before 0.5.11 composites had no other marker."""
    kinds = {item.location.name in RANDOM_KEYS or item.format for item in items.values()}
    return True in kinds or kinds == {None, Format.ORBAX}
