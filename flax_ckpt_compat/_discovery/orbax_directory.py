"""Tell what one directory of Orbax holds, by names and first bytes: a tree, an array, items, JSON."""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import translated

# Any of these marks a directory as an Orbax pytree; Flax itself checks for the first two.
TREE_MARKERS = (layout.TREE_METADATA, layout.MANIFEST)
ITEMS_MARKERS = (layout.STEP_METADATA, layout.V1_MARKER)
FINISHED = (layout.STEP_METADATA, layout.COMMIT_FILE)  # custom handlers leave these too
_PARTS = (layout.SHARDING, layout.STRINGS, layout.ARRAY_METADATAS)  # other files of a tree
_DATA_FILE = re.compile(layout.DATA_FILE_PATTERN)
RANDOM_KEYS = (layout.JAX_KEY, layout.NUMPY_KEY)  # the tree inside an item of Orbax's random key handlers
_FIRST_BYTES = 512
_ARRAY_TYPE = re.compile(rb'"value_type": ?"(jax\.Array|np\.ndarray|scalar)"(?!, ?"skip_deserialize": ?true)')


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One tree of a checkpoint."""

    format: Format | None  # on-disk format; None for a plain JSON item
    location: Location  # the file or directory of this tree
    # In that directory, if they were listed.
    names: set[str] | None = dataclasses.field(default=None, compare=False, repr=False)

    def unlisted(self) -> Item:
        """Return this item without a listing."""
        return dataclasses.replace(self, location=self.location.unlisted())


def names_in(path: Location) -> set[str]:
    """Return the names in a directory; none if it is not one."""
    with translated(path.path), suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile
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
    return layout.MSGPACK_FILE in names and (_holds_msgpack_tree(child) or is_array(child))


def is_array(path: Location) -> bool:
    """Return whether a directory has the zarr metadata of one array."""
    return any((path / name).isfile() for name in layout.ARRAY_METADATA_FILES)


def is_never_merged(path: Location, names: set[str]) -> bool:
    """Return whether Orbax 0.4.3 to 0.4.7 wrote it without OCDBT: one process' database, and empty array folders."""
    folders = [name for name in names if (path / name).isdir()]
    databases = [name for name in folders if name.startswith(layout.PROCESS_PREFIX)]
    finished = names.issuperset((layout.TREE_METADATA, layout.MSGPACK_FILE)) and not names & {
        layout.STEP_METADATA,
        layout.DATA_DIRECTORY,
    }
    return finished and len(databases) == 1 and len(folders) > 1


def lost_manifest(path: Location, names: set[str]) -> bool:
    """Return whether a directory has an array database, or a tree of arrays, without the manifest that locates them.

    An interrupted copy leaves that, as the manifest's name is the last one; so does a rename where a bucket is mounted
    as a file system, which copies file by file (s3fs, measured)."""
    if names.intersection((layout.MANIFEST, layout.MSGPACK_FILE)):
        return False
    data_files = _data_files(path, names)
    if data_files is not None:  # or those of an array of that name
        return all(map(_DATA_FILE.fullmatch, data_files))
    # Without OCDBT there is a folder for each array: look at no more than the first.
    others = names - {layout.ARRAY_METADATAS}
    if layout.TREE_METADATA not in names or any((path / name).isdir() for name in others):
        return False
    with translated(path.path):  # perhaps a tree without arrays
        return bool(_ARRAY_TYPE.search((path / layout.TREE_METADATA).read()))


def _data_files(path: Location, names: set[str]) -> set[str] | None:
    """Return the names in the folder that a database has for its data; None if there is no such folder."""
    data = path / layout.DATA_DIRECTORY
    return names_in(data) if layout.DATA_DIRECTORY in names and data.isdir() else None


def lost_structure(path: Location, names: set[str]) -> bool:
    """Return whether a directory has parts of a tree, or folders of single arrays, but lost the structure file."""
    if names.intersection(_PARTS) or any(name.startswith(layout.PROCESS_PREFIX) for name in names):
        return True
    if any(map(_DATA_FILE.fullmatch, _data_files(path, names) or ())):
        return True
    chunks = path / layout.MSGPACK_FILE  # of an array item that lost the metadata of its one array
    if layout.MSGPACK_FILE in names and chunks.isdir() and any(map(layout.ZARR2_CHUNK.fullmatch, names_in(chunks))):
        return True
    # Beside other files, a folder of a single array is a data set.
    folders = [path / name for name in names.difference(FINISHED) if not steps.is_foreign(name)]
    return all(folder.isdir() for folder in folders) and any(map(is_array, folders))


def json_file(path: Location, names: set[str]) -> Location | None:
    """Return the one file of a JSON item that was saved as a checkpoint of its own, or None."""
    rest = names.difference(FINISHED)
    file = path / next(iter(rest), "")
    return file if len(rest) == 1 and rest.intersection(layout.JSON_FILES) and file.isfile() else None


def _holds_msgpack_tree(path: Location) -> bool:
    """Return whether a file begins like Orbax's aggregate file: a map, an array, or a placeholder's text."""
    if not path.isfile():
        return False
    with translated(path.path):
        first = path.read(0, _FIRST_BYTES)
    return bool(first) and (first[0] in range(0x80, 0xA0) or first[0] in (0xDC, 0xDD, 0xDE, 0xDF) or b"://" in first)


def is_checkpoint_itself(name: str, inside: set[str], is_marked: bool) -> bool:
    """Return whether a directory is not an item, but a checkpoint in a directory of checkpoints.

    Since 0.5.11 a whole checkpoint has a metadata file, and its items have none. Before, a name that ends in a step
    decides, unless the parent directory has the metadata file.
    """
    return layout.STEP_METADATA in inside or (not is_marked and steps.ends_in_step(name))


def items_in(path: Location, names: set[str]) -> dict[str, Item]:
    """Return the named items of a CheckpointManager step or an Orbax v1 directory."""
    items = {}
    is_marked = bool(names.intersection(ITEMS_MARKERS))
    for name in sorted(names):
        child = path / name
        # What a killed save left in a directory of runs, such as run_1, is not an item of a step.
        if temporaries.is_temporary(name) or not child.isdir():
            continue
        inside = names_in(child)
        if is_checkpoint_itself(name, inside, is_marked):
            continue
        keys = sorted(inside.intersection(RANDOM_KEYS))
        if is_tree(child, inside):
            items[name] = Item(Format.ORBAX, child, inside)
        elif keys:
            items[name] = Item(Format.ORBAX, child / keys[0])
        elif len(inside - {layout.COMMIT_FILE}) == 1 and inside.intersection(layout.JSON_FILES):
            items[name] = Item(None, child / next(iter(inside.intersection(layout.JSON_FILES))))
    return items


def only_orbax_has(items: dict[str, Item]) -> bool:
    """Return whether a tree is beside a JSON or key item: before 0.5.11 composites had no other marker."""
    kinds = {item.location.name in RANDOM_KEYS or item.format for item in items.values()}
    return True in kinds or kinds == {None, Format.ORBAX}
