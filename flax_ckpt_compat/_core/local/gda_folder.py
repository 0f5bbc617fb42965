"""The folder of arrays beside a msgpack file, and how both are replaced without a moment in which they disagree.

A new checkpoint's folder is renamed before its file. Where the name is taken, the old arrays must stay as long as
the old file does: the new ones then go into a subfolder with a name of its own (a nest) in the same folder, where
the new file looks for them; renaming the file replaces both, and only then do the old arrays go. A second link to
the new file, the witness, tells after a crash whether the renaming took place: whether it is the same file as the
one that now has the name.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
import shutil
from contextlib import suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import temporaries
from flax_ckpt_compat._core.local.syncing import sync_directory
from flax_ckpt_compat._core.orbax_layout import ZARR2_CHUNK_PATTERN, ZARR2_METADATA
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX

_log = logging.getLogger("flax_ckpt_compat")
_CHUNK = re.compile(ZARR2_CHUNK_PATTERN)


def folder_of(path: str) -> str:
    """The folder of a checkpoint's, or a temporary's, arrays."""
    return path + ARRAYS_POSTFIX


def begin(temporary: str) -> str:
    """Makes the folder for a temporary's arrays; see `nest_in`.

    Returns:
        What stands before every array's path in the file: empty, or a nest and a slash.
    """
    final, nest = temporaries.destination(temporary), temporaries.nest_of(temporary)
    folder = folder_of(temporary)
    os.mkdir(folder)
    taken = final is None or os.path.lexists(final) or os.path.lexists(folder_of(final))
    if nest is not None and taken:
        os.mkdir(os.path.join(folder, nest))
    return nest_in(temporary)


def nest_in(temporary: str) -> str:
    """What stands before every array's path, as `begin` decided."""
    nest = temporaries.nest_of(temporary)
    return f"{nest}/" if nest and os.path.isdir(os.path.join(folder_of(temporary), nest)) else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """What `move_in` did.

    Attributes:
        temporary: path of the file that gets its final name next.
        final: that name.
        identity: device and inode of the file, which its renaming does not change.
        nest: the subfolder that its arrays are in, or None.
        witness: the second link to the file, or None.
        renamed: the folder of arrays got its final name.
        replaces: other arrays are to be removed after the file's renaming.
    """

    temporary: str
    final: str
    identity: tuple[int, int]
    nest: str | None = None
    witness: str | None = None
    renamed: bool = False
    replaces: bool = False


def move_in(temporary: str, final: str) -> Move:
    """Puts the arrays of a finished temporary where the file will look for them once it has its final name."""
    identity = _identity(temporary)
    own, folder, nest = folder_of(temporary), folder_of(final), nest_in(temporary).rstrip("/")
    if os.path.isdir(own) and not nest:
        _rename_folder(own, folder)
        return Move(temporary, final, identity, renamed=True)
    if not nest and not os.path.isdir(folder):
        return Move(temporary, final, identity)
    move = Move(temporary, final, identity, nest or None, _testify(temporary), replaces=True)
    if nest:
        os.makedirs(folder, exist_ok=True)
        os.rename(os.path.join(own, nest), os.path.join(folder, nest))
        sync_directory(folder)
    sync_directory(os.path.dirname(final))
    return move


def _rename_folder(own: str, folder: str) -> None:
    try:
        os.rename(own, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        message = f"{folder} was not there when this save began: another one wrote the same checkpoint; save it again"
        raise StorageError(message, path=folder, errno=error.errno) from error
    sync_directory(os.path.dirname(folder))


def _testify(temporary: str) -> str | None:
    witness = temporaries.witness_of(temporary)
    if witness is None or os.path.isdir(temporary):
        return None
    try:
        os.link(temporary, witness)
    except OSError:  # a file system without hard links: a crash can leave old arrays behind, and does no harm
        return None
    sync_directory(os.path.dirname(temporary))
    return witness


def remove_replaced(move: Move) -> None:
    """Removes the arrays that the file, now renamed, replaced; what cannot be removed is named in a warning."""
    if not move.replaces:
        return
    try:
        _remove_replaced(move)
        _remove_empty(folder_of(move.temporary))
        if move.witness is not None:
            os.unlink(move.witness)
    except OSError as error:  # the checkpoint itself is complete
        _log.warning("Cannot remove all that was replaced in %s: %s", folder_of(move.final), error)


def undo(move: Move) -> None:
    """Takes the arrays out again after the renaming of the file failed, which the caller reports."""
    if _has_its_name(move):  # it was interrupted after the renaming
        return
    with suppress(OSError):  # what this leaves is removed later, because of the witness
        if move.renamed:
            os.rename(folder_of(move.final), folder_of(move.temporary))
        if move.nest is not None:
            if os.path.isdir(nest := os.path.join(folder_of(move.final), move.nest)):
                shutil.rmtree(nest)
            _remove_empty(folder_of(move.final))
        if move.witness is not None:
            os.unlink(move.witness)


def finish(witness: str) -> None:
    """Does what a writer that died would have done next: `remove_replaced` or `undo`."""
    final = temporaries.destination(witness)
    if final is None:
        return
    nest = temporaries.nest_of(witness)
    move = Move(witness, final, _identity(witness), nest, witness, replaces=True)
    if _has_its_name(move):
        remove_replaced(move)
    else:
        undo(move)


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _has_its_name(move: Move) -> bool:
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
    # Writers of the same checkpoint whose file is not renamed yet. Listed after the entries: a nest that belongs to
    # none of them was put in place before.
    others = {temporaries.nest_of(name) for name in os.listdir(os.path.dirname(move.final)) if is_witness(name)}
    if not _has_its_name(move):
        return  # another writer has just replaced this checkpoint: what is there may be its own
    for name in entries:
        if temporaries.is_nest(name) and name != move.nest and name not in others:
            shutil.rmtree(os.path.join(folder, name))
    _remove_arrays(folder)
    _remove_empty(folder)


def is_witness(name: str) -> bool:
    """True for the names of witnesses."""
    match = temporaries.parse(name)
    return match is not None and match["role"] == "put"


def _remove_arrays(folder: str) -> None:
    """Removes arrays and the folders that only held arrays, and nothing that is neither; nests stay."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not temporaries.is_nest(entry.name):
            _remove_arrays(entry.path)
            _remove_empty(entry.path)
    if any(entry.name == ZARR2_METADATA for entry in entries):
        for entry in entries:
            if _CHUNK.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        os.unlink(os.path.join(folder, ZARR2_METADATA))  # last: it is the mark of an array


def _remove_empty(folder: str) -> None:
    with suppress(OSError):
        os.rmdir(folder)
