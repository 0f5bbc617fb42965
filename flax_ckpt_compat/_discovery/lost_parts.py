"""Tell what a directory of Orbax lacks: a manifest, a structure file, or what a recorded handler has written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.local.presence import stays_inside
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import foreign, formats
from flax_ckpt_compat._discovery.orbax_items import Item, ItemKind, kind_of_handler
from flax_ckpt_compat._discovery.orbax_trees import (
    FINISHED,
    arrays_below,
    is_folder_of_arrays,
    is_never_merged,
    is_tree,
    names_in,
)

PARTS = (layout.SHARDING, layout.STRINGS, layout.ARRAY_METADATAS)  # other files of a tree
_STRUCTURES = {layout.TREE_METADATA, layout.MSGPACK_FILE}  # either says where arrays belong
_DATA_FILE = re.compile(layout.DATA_FILE_PATTERN)
_ARRAY_TYPE = re.compile(rb'"value_type": ?"(jax\.Array|np\.ndarray|scalar)"(?!, ?"skip_deserialize": ?true)')
_DAMAGE = (ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError)
_PLACEHOLDER = steps.ARRAYS_PLACEHOLDER.encode()
_MAX_BYTES = 2**20  # bytes to look at; larger files are left to the reader
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
    if names.intersection(PARTS) or any(name.startswith(layout.PROCESS_PREFIX) for name in names):
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
    if layout.STEP_METADATA in names and not names & _STRUCTURES:
        return f"{layout.TREE_METADATA} is missing"
    if layout.TREE_METADATA in names and not names & {layout.MANIFEST, layout.MSGPACK_FILE}:
        return _missing_folder(path, names)
    return _missing_in_database(path, names)


def _missing_folder(path: Location, names: set[str]) -> str | None:
    """Return what a tree lacks that has a folder for each array, in words."""
    wanted = len(_ARRAY_TYPE.findall((path / layout.TREE_METADATA).read()))
    if names.intersection(layout.ARRAY_METADATA_FILES):
        return None  # the array of a bare leaf
    found = names.difference(layout.TREE_FILES, layout.STEP_FILES, (layout.ARRAY_METADATAS,))
    if len(found) >= wanted or (there := sum(arrays_below(path / name) for name in found)) >= wanted:
        return None
    stored: set[str] = set()
    with suppress(*_DAMAGE):  # of which readers tell
        for one in json.loads((path / layout.TREE_METADATA).read())["tree_metadata"].values():
            if _ARRAY_TYPE.search(json.dumps(one).encode()):
                # Two leaves whose key paths join to one name, such as a/b and a.b, lie in one folder.
                stored.add(".".join(str(key["key"]) for key in one["key_metadata"]))
    if there >= len(stored):
        return None
    return f"{len(stored) - there} of the {len(stored)} arrays are missing that {layout.TREE_METADATA} records"


def _missing_in_database(path: Location, names: set[str]) -> str | None:
    """Return what an array database lacks, in words; the database itself is asked where names leave it open.

    Orbax and this library write more than one of its parts, so a copy that lost one shows it."""
    has_values = layout.CHECKSUMS in names or any(name.startswith(layout.PROCESS_PREFIX) for name in names)
    is_whole = has_values and layout.DATA_DIRECTORY in names and names & _STRUCTURES
    if layout.MANIFEST not in names or is_whole:
        return None
    lost = formats.missing_file(path)
    return None if lost is None else f"{lost} is missing"


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


def _not_copied(file: str) -> str:
    return f"{file} is missing, so it was not copied, or renamed, to the end"


def recorded_but_missing(part: str) -> str:
    """Say that a file or folder is missing of which the step's metadata tells."""
    return f"{part} is missing, which {layout.STEP_METADATA} records"


def missing_array(file: Location, head: bytes) -> str | None:
    """Return what the arrays beside a msgpack file lack, in words; ``head`` are its first bytes.

    Flax writes the text `steps.ARRAYS_PLACEHOLDER` and a folder's name in the place of an array of several processes.
    """
    folder = file.sibling(steps.ARRAYS_POSTFIX)
    is_all = len(head) < foreign.FIRST_BYTES and not file.is_remote
    if _PLACEHOLDER not in head and (is_all or not folder.isdir()):
        return None
    content = file.read(0, _MAX_BYTES)
    for match in re.finditer(re.escape(_PLACEHOLDER), content):
        array = _rest_of_text(content, match.start())
        if array is not None and stays_inside(array) and (lost := _missing_in_array(folder / array)):
            return f"{folder.name}/{array}/{lost} is missing"
    return None


def _rest_of_text(content: bytes, start: int) -> str | None:
    """Return what follows the placeholder in the msgpack text that starts at an offset; None if it is no text."""
    for width, tag in enumerate((0xD9, 0xDA, 0xDB)):
        header = content[start - (1 << width) - 1 : start]
        if header[:1] == bytes([tag]):
            break
    else:
        header = content[start - 1 : start]
    length = int.from_bytes(header[1:], "big") if header[1:] else header[0] - 0xA0 if header else 0
    text = content[start + len(_PLACEHOLDER) : start + length]
    return text.decode(errors="replace") if length >= len(_PLACEHOLDER) else None


def _missing_in_array(folder: Location) -> str | None:
    """Return the name of a file that a zarr array of Flax lacks; it stores every chunk."""
    names = names_in(folder)
    if layout.ZARR2_METADATA not in names:
        return layout.ZARR2_METADATA
    with suppress(*_DAMAGE):  # which the reader tells
        fields = json.loads((folder / layout.ZARR2_METADATA).read(0, _MAX_BYTES))
        counts = [-(-side // chunk) for side, chunk in zip(fields["shape"], fields["chunks"], strict=True)]
        chunks = [name for name in names if layout.ZARR2_CHUNK.fullmatch(name)]
        if len(chunks) < math.prod(counts):
            return f"(one of {math.prod(counts)} chunks)"
    return None
