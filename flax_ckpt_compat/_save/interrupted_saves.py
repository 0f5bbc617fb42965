"""Find and remove what interrupted saves left behind: temporaries, uploads, and arrays without their checkpoint."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from flax_ckpt_compat._core.errors import FULL_DISK, StorageError, add_sentence, translated
from flax_ckpt_compat._core.local import atomic, gda_folder, presence, temporaries
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.orbax_layout import PARTIAL_SAVE, TEMPORARY, ZARR2_METADATA
from flax_ckpt_compat._discovery import contents, locating, steps, walk

_FLAX_TEMPORARIES = ("checkpoint_" + steps.FLAX_TEMPORARY, "checkpoint_" + steps.FLAX_TEMPORARY + steps.ARRAYS_POSTFIX)
_REMOVED_MEANWHILE = (
    "If another program removed the unfinished save meanwhile, as orbax's CheckpointManager does with "
    "cleanup_tmp_directories=True: create such a manager before you save, or save to another directory."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Leftover:
    """Something that an interrupted save left behind."""

    location: Location  # of the file or directory
    what: str
    nbytes: int  # size in bytes; in a store, of the whole folder, of which only the unfinished part goes
    kept: str = ""  # why it is not removed: who may still write it; empty if it can go
    by_time: bool = False  # it is kept because it was changed not long ago, and for nothing else


def find_leftovers(root: Location) -> list[Leftover]:
    """Return what interrupted saves left in a directory and all below it, what may still be written included."""
    if not root.isdir():
        raise locating.no_directory(root).error(root)
    denied: list[StorageError] = []
    found = [leftover for folder, _ in walk.folders_below(root, denied) for leftover in in_folder(folder)]
    what, why = "a directory, perhaps with more", "the system refused to list it"
    return [*found, *(Leftover(root.at(str(error.path)), what, 0, why) for error in denied)]


def remove(leftover: Leftover, *, force: bool = False) -> bool:
    """Remove a leftover if still nobody may write it; with ``force`` what only time protects; return if it is gone."""
    folder, name = leftover.location.parent, leftover.location.name
    if any(not one.kept or (force and one.by_time) for one in in_folder(folder, [name])):
        with translated(leftover.location.path):
            if folder.is_remote:
                folder.leftovers(remove=[name])
            elif temporaries.parse(name):
                atomic.remove_stale(folder.path, [name], force=force)
            elif name.endswith(steps.ARRAYS_POSTFIX) and name not in _FLAX_TEMPORARIES:
                gda_folder.remove_orphan(leftover.location.path)
            else:
                for error in folder.discard([name]).values():
                    raise error
    return not list(in_folder(folder, [name]))


@contextmanager
def explaining_failures(location: Location) -> Iterator[None]:
    """Let an error say how to free space on a full disk, or who may have removed what was being written."""
    try:
        yield
    except StorageError as error:
        if error.errno == errno.ENOENT and location.parent.isdir():
            add_sentence(error, _REMOVED_MEANWHILE)
        if error.errno in FULL_DISK:
            add_sentence(error, f"`flax-ckpt clean {location.parent}` removes what interrupted saves left.")
        raise


def in_folder(folder: Location, names: Collection[str] | None = None) -> Iterator[Leftover]:
    """Yield the leftovers directly in a folder, or those with these names."""
    if folder.is_remote:
        for name, is_whole in folder.leftovers().items():
            if names is None or name in names:
                what = "unfinished upload" if is_whole else "what an unfinished upload left in a complete checkpoint"
                yield Leftover(folder / name, what, (folder / name).total_size())
        return
    if names is None:
        with translated(folder.path):
            names = sorted(os.listdir(folder.path))
    for name in names:
        location = folder / name
        if presence.lexists(location.path) and (found := _look(location)):
            what, kept, by_time = found
            yield Leftover(location, what, location.total_size(), kept, by_time)


def _look(location: Location) -> tuple[str, str, bool] | None:
    """Return what a local leftover is, why it is kept, and whether only time keeps it; None for anything else."""
    name, main = location.name, location.path.removesuffix(steps.ARRAYS_POSTFIX)
    if match := temporaries.parse(name):
        writer = temporaries.writer_of(match, location.path)
        elsewhere = ", on another machine or in another container: it was changed lately"
        kept = "" if writer == "dead" else "its writer may be running" + (elsewhere if writer == "perhaps" else "")
        what = f"unfinished save of {match['name']}"
        if match["role"] == "old":
            is_there = (location.parent / match["name"]).exists()
            what = f"replaced {match['name']}" if is_there else f"{match['name']}, set aside: it is put back"
        return what, kept, writer == "perhaps"
    if PARTIAL_SAVE in name:
        return contents.temporary_of(name) or "", "it holds values that were saved, and can be completed", False
    if TEMPORARY in name:
        what = f"unfinished save of {name.partition(TEMPORARY)[0]} by Orbax"
    elif name in _FLAX_TEMPORARIES and contents.is_only_arrays(location):  # or a file
        what = "unfinished save by Flax"
    elif main != location.path and _is_orphan(location.path, main):
        what = f"arrays of {os.path.basename(main)}, which does not exist"
    else:
        return None
    # Its writer does not say which process it is: what changed within a day stays.
    is_old = temporaries.is_long_unchanged(location.path)
    return what, "" if is_old else "changed in the last 24 hours, so its writer may be running", not is_old


def _is_orphan(folder: str, main: str) -> bool:
    """Return whether a folder holds arrays of a msgpack file that is not there; Orbax's format has none beside it."""
    has_main = presence.lexists(main) and not presence.isdir(main)
    if has_main or not presence.isdir(folder) or not contents.is_only_arrays(location_of(folder)):
        return False
    files = [name for _, _, names in os.walk(folder) for name in names]
    # An interrupted removal may have left an empty one.
    return ZARR2_METADATA in files or (not files and main[-1:].isdecimal())
