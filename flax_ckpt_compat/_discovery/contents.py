"""Decide what a path holds, once: every look-up, restore, command, save and removal asks `Contents`.

Names, sizes and first bytes tell, and the records of what a checkpoint consists of; nothing is decoded, and no backend
imported. Recorded beats present: an item that the step's metadata lists and that is not there makes it incomplete.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import functools
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress

from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.location import Location, is_url
from flax_ckpt_compat._core.numbered_names import ARRAYS_PLACEHOLDER
from flax_ckpt_compat._discovery import foreign, formats, orbax_directory, steps
from flax_ckpt_compat._discovery.orbax_directory import FINISHED, ITEMS_MARKERS, MARKERS, Item, ItemKind, holds_files

STEP_DIRECTORY = re.compile(r"(.*_)?(\d+)", re.DOTALL)  # as Orbax's managers name them
_LOST_STRUCTURE = (
    f"there are arrays, but no {layout.TREE_METADATA}, msgpack file '{layout.MSGPACK_FILE}' or {layout.ZARR2_METADATA} "
    "of a single one, which say where they belong (jax's own array serialization has none: TensorStore reads them)"
)
_PLACEHOLDER = ARRAYS_PLACEHOLDER.encode()
# A text of msgpack that begins with the placeholder, before a folder's name: its length, in the tag or behind it.
_REFERENCE = re.compile(rb"(?:([\xb1-\xbf])|\xd9(.)|\xda(..)|\xdb(....))" + re.escape(_PLACEHOLDER), re.DOTALL)
_MAX_REFERRING = 2**20  # bytes to look at; larger files are left to the reader


class State(enum.Enum):
    """The kinds of what a path holds."""

    COMPLETE = "complete"  # a checkpoint; its data may still be damaged
    INCOMPLETE = "incomplete"  # a checkpoint that was begun, or lost a part
    FOREIGN = "foreign"  # something else
    TEMPORARY = "temporary"  # what a save writes before it has its name, or left when it was interrupted
    DENIED = "denied"  # there is something that the system refuses to list
    ABSENT = "absent"


class Layout(enum.Enum):
    """The layouts of checkpoints on disk."""

    FILE = "msgpack file"
    TREE = "one tree in a directory"
    ITEMS = "items of a step"
    JSON = "JSON alone"
    CUSTOM = "files of a custom handler"
    T5X = "T5X"  # read, and never written by Flax, Orbax's checkpointers or this library
    ARRAYS = "arrays without a tree"  # of a tree that lost it, or of jax's own serialization; never complete
    READ_ONLY = "of another program"  # read by its own path, and something else than a checkpoint for all look-ups


_NEVER_WRITTEN = (None, Layout.T5X, Layout.READ_ONLY)  # by Flax, Orbax's checkpointers or us


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """The description of what a path holds."""

    location: Location
    state: State
    why: str = ""  # what is missing, what it looks like, or whose temporary it is
    layout: Layout | None = None  # of checkpoints, where it shows
    # Name → item; a checkpoint that is one tree or file has the single item ''.
    items: Mapping[str, Item] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # names of directories beside the items that are not items
    is_upload: bool = False  # incomplete as the unfinished save to a store is
    is_whole: bool = False  # no part is missing, be it a temporary
    is_marked: bool = False  # a name in it is one that only Orbax, or our Orbax backend, writes
    is_one_checkpoint: bool = False  # whole or not, whatever its name: not a directory of checkpoints

    @property
    def unread(self) -> list[str]:
        """Return the unknown items that hold anything."""
        return [name for name in self.unknown if holds_files(self.location / name)]

    @property
    def is_complete(self) -> bool:
        """Return whether nothing that names, sizes and records tell is missing."""
        return self.state is State.COMPLETE

    @property
    def is_readable(self) -> bool:
        """Return whether restores read it by its own path: complete checkpoints, and layouts of other programs."""
        return self.is_complete or (self.state is State.FOREIGN and bool(self.items))

    @property
    def is_certain(self) -> bool:
        """Return whether it is one whole checkpoint of Flax or Orbax; items may be checkpoints of their own."""
        is_one = self.is_marked or self.layout is not Layout.ITEMS or not any(map(steps.split_step, self.items))
        return self.counts_for_keep and is_one

    def may_be_removed(self, *, with_items: bool = False) -> bool:
        """Return whether ``keep`` and ``overwrite`` may remove it; those with items, if it writes such."""
        return self.is_certain and (with_items or self.layout is not Layout.ITEMS)

    @property
    def counts_for_keep(self) -> bool:
        """Return whether it is one of the checkpoints of which ``keep`` keeps the newest."""
        return self.is_complete and self.layout not in _NEVER_WRITTEN and (self.is_marked or not self.unknown)


class ChangedError(Exception):
    """Another process has changed what was looked at: look again."""


def contents_of(path: Location, *, lists_denied: bool = False, tolerant: bool = True) -> Contents:
    """Describe what a path holds; what may not be listed is `State.DENIED` with ``lists_denied``, else StorageError.

    Raise `ChangedError`, unless ``tolerant``, if it is not whole and others replace it while it is looked at."""
    found = _look_once(path, lists_denied)
    if found.is_complete or found.is_whole or path.is_remote:
        return found
    before = path.identity()  # while others replace it, a name may be listed whose content is gone
    found = _look_once(path, lists_denied)
    if not tolerant and path.identity() != before:
        raise ChangedError
    return found


def is_certainly_orbax(path: Location) -> bool:
    """Return whether a path is one checkpoint of Orbax, whole or not, by a marker that nothing else has."""
    found = contents_of(path) if orbax_directory.names_in(path).intersection(MARKERS) else None
    return found is not None and found.is_one_checkpoint and (found.is_complete or found.layout is not Layout.CUSTOM)


def why_inside(path: Location) -> str | None:
    """Return why nothing is saved to a path, which need not exist: it lies in a checkpoint of Orbax's format."""
    if (around := checkpoint_around(path)) is None:
        return None
    remedy = f"pass a directory outside of it, such as {around.parent}"
    return f"{around} is a checkpoint, and would be removed with all in it; {remedy}"


