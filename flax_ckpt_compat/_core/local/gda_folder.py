"""Publish a msgpack file and the folder of arrays beside it as one atomic step.

The folder of a new checkpoint is renamed before its file. To replace a checkpoint, the new arrays go into a uniquely
named subfolder (a generation) of the existing folder, where the new file refers to them. Renaming the file replaces
both; the old arrays are removed afterwards. A second hard link to the new file, the link marker, shows after a crash
whether the rename happened: it did if both names lead to the same file.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.local.syncing import delete_tree, sync_directory
from flax_ckpt_compat._core.orbax_layout import ZARR2_CHUNK, ZARR2_METADATA
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX

_log = logging.getLogger("flax_ckpt_compat")


def folder_of(path: str) -> str:
    """Return the folder of arrays of a checkpoint or a temporary."""
    return path + ARRAYS_POSTFIX


def begin(temporary: str) -> None:
    """Create the folder for a temporary's arrays, with that of a generation where the final name is taken."""
    final, generation = temporaries.destination(temporary), temporaries.generation_of(temporary)
    folder = folder_of(temporary)
    temporaries.create_directory(folder, lock_file=False)
    taken = final is None or presence.lexists(final) or presence.lexists(folder_of(final))
    if generation is not None and taken:
        os.mkdir(os.path.join(folder, generation))


def generation_prefix(temporary: str) -> str:
    """Return the prefix of the arrays' paths in the file, as `begin` chose it: empty, or a generation and a slash."""
    generation = temporaries.generation_of(temporary)
    return f"{generation}/" if generation and presence.isdir(os.path.join(folder_of(temporary), generation)) else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """Steps done by `place_arrays`, for `undo` and `remove_replaced`."""

    temporary: str
    final: str
    identity: tuple[int, int]  # device and inode of the file ``temporary``, which its rename to ``final`` keeps
    generation: str | None = None  # subfolder of its arrays, or None
    marker: str | None = None  # second hard link to the file, or None
    renamed: bool = False  # the folder of arrays has its final name
    replaces: bool = False  # older arrays must be removed after the file's rename


def place_arrays(temporary: str, final: str) -> Move:
    """Move the arrays of a finished temporary to the place that the renamed file refers to."""
    identity = _identity(temporary)
    own, folder, generation = folder_of(temporary), folder_of(final), generation_prefix(temporary).rstrip("/")
    if presence.isdir(own) and not generation:
        _rename_folder(own, folder)
        return Move(temporary, final, identity, renamed=True)
    if not generation and not presence.isdir(folder):
        return Move(temporary, final, identity)
    move = Move(temporary, final, identity, generation or None, _link_marker(temporary), replaces=True)
    if generation:
        os.makedirs(folder, exist_ok=True)
        os.rename(os.path.join(own, generation), os.path.join(folder, generation))
        sync_directory(folder)
    sync_directory(os.path.dirname(final))
    return move


def _rename_folder(own: str, folder: str) -> None:
    try:
        os.rename(own, folder)
    except OSError as error:
        if not temporaries.is_taken(error):
            raise
        message = f"{folder}: another save wrote the same checkpoint after this one began; save it again"
        raise StorageError(message, path=folder, errno=error.errno) from error
    sync_directory(os.path.dirname(folder))


def _link_marker(temporary: str) -> str | None:
    marker = temporaries.link_marker_of(temporary)
    if marker is None or presence.isdir(temporary):
        return None
    try:
        os.link(temporary, marker)
    except OSError:  # no hard links on this file system: a crash can leave old arrays behind, which is harmless
        return None
    sync_directory(os.path.dirname(temporary))
    return marker


def remove_replaced(move: Move) -> None:
    """Remove the arrays that the renamed file replaced; log a warning on failure."""
    if not move.replaces:
        return
    try:
        _remove_replaced(move)
        _remove_empty(folder_of(move.temporary))
        if move.marker is not None:
            os.unlink(move.marker)
    except OSError as error:  # the checkpoint itself is complete
        _log.warning("Cannot remove replaced arrays in %s: %s", folder_of(move.final), error)


def undo(move: Move) -> None:
    """Undo `place_arrays` after the rename of the file failed."""
    if _is_published(move):  # interrupted after the rename
        return
    with suppress(OSError):  # `recover` removes the rest later
        if move.renamed:
            os.rename(folder_of(move.final), folder_of(move.temporary))
        if move.generation is not None:
            if presence.isdir(generation := os.path.join(folder_of(move.final), move.generation)):
                delete_tree(generation)
            _remove_empty(folder_of(move.final))
        if move.marker is not None:
            os.unlink(move.marker)


def recover(marker: str) -> None:
    """Complete the save of a dead writer by its link marker: `remove_replaced` or `undo`."""
    final = temporaries.destination(marker)
    if final is None:
        return
    generation = temporaries.generation_of(marker)
    move = Move(marker, final, _identity(marker), generation, marker, replaces=True)
    if _is_published(move):
        sync_directory(os.path.dirname(final))  # its writer may have died before it did
        remove_replaced(move)
    else:
        undo(move)


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _is_published(move: Move) -> bool:
    try:
        return _identity(move.final) == move.identity
    except temporaries.GONE:
        return False


def _remove_replaced(move: Move) -> None:
    folder = folder_of(move.final)
    try:
        entries = os.listdir(folder)
    except temporaries.GONE:
        return
    # Generations of writers whose file is not renamed yet. Listed after the entries, so that a generation
    # without a marker is an old one.
    siblings = os.listdir(os.path.dirname(move.final))
    pending = {temporaries.generation_of(name) for name in siblings if is_link_marker(name)}
    if not _is_published(move):
        return  # another writer replaced this checkpoint: the arrays may be its own
    for name in entries:
        if temporaries.is_generation(name) and name != move.generation and name not in pending:
            delete_tree(os.path.join(folder, name))
    _remove_arrays(folder)
    _remove_empty(folder)


def is_link_marker(name: str) -> bool:
    """Return whether a name is that of a link marker."""
    match = temporaries.parse(name)
    return match is not None and match["role"] == "put"


def remove_orphan(folder: str) -> None:
    """Remove a folder whose checkpoint does not exist: arrays and old generations; keep everything else.

    A save that begins meanwhile writes to a new generation, because the folder is there.
    """
    for name in filter(temporaries.is_generation, os.listdir(folder)):
        if temporaries.is_long_unchanged(generation := os.path.join(folder, name)):
            delete_tree(generation)
    _remove_arrays(folder)
    _remove_empty(folder)


def _remove_arrays(folder: str) -> None:
    """Remove arrays and the folders that only held arrays; keep generations and everything else."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not temporaries.is_generation(entry.name):
            _remove_arrays(entry.path)
            _remove_empty(entry.path)
    if any(entry.name == ZARR2_METADATA for entry in entries):
        for entry in entries:
            if ZARR2_CHUNK.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        os.unlink(os.path.join(folder, ZARR2_METADATA))  # last: it is the mark of an array


def _remove_empty(folder: str) -> None:
    with suppress(OSError):
        os.rmdir(folder)
