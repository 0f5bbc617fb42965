"""Detect formats from marker names and first bytes; decode nothing, import no backend."""

from __future__ import annotations

import dataclasses
import errno
import re

from flax_ckpt_compat._core import errors, steps
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import is_denied, translated
from flax_ckpt_compat._discovery.foreign import folder_looks_like, foreign_remedy, may_be_msgpack_tree
from flax_ckpt_compat._discovery.orbax_directory import (
    FINISHED,
    ITEMS_MARKERS,
    RANDOM_KEYS,
    TREE_MARKERS,
    Item,
    holds_files,
    is_checkpoint_itself,
    is_never_merged,
    is_tree,
    items_in,
    json_file,
    lost_manifest,
    lost_structure,
    names_in,
    only_orbax_has,
)

MARKERS = (*TREE_MARKERS, *ITEMS_MARKERS)  # that only Orbax writes
STEP_DIRECTORY = re.compile(r"(.*_)?(\d+)", re.DOTALL)  # as Orbax's managers name them
_NO_ITEMS = {layout.DESCRIPTOR}
ABSENT = "it does not exist"
DENIED = "permission to list it is denied"
_REPLACEMENTS = 5  # of a checkpoint by other processes, while one looks at it


@dataclasses.dataclass(frozen=True, slots=True)
class DetectedItems:
    """Contents of a path."""

    location: Location  # the checkpoint
    items: dict[str, Item]  # name → tree; a checkpoint that is one tree has the single item ''
    unknown: tuple[str, ...] = ()  # names of directories beside the items that are not items

    @property
    def trees(self) -> dict[str, Item]:
        """Return the items that are pytrees."""
        return {name: item for name, item in self.items.items() if item.format is not None}


def what_is_missing(path: Location, *, lists_denied: bool = False) -> str | None:
    """Return why the checkpoint is incomplete, or None; `ABSENT` if it was removed.

    Names and sizes tell, and the metadata of a tree that has neither a database nor a folder.
    If the system refuses to list it, return `DENIED` with ``lists_denied``, else raise StorageError."""
    why = _look_once(path, lists_denied)
    for _ in range(_REPLACEMENTS):
        if why is None or path.is_remote:
            break
        # What another process replaces meanwhile may be listed while its contents are deleted.
        before = path.identity()
        why = _look_once(path, lists_denied)
        if path.identity() == before:
            break
    return why


def is_gone(path: Location, why: str | None) -> bool:
    """Return whether a path that `what_is_missing` gave ``why`` for was removed; links to nothing stay there."""
    return why == ABSENT and not presence.islink(path.path)


def _look_once(path: Location, lists_denied: bool) -> str | None:
    """See `what_is_missing`; what this returns may be wrong if another process replaces the checkpoint meanwhile."""
    try:
        with translated(path.path):
            if not path.isdir():
                return "the file is empty" if path.is_empty() else None
            names = set(path.listdir())
            return _what_is_missing_in(path, names) if names else "the directory is empty"
    except errors.StorageError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)) or error.errno == errno.ELOOP:
            return ABSENT
        if lists_denied and is_denied(error):
            return DENIED
        raise


def _what_is_missing_in(path: Location, names: set[str]) -> str | None:
    if why := path.why_unfinished(names):
        return why
    unfinished = sorted(name for name in names if layout.TEMPORARY in name)
    if unfinished:
        return f"the directory still holds {unfinished[0]}, which Orbax had not finished"
    if is_tree(path, names):
        unmerged = any(name.startswith(layout.PROCESS_PREFIX) for name in names) and layout.MANIFEST not in names
        if unmerged and not is_never_merged(path, names):
            return f"{layout.MANIFEST} is missing: the writers' databases were never merged"
        if lost_manifest(path, names):
            return _not_copied(layout.MANIFEST)
        if layout.STEP_METADATA in names and not names & {layout.TREE_METADATA, layout.MSGPACK_FILE}:
            return f"{layout.TREE_METADATA} is missing"
        return None
    if items := items_in(path, names):
        trees = (item for item in items.values() if item.format)
        torn = next(
            (tree.location for tree in trees if lost_manifest(tree.location, tree.names or names_in(tree.location))),
            None,
        )
        return None if torn is None else _not_copied(f"{torn.path[len(path.path) + 1 :]}/{layout.MANIFEST}")
    if json_file(path, names):
        return None
    if lost_structure(path, names):
        structure = (
            f"no {layout.TREE_METADATA} and no msgpack file '{layout.MSGPACK_FILE}', which say where they belong"
        )
        return f"there are arrays, but {structure}, nor the {layout.ZARR2_METADATA} of a single one"
    if names.issuperset(FINISHED) and any(holds_files(path / name) for name in names.difference(FINISHED)):
        return None
    return f"none of {layout.TREE_METADATA}, {layout.MANIFEST} or item directories is in it"


def _not_copied(file: str) -> str:
    return f"{file} is missing, so it was not copied, or renamed, to the end"


def is_orbax_directory(path: Location) -> bool:
    """Return whether a path is a directory that Orbax, or our Orbax backend, wrote as one checkpoint."""
    if not path.isdir():
        return False
    names = names_in(path)
    if is_tree(path, names) or json_file(path, names):
        return True
    items = items_in(path, names)
    named = names.intersection((*ITEMS_MARKERS, *layout.TREE_ITEMS, *RANDOM_KEYS))
    return bool(items and (named or only_orbax_has(items))) or lost_structure(path, names)


