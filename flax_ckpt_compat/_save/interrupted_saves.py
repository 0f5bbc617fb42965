"""Find and remove what interrupted saves left behind: temporaries, uploads, and arrays without their checkpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator

from flax_ckpt_compat._core import paths, steps
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic, gda_folder, presence, temporaries
from flax_ckpt_compat._core.object_store import removal
from flax_ckpt_compat._core.orbax_layout import PARTIAL_SAVE, TEMPORARY, ZARR2_METADATA
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._discovery import contents, not_found, walk

_FLAX_TEMPORARIES = ("checkpoint_" + steps.FLAX_TEMPORARY, "checkpoint_" + steps.FLAX_TEMPORARY + steps.ARRAYS_POSTFIX)


@dataclasses.dataclass(frozen=True, slots=True)
class Leftover:
    """Something that an interrupted save left behind."""

    path: str  # of the file or directory, or URL
    what: str
    nbytes: int  # size in bytes; in a store, of the whole folder, of which only the unfinished part goes
    kept: str = ""  # why it is not removed: who may still write it; empty if it can go


def find_leftovers(root: str) -> list[Leftover]:
    """Return what interrupted saves left in a directory and all below it, what may still be written included."""
    if not paths.isdir(root):
        raise not_found.no_directory(root).error(root)
    denied: list[StorageError] = []
    found = [leftover for folder, _ in walk.folders_below(root, denied) for leftover in in_folder(folder)]
    why = "the system refused to list it"
    return [*found, *(Leftover(str(error.path), "a directory, perhaps with more", 0, why) for error in denied)]


def remove(leftover: Leftover) -> bool:
    """Remove a leftover if still nobody may write it; return whether it is gone. What is not ours in it stays."""
    folder, name = os.path.split(leftover.path)
    if any(not one.kept for one in in_folder(folder, [name])):
        with translated(leftover.path):
            _remove(folder, name)
    return not list(in_folder(folder, [name]))


def _remove(folder: str, name: str) -> None:
    path = os.path.join(folder, name)
    if paths.is_url(folder):
        removal.remove_stale(folder, [name])
    elif temporaries.is_temporary(name):
        atomic.remove_stale(folder, [name])
    elif name.endswith(steps.ARRAYS_POSTFIX) and name not in _FLAX_TEMPORARIES:
        gda_folder.remove_orphan(path)
    else:
        for error in atomic.discard([path]).values():
            raise error


def in_folder(folder: str, names: Collection[str] | None = None) -> Iterator[Leftover]:
    """Yield the leftovers directly in a folder (absolute path, or URL), or those with these names."""
    if paths.is_url(folder):
        yield from (one for one in _in_store(folder) if names is None or os.path.basename(one.path) in names)
        return
    if names is None:
        with translated(folder):
            names = sorted(os.listdir(folder))
    stale = set(atomic.stale_names(folder, names))
    for name in names:
        path = os.path.join(folder, name)
        if not presence.lexists(path):
            continue
        if temporaries.is_temporary(name):
            match = temporaries.parse(name)
            assert match is not None
            kept = "" if name in stale else "its writer may be running"
            what = f"unfinished save of {match['name']}"
            if match["role"] == "old":
                is_there = presence.lexists(os.path.join(folder, match["name"]))
                what = f"replaced {match['name']}" if is_there else f"{match['name']}, set aside: it is put back"
            yield Leftover(path, what, _size(path), kept)
        elif PARTIAL_SAVE in name:
            whose = contents.temporary_of(name)
            yield Leftover(path, whose or "", _size(path), "it holds values that were saved, and can be completed")
        elif TEMPORARY in name:
            yield _of_others(path, f"unfinished save of {name.partition(TEMPORARY)[0]} by Orbax")
        elif name in _FLAX_TEMPORARIES and contents.is_only_arrays(path):  # or a file
            yield _of_others(path, "unfinished save by Flax")
        elif name.endswith(steps.ARRAYS_POSTFIX) and _is_orphan(path):
            main = path.removesuffix(steps.ARRAYS_POSTFIX)
            found = _of_others(path, f"arrays of {os.path.basename(main)}, which does not exist")
            is_live = atomic.has_live_writer(main)
            yield dataclasses.replace(found, kept="a save of it may be running") if is_live else found


def _of_others(path: str, what: str) -> Leftover:
    """Return a leftover of a writer that does not say which process it is: what changed within a day stays."""
    kept = "" if temporaries.is_long_unchanged(path) else "changed in the last 24 hours, so its writer may be running"
    return Leftover(path, what, _size(path), kept)


def _is_orphan(folder: str) -> bool:
    """Return whether a folder holds the arrays of a msgpack file that does not exist."""
    main = folder.removesuffix(steps.ARRAYS_POSTFIX)
    # Directories of Orbax's format have no arrays beside them.
    if not presence.isdir(folder) or (presence.lexists(main) and not presence.isdir(main)):
        return False
    if not contents.is_only_arrays(folder):
        return False
    files = [name for _, _, names in os.walk(folder) for name in names]
    # An interrupted removal may have left an empty one.
    return ZARR2_METADATA in files or (not files and main[-1:].isdecimal())


def _in_store(folder: str) -> Iterator[Leftover]:
    for name in removal.stale_names(folder):
        path = f"{folder}/{name}"
        is_whole = removal.is_removed_whole(folder, name)
        what = "unfinished upload" if is_whole else "what an unfinished upload left in a complete checkpoint"
        yield Leftover(path, what, _size(path))


def _size(path: str) -> int:
    return paths.storage_of(path).total_size(path)
