"""Tell trees of Orbax, arrays and folders of arrays by names and first bytes, and what they lack."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import MissingPathError
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import formats

# Any of these marks a directory as an Orbax pytree; Flax itself checks for the first two.
TREE_MARKERS = (layout.TREE_METADATA, layout.MANIFEST)
ITEMS_MARKERS = (layout.STEP_METADATA, layout.V1_MARKER)
MARKERS = (*TREE_MARKERS, *ITEMS_MARKERS)  # that only Orbax writes
FINISHED = (layout.STEP_METADATA, layout.COMMIT_FILE)  # custom handlers leave these too
PARTS = (layout.SHARDING, layout.STRINGS, layout.ARRAY_METADATAS)  # other files of a tree
_STRUCTURES = {layout.TREE_METADATA, layout.MSGPACK_FILE}  # either says where arrays belong
_DATA_FILE = re.compile(layout.DATA_FILE_PATTERN)
_ARRAY_TYPE = re.compile(rb'"value_type": ?"(jax\.Array|np\.ndarray|scalar)"(?!, ?"skip_deserialize": ?true)')
_DAMAGE = (ValueError, TypeError, KeyError, RecursionError)  # of which readers tell
_FIRST_BYTES = 512
# The first keys of the msgpack file of T5X, and the beginnings of the names of its arrays' folders (t5x 2021 to 2024,
# documented in its checkpoint importer). Version 0 begins with the state itself, as Orbax's files may; but in the place
# of each array it has a spec, whose first keys are these.
_T5X_KEYS = (b"\xa9optimizer", b"\xa7version", b"\xaeflax_optimizer")
_T5X_STATE_KEYS, _T5X_SPEC = (b"\xa6target", b"\xa5state"), b"\xa6driver\xa4zarr"
_T5X_ARRAYS = ("target.", "state.", "param_states.")


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
    """Return whether a directory has nothing but folders of single arrays, some of them with zarr metadata.

    Beside other files, a folder of a single array is a data set."""
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
        # An interrupted copy leaves that, as the manifest's name is the last one; so does a rename where a bucket is
        # mounted as a file system, which copies file by file (s3fs, measured).
        if not names.intersection((layout.MSGPACK_FILE, *layout.ARRAY_METADATA_FILES)) and _has_data_files(path, names):
            return f"{layout.MANIFEST} is missing, so it was not copied, or renamed, to the end"
    if layout.STEP_METADATA in names and not has_structure:
        return f"{layout.TREE_METADATA} is missing"
    if layout.MANIFEST not in names:
        return _missing_folder(path, names) if layout.TREE_METADATA in names else None
    # Orbax and this library write more than one part of a database, so a copy that lost one shows it.
    has_values = layout.CHECKSUMS in names or has_databases
    lost = None if has_values and layout.DATA_DIRECTORY in names and has_structure else formats.missing_file(path)
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
    with suppress(*_DAMAGE):
        names_of_arrays = {
            ".".join(str(key["key"]) for key in one["key_metadata"])  # a/b and a.b lie in one folder
            for one in json.loads(text)["tree_metadata"].values()
            if _ARRAY_TYPE.search(json.dumps(one).encode())
        }
        stored = len(names_of_arrays)
    if there < stored:
        return f"{stored - there} of the {stored} arrays are missing that {layout.TREE_METADATA} records"
    return None


def lost_structure(path: Location, names: set[str]) -> bool:
    """Return whether a directory has parts of a tree of Orbax, but lost the structure file."""
    if names.intersection(PARTS) or any(name.startswith(layout.PROCESS_PREFIX) for name in names):
        return True
    if any(map(_DATA_FILE.fullmatch, _names_of_data(path, names))):
        return True
    chunks = path / layout.MSGPACK_FILE  # of an array item that lost the metadata of its one array
    if layout.MSGPACK_FILE in names and any(map(layout.ZARR2_CHUNK.fullmatch, names_in(chunks))):
        return True
    return bool(names.intersection(FINISHED)) and is_folder_of_arrays(path, names)


def _has_data_files(path: Location, names: set[str]) -> bool:
    """Return whether a directory has the folder that a database has for its data, and not an array of that name."""
    is_there = layout.DATA_DIRECTORY in names and (path / layout.DATA_DIRECTORY).isdir()
    return is_there and all(map(_DATA_FILE.fullmatch, _names_of_data(path, names)))


def _names_of_data(path: Location, names: set[str]) -> set[str]:
    return names_in(path / layout.DATA_DIRECTORY) if layout.DATA_DIRECTORY in names else set()


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