def checkpoint_around(path: Location) -> Location | None:
    """Return the checkpoint in Orbax's format that a path lies in, or None."""
    parent = path.at(path.resolve()).parent.unlisted()
    return _around_in_store(parent) if path.is_remote else _around(parent)


def _around(folder: Location) -> Location | None:
    """Return the first checkpoint of a folder and all above it, found by the names of markers, without listings."""
    while folder.path.strip("/") and is_url(folder.path) == is_url(folder.parent.path):  # a bucket holds none
        with suppress(errors.StorageError):  # where a look is refused, there is none
            if any((folder / name).isfile() for name in MARKERS) and is_certainly_orbax(folder):
                return folder
        folder = folder.parent
    return None


_around_in_store = functools.lru_cache(maxsize=64)(_around)  # a request for each folder and marker


def is_step_of_manager(path: Location) -> bool:
    """Return whether a path is a complete step of a CheckpointManager; a flat directory may be one of any prefix."""
    found = contents_of(path)
    return found.is_complete and found.layout in (Layout.ITEMS, Layout.JSON, Layout.CUSTOM)


def is_only_arrays(path: Location) -> bool:
    """Return whether a folder named like the arrays of a msgpack file has no structure, so it is no checkpoint."""
    return not orbax_directory.names_in(path).intersection((*MARKERS, layout.MSGPACK_FILE))


