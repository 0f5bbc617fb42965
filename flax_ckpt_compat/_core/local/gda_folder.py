"""Publish a msgpack file and the folder of arrays beside it as one atomic step.

The folder of a new checkpoint is renamed before its file. To replace one, the new arrays go into a uniquely named
subfolder (a generation) of its folder, where the new file refers to them; once that is renamed, the old arrays go.
Until then the temporary's own folder stays: a crash leaves it, and the file tells which arrays count.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from flax_ckpt_compat._core.local import presence, temporaries
from flax_ckpt_compat._core.local.syncing import delete_tree, sync_directory
from flax_ckpt_compat._core.numbered_names import ARRAYS_PLACEHOLDER, ARRAYS_POSTFIX
from flax_ckpt_compat._core.orbax_layout import ZARR2_CHUNK, ZARR2_METADATA

_BLOCK = 1 << 20  # bytes
_log = logging.getLogger("flax_ckpt_compat")


def folder_of(path: str) -> str:
    """Return the folder of arrays of a checkpoint or a temporary."""
    return path + ARRAYS_POSTFIX


def begin(temporary: str) -> None:
    """Create the folder for a temporary's arrays, with that of a generation where the final name is taken."""
    final, folder = temporaries.destination(temporary), folder_of(temporary)
    temporaries.create_directory(folder)
    if final is None or presence.lexists(final) or presence.lexists(folder_of(final)):
        os.mkdir(os.path.join(folder, temporaries.generation_of(temporary)))


def generation_prefix(temporary: str) -> str:
    """Return the prefix of the arrays' paths in the file, as `begin` chose it: empty, or a generation and a slash."""
    generation = temporaries.generation_of(temporary)
    return f"{generation}/" if generation and presence.isdir(os.path.join(folder_of(temporary), generation)) else ""


@contextmanager
def moved(temporary: str, final: str) -> Iterator[None]:
    """Move a temporary's arrays to where its file refers to them, for a block that renames the file; then settle."""
    own, folder, generation = folder_of(temporary), folder_of(final), generation_prefix(temporary).rstrip("/")
    is_new = not generation and presence.isdir(own)
    try:
        if generation:
            os.makedirs(folder, exist_ok=True)
            os.rename(os.path.join(own, generation), os.path.join(folder, generation))
            sync_directory(folder)
        elif is_new:
            os.rename(own, folder)
        elif presence.isdir(folder):
            temporaries.create_directory(own)
        if presence.isdir(folder):
            sync_directory(os.path.dirname(final))
        yield
    except BaseException:
        with suppress(OSError):  # the next save does the rest
            if is_new and not presence.isdir(own) and not presence.lexists(final):
                os.rename(folder, own)
            settle(temporary, final)
        raise
    try:
        if not is_new:
            with suppress(*temporaries.GONE):  # other writers remove them, too
                settle(temporary, final, is_published=True)
            _remove_empty(own)
    except OSError as error:  # the checkpoint itself is complete
        _log.warning("Cannot remove replaced arrays in %s: %s", folder, error)
    finally:
        temporaries.release(own)


def settle(temporary: str, final: str | None = None, *, is_published: bool = False) -> None:
    """Complete or undo the move of arrays, given the file or folder of a temporary, as the published file says.

    A file that was not replaced keeps its arrays, even if it is damaged, or a link that leads nowhere for now."""
    own = temporary.removesuffix(ARRAYS_POSTFIX) if temporary.endswith(2 * ARRAYS_POSTFIX) else temporary
    final, generation = final or temporaries.destination(own), temporaries.generation_of(own)
    if final is None or not generation or not presence.isdir(folder := folder_of(final)):
        return
    moved_to, replaced = os.path.join(folder, generation), _replaced_generations(final, generation)
    is_moved = presence.isdir(moved_to)
    is_published = presence.isfile(final) and (is_published or not (presence.lexists(own) or generation_prefix(own)))
    if is_moved and not _refers(final, generation):
        delete_tree(moved_to)
        sync_directory(folder)  # before the temporary goes, by which it would be found again
    elif is_moved or presence.isdir(final) or (is_published and not _refers(final, ARRAYS_PLACEHOLDER)):
        sync_directory(os.path.dirname(final))  # else a power loss brings back the file that refers to others
        for name in replaced:
            delete_tree(os.path.join(folder, name))
        _remove_arrays(folder)
    _remove_empty(folder)


def _refers(file: str, text: str) -> bool:
    """Return whether a msgpack file refers to arrays by a text, their unique generation or what begins a reference."""
    wanted, rest = text.encode(), b""
    with suppress(FileNotFoundError, IsADirectoryError), open(file, "rb") as opened:
        while block := opened.read(_BLOCK):
            if wanted in rest + block:
                return True
            rest = block[-len(wanted) :]
    return False


def _replaced_generations(final: str, generation: str) -> list[str]:
    """Return the generations beside one, without those whose writer has a temporary: its file may be renamed next."""
    entries = os.listdir(folder_of(final))
    # Listed after the entries, so that a generation without a temporary is an old one.
    pending = {temporaries.generation_of(name) for name in os.listdir(os.path.dirname(final) or os.curdir)}
    return [name for name in entries if temporaries.is_generation(name) and name not in {*pending, generation}]


def remove_orphan(folder: str) -> None:
    """Remove arrays and old generations without a file; a save that begins meanwhile writes to a new generation."""
    for name in filter(temporaries.is_generation, os.listdir(folder)):
        if temporaries.is_long_unchanged(generation := os.path.join(folder, name)):
            delete_tree(generation)
    _remove_arrays(folder)


def _remove_arrays(folder: str) -> None:
    """Remove arrays and the folders that only held arrays, this one too; keep generations and everything else."""
    entries = list(os.scandir(folder))
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not temporaries.is_generation(entry.name):
            _remove_arrays(entry.path)
    if any(entry.name == ZARR2_METADATA for entry in entries):
        for entry in entries:
            if ZARR2_CHUNK.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        os.unlink(os.path.join(folder, ZARR2_METADATA))  # last: it is the mark of an array
    _remove_empty(folder)


def _remove_empty(folder: str) -> None:
    with suppress(OSError):
        os.rmdir(folder)
