"""Tell what a directory of Orbax lacks: a manifest, a structure file, or what a recorded handler has written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.orbax_items import Item, ItemKind, kind_of_handler
from flax_ckpt_compat._discovery.orbax_trees import FINISHED, is_folder_of_arrays, is_never_merged, names_in

_PARTS = (layout.SHARDING, layout.STRINGS, layout.ARRAY_METADATAS)  # other files of a tree
_DATA_FILE = re.compile(layout.DATA_FILE_PATTERN)
_ARRAY_TYPE = re.compile(rb'"value_type": ?"(jax\.Array|np\.ndarray|scalar)"(?!, ?"skip_deserialize": ?true)')
NO_ITEMS = {layout.DESCRIPTOR}  # that handlers are recorded for


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
    is_lost = kind in (ItemKind.TREE, ItemKind.ARRAY) and lost_manifest(path, names)
    return layout.MANIFEST if is_lost else None


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


def missing_in_tree(path: Location, names: set[str]) -> str | None:
    """Return what a tree in a directory lacks, in words; None for a whole one."""
    unmerged = any(name.startswith(layout.PROCESS_PREFIX) for name in names) and layout.MANIFEST not in names
    if unmerged and not is_never_merged(path, names):
        return f"{layout.MANIFEST} is missing: the writers' databases were never merged"
    if lost_manifest(path, names):
        return _not_copied(layout.MANIFEST)
    if layout.STEP_METADATA in names and not names & {layout.TREE_METADATA, layout.MSGPACK_FILE}:
        return f"{layout.TREE_METADATA} is missing"
    return None


def missing_in_items(
    path: Location, names: set[str], items: Mapping[str, Item], handlers: Mapping[str, str]
) -> Iterator[str]:
    """Yield what items of a step lack: those that are recorded all that their handlers write, others a manifest."""
    for name, handler in handlers.items():
        child = path / name
        if name in NO_ITEMS:
            continue
        if name not in names or not child.isdir():
            yield recorded_but_missing(f"{name}/")
        elif part := missing_part(child, names_in(child), handler):
            yield recorded_but_missing(f"{name}/{part}")
    for name, item in items.items():
        if name not in handlers and item.format and lost_manifest(item.location, item.names or names_in(item.location)):
            yield _not_copied(f"{item.location.path[len(path.path) + 1 :]}/{layout.MANIFEST}")


def _not_copied(file: str) -> str:
    return f"{file} is missing, so it was not copied, or renamed, to the end"


def recorded_but_missing(part: str) -> str:
    """Say that a file or folder is missing of which the step's metadata tells."""
    return f"{part} is missing, which {layout.STEP_METADATA} records"