def temporary_of(name: str) -> str | None:
    """Return whose unfinished save a name is, or None."""
    if (match := temporaries.parse(name)) is not None:
        return f"an unfinished save of {match['name']}"
    whole, partial, _ = name.partition(layout.PARTIAL_SAVE)
    if partial:
        return f"a partial save of {whole} by Orbax: orbax.checkpoint.experimental.v1.partial.finalize completes it"
    whole, temporary, _ = name.partition(layout.TEMPORARY)
    return f"an unfinished save of {whole} by Orbax" if temporary else None


def checkpoint_at(path: Location) -> Contents:
    """Describe the complete checkpoint, or temporary, at a path, to be opened; raise if it is something else."""
    found = contents_of(path)
    if found.state is State.ABSENT:
        raise errors.CheckpointNotFoundError(f"{path} does not exist; pass a checkpoint", path=path.path)
    if dangling := presence.dangling_link(path.path):
        raise errors.CheckpointNotFoundError(dangling, path=path.path)
    if found.state is State.FOREIGN and not found.is_readable:
        raise errors.UnrecognizedFormatError(foreign_message(found), path=path.path)
    if not found.is_readable and not (found.state is State.TEMPORARY and found.is_whole):
        if found.state is State.TEMPORARY:
            what = f"{path} is not a checkpoint yet: it is {found.why}. Restore another step."
        else:
            remedy = "Files were lost, or not all were copied: restore another step, or the lost files from a backup."
            what = f"{path} is not a complete checkpoint: {found.why}. {remedy}"
        raise errors.IncompleteCheckpointError(what, path=path.path)
    orbax_directory.check_record(path, orbax_directory.names_in(path))
    return found


def foreign_message(found: Contents) -> str:
    """Return what an error says of something else than a checkpoint."""
    remedy = foreign.foreign_remedy(found.location)
    return f"{found.location} is not a checkpoint of Flax or Orbax: it looks like {found.why}. {remedy}"


def _look_once(path: Location, lists_denied: bool) -> Contents:
    """See `contents_of`; this may be wrong where another process replaces the checkpoint meanwhile."""
    try:
        found = _directory(path, set(path.listdir())) if path.isdir() else _file(path)
    except errors.StorageError as error:
        if _is_absent(error):  # a link to nothing was a checkpoint once
            dangling = presence.dangling_link(path.path)
            return Contents(path, State.INCOMPLETE if dangling else State.ABSENT, dangling or "it does not exist")
        if lists_denied and isinstance(error, errors.PermissionDeniedError):
            return Contents(path, State.DENIED, "permission to list it is denied")
        raise
    if (whose := temporary_of(path.name)) is None:
        return found
    return dataclasses.replace(found, state=State.TEMPORARY, why=whose, is_whole=found.is_readable)


def _is_absent(error: errors.StorageError) -> bool:
    return isinstance(error, errors.MissingPathError) or error.errno == errno.ELOOP


def _file(path: Location) -> Contents:
    whole = Contents(path, State.COMPLETE, "", Layout.FILE, {"": Item(Format.MSGPACK, path)}, is_one_checkpoint=True)
    try:
        head = path.head() if path.is_remote else path.read(0, foreign.FIRST_BYTES)
        if not head:
            return Contents(path, State.INCOMPLETE, "the file is empty", Layout.FILE)
        look = foreign.file_looks_like(path, head)
    except errors.StorageError as error:
        if _is_absent(error):
            raise
        if path.exists() and not path.isfile():
            return Contents(path, State.FOREIGN, "something that is not a regular file")
        return whole  # a restore tells why it cannot be read
    if look is None:
        lost = _missing_array(path, head)
        return whole if lost is None else dataclasses.replace(whole, state=State.INCOMPLETE, why=lost)
    if not (read_by := formats.layout_of(path, look)):
        return Contents(path, State.FOREIGN, look, Layout.FILE)
    items = {"": Item(Format.MSGPACK, path, layout=read_by)}
    return Contents(path, State.FOREIGN, look, Layout.READ_ONLY, items, is_one_checkpoint=True)