def has_no_orbax_marker(path: Location) -> bool:
    """Return whether a directory has no marker that only Orbax writes, just a common name."""
    return not names_in(path).intersection(MARKERS)


def is_only_arrays(path: Location) -> bool:
    """Return whether a folder named like the arrays of a msgpack file has no structure, so it is no checkpoint."""
    return not names_in(path).intersection((*MARKERS, layout.MSGPACK_FILE))


def is_certainly_orbax(path: Location) -> bool:
    """Return whether a path is one Orbax checkpoint, by a marker that nothing else has."""
    # The cheap check first: it does not read through a directory of many checkpoints.
    return not has_no_orbax_marker(path) and is_orbax_directory(path)


def is_unfinished(path: Location) -> bool:
    """Return whether a directory is one checkpoint that Orbax began to write.

    Temporaries of whole checkpoints do not count: their parents are directories of checkpoints.
    """
    begun = tuple(item + layout.TEMPORARY for item in layout.TREE_ITEMS)
    return any(name in ITEMS_MARKERS or name.startswith(begun) for name in names_in(path))


def is_step_of_manager(path: Location) -> bool:
    """Return whether a path is a complete step of an Orbax CheckpointManager: a directory of items."""
    # A flat directory may be a checkpoint of any prefix.
    return path.isdir() and not is_tree(path, names_in(path)) and what_is_missing(path) is None


def is_step_by_name(path: Location) -> bool:
    """Return whether a directory holds items and is named like a step, the only signs before Orbax 0.5.11."""
    if not STEP_DIRECTORY.fullmatch(path.name) or not path.isdir():
        return False
    return bool(items_in(path, names_in(path)))


def foreign_look(path: Location) -> str | None:
    """Return what a directory without markers of Orbax or ours looks like, or None."""
    return folder_looks_like(path) if path.isdir() and not _looks_begun(path) else None


def detect(path: Location) -> DetectedItems:
    """Detect the format and items of a checkpoint; any file may be msgpack (see `foreign.file_looks_like`).

    Raise CheckpointNotFoundError, IncompleteCheckpointError, or UnrecognizedFormatError for another kind of directory.
    """
    missing = what_is_missing(path)
    if missing == ABSENT:
        raise errors.CheckpointNotFoundError(f"{path} does not exist", path=path.path)
    look = foreign_look(path) if missing else None
    if look:
        raise errors.UnrecognizedFormatError(
            f"{path} is not a checkpoint of Flax or Orbax: it looks like {look}. {foreign_remedy(path)}", path=path.path
        )
    if missing:
        raise errors.IncompleteCheckpointError(
            f"{path} is not a complete checkpoint: {missing}. It was never finished, or files were lost in copying; "
            "restore another step, or delete it.",
            path=path.path,
        )
    if path.isdir():
        with translated(path.path):
            names = set(path.listdir())
        if is_tree(path, names):
            return DetectedItems(path, {"": Item(Format.ORBAX, path.content_root())})
        note = json_file(path, names)
        items = {"": Item(None, note)} if note else items_in(path, names)
        if not items:
            raise errors.UnrecognizedFormatError(
                f"{path} was written by Orbax, but holds no tree, array or JSON item that is known here; "
                "restore it with the orbax_checkpointer that wrote it.",
                path=path.path,
            )
        unknown = sorted(name for name in names - items.keys() - _NO_ITEMS if (path / name).isdir())
        return DetectedItems(path, items, tuple(unknown))
    return DetectedItems(path, {"": Item(Format.MSGPACK, path)})


def _looks_begun(path: Location) -> bool:
    """Return whether a directory has no file, or is a checkpoint that was begun: it, or an item, has a marker."""
    names = names_in(path)
    if names.intersection(MARKERS) or lost_structure(path, names) or not holds_files(path):
        return True
    inside = {path / name: names_in(path / name) for name in names}
    if any(_is_whole_checkpoint(child, found) for child, found in inside.items()):
        return False  # a directory of checkpoints, which would be lost with it
    if _has_marker(path, names) or any(_has_marker(child, found) for child, found in inside.items()):
        return True
    return only_orbax_has(items_in(path, names))


def _is_whole_checkpoint(path: Location, inside: set[str]) -> bool:
    """Return whether a path in a directory without markers is a checkpoint of its own; ``inside`` has its names."""
    name = path.name
    if steps.is_foreign(name) or layout.is_upload_marker(name):
        return False
    if inside:
        return is_checkpoint_itself(name, inside, is_marked=False) and _has_marker(path, inside)
    try:
        return steps.ends_in_step(name) and path.isfile() and may_be_msgpack_tree(path)
    except errors.StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):  # removed meanwhile
            return False
        raise


def _has_marker(path: Location, names: set[str]) -> bool:
    # A checkpoint that is being removed from a store may have only commit_success.txt left.
    if names.intersection((*MARKERS, *FINISHED)) or lost_structure(path, names):
        return True
    return any(layout.TEMPORARY in name or layout.is_upload_marker(name) for name in names)