def _missing_array(file: Location, head: bytes) -> str | None:
    """Return what the arrays in Flax's folder beside a msgpack file lack, in words; ``head`` are its first bytes."""
    folder = file.sibling(steps.ARRAYS_POSTFIX)
    is_all = len(head) < foreign.FIRST_BYTES and not file.is_remote
    if _PLACEHOLDER not in head and (is_all or not folder.isdir()):
        return None
    content = file.read(0, _MAX_REFERRING)
    for match in _REFERENCE.finditer(content):
        length = int.from_bytes(match[match.lastindex or 0], "big") - (0xA0 if match.lastindex == 1 else 0)
        name = content[match.end() : match.end() + length - len(_PLACEHOLDER)].decode(errors="replace")
        if presence.stays_inside(name) and (lost := _missing_in_array(folder / name)):
            return f"{folder.name}/{name}/{lost} is missing"
    return None


def _missing_in_array(folder: Location) -> str | None:
    """Return the name of a file that a zarr array of Flax lacks; it stores every chunk."""
    names = orbax_directory.names_in(folder)
    if layout.ZARR2_METADATA not in names:
        return layout.ZARR2_METADATA
    with suppress(ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError):  # which the reader tells
        fields = json.loads((folder / layout.ZARR2_METADATA).read(0, _MAX_REFERRING))
        counts = [-(-side // chunk) for side, chunk in zip(fields["shape"], fields["chunks"], strict=True)]
        chunks = [name for name in names if layout.ZARR2_CHUNK.fullmatch(name)]
        if len(chunks) < math.prod(counts):
            return f"(one of {math.prod(counts)} chunks)"
    return None


def _directory(path: Location, names: set[str]) -> Contents:
    """Describe a directory, by the rules for those of Orbax."""
    if not names:
        return Contents(path, State.INCOMPLETE, "the directory is empty")
    if path.name.endswith(steps.ARRAYS_POSTFIX) and is_only_arrays(path):
        main = path.name.removesuffix(steps.ARRAYS_POSTFIX)
        return Contents(path, State.INCOMPLETE, f"it holds only the arrays of {main}: restore that file")
    if {"metadata.json", layout.MANIFEST} <= names and not names & {layout.TREE_METADATA, *ITEMS_MARKERS}:
        return Contents(path, State.FOREIGN, foreign.names_look_like(names))  # levanter's
    found = _described(path, names)
    # T5X wrote no file that tells that a save to a store is complete: its last step is to rename.
    upload = None if found.layout is Layout.T5X else path.why_unfinished(names)
    begun = next((name for name in sorted(names) if layout.TEMPORARY in name), None)
    why = upload or (f"the directory still holds {begun}, which Orbax had not finished" if begun else found.why)
    if why and found.layout not in (Layout.TREE, Layout.ARRAYS) and not _looks_begun(path, names):
        return Contents(path, State.FOREIGN, foreign.names_look_like(names))
    is_one = found.layout is not None
    if found.layout is Layout.ITEMS:
        # Before Orbax 0.5.11 nothing but names, and what only a composite has, tells items from checkpoints.
        is_named = names.intersection((*ITEMS_MARKERS, *layout.TREE_ITEMS, *orbax_directory.RANDOM_KEYS))
        is_one = bool(is_named or orbax_directory.only_orbax_has(found.items) or STEP_DIRECTORY.fullmatch(path.name))
    state = State.INCOMPLETE if why else State.COMPLETE
    return dataclasses.replace(found, state=state, why=why, is_upload=upload is not None, is_one_checkpoint=is_one)


def _described(path: Location, names: set[str]) -> Contents:
    """Return layout, items, unknown items and, as ``why``, what is missing of a directory; no layout if it is none."""
    described = functools.partial(Contents, path, State.COMPLETE, is_marked=bool(names.intersection(MARKERS)))
    if orbax_directory.is_tree(path, names):
        kind = Layout.T5X if orbax_directory.is_t5x(path, names) else Layout.TREE
        return described(orbax_directory.missing_in_tree(path, names) or "", kind, {"": Item(Format.ORBAX, path)})
    # Folders of arrays, and nothing that is the tree of them, nor a single array.
    others = (*layout.ARRAY_METADATA_FILES, *FINISHED, *orbax_directory.PARTS)
    if not names.intersection(others) and orbax_directory.is_folder_of_arrays(path, names):
        return described(_LOST_STRUCTURE, Layout.ARRAYS)
    handlers = orbax_directory.recorded_handlers(path, names)
    flat = handlers.get("", "")  # of a directory that is one item
    if flat and (part := orbax_directory.missing_part(path, names, flat)):
        kind = Layout.JSON if "Json" in flat else Layout.TREE
        return described(f"{part} {orbax_directory.RECORDED}", kind)
    recorded, has_keys = orbax_directory.kind_of_handler(flat), not names.isdisjoint(orbax_directory.RANDOM_KEYS)
    # Of the known handlers, that of random keys alone leaves their folders; JSON may have any file beside it.
    is_as_recorded = recorded is ItemKind.JSON or has_keys == (recorded is ItemKind.KEY)
    if is_as_recorded and (item := orbax_directory.item_of(path, names, flat)):
        return described("", Layout.TREE if item.format else Layout.JSON, {"": item})
    if not flat and ((items := orbax_directory.items_in(path, names, handlers)) or handlers):
        rest = names - items.keys() - orbax_directory.NO_ITEMS
        unknown = tuple(sorted(name for name in rest if (path / name).isdir()))
        missing = next(orbax_directory.missing_in_items(path, names, items, handlers), "")
        return described(missing, Layout.ITEMS, items, unknown)
    if orbax_directory.lost_structure(path, names):
        return described(_LOST_STRUCTURE, Layout.TREE)
    if names.issuperset(FINISHED) and any(holds_files(path / name) for name in names.difference(FINISHED)):
        return described("", Layout.CUSTOM)
    missing = f"none of {layout.TREE_METADATA}, {layout.MANIFEST} or item directories is in it"
    is_step = names <= {*FINISHED, *ITEMS_MARKERS}
    return described(missing, Layout.CUSTOM if is_step else None)


def _looks_begun(path: Location, names: set[str]) -> bool:
    """Return whether a directory has no file, or is a checkpoint that was begun: it, or an item, has a marker."""
    if names.intersection(MARKERS) or orbax_directory.lost_structure(path, names) or not holds_files(path):
        return True
    inside = {(path / name): orbax_directory.names_in(path / name) for name in names}
    if any(_is_whole_checkpoint(child, found) for child, found in inside.items()):
        return False  # a directory of checkpoints, which would be lost with it
    if _has_sign(path, names) or any(_has_sign(child, found) for child, found in inside.items()):
        return True
    return orbax_directory.only_orbax_has(orbax_directory.items_in(path, names))


def _is_whole_checkpoint(path: Location, inside: set[str]) -> bool:
    """Return whether a path in a directory without markers is a checkpoint of its own; ``inside`` has its names."""
    if steps.is_foreign(path.name) or layout.is_upload_marker(path.name):
        return False
    if inside:
        return orbax_directory.is_checkpoint_itself(path.name, inside, is_marked=False) and _has_sign(path, inside)
    with suppress(errors.MissingPathError):  # removed meanwhile
        return steps.split_step(path.name) is not None and path.isfile() and foreign.may_be_msgpack_tree(path)
    return False


def _has_sign(path: Location, names: set[str]) -> bool:
    # A checkpoint that is being removed from a store may have only commit_success.txt left.
    if names.intersection((*MARKERS, *FINISHED)) or orbax_directory.lost_structure(path, names):
        return True
    return any(layout.TEMPORARY in name or layout.is_upload_marker(name) for name in names)
